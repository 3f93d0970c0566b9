"""What FlashInfer's paged decode computes, by its documentation, with plain loops: for tests without a GPU."""

from __future__ import annotations

import torch


class BatchDecodeWithPagedKVCacheWrapper:
    """One query token for each sequence over keys and values (pages, page_size, kv_heads, head_dim)."""

    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        assert workspace.dtype == torch.uint8
        self._room = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._room = len(paged_kv_last_page_len_buffer), len(paged_kv_indices_buffer)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert {indptr.dtype, indices.dtype, last_page_len.dtype} == {torch.int32}
        if self._room is not None:
            assert len(last_page_len) == self._room[0], "a graph is for one number of rows"
            assert len(indices) <= self._room[1]
        self._tables = [indices[a:b].long() for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)]
        self._last = last_page_len.tolist()
        self._shape, self._page_size = (num_qo_heads, num_kv_heads, head_dim), page_size
        self._window, self._cap, self._scale = window_left, logits_soft_cap, sm_scale

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads, kv_heads, dim = self._shape
        assert query.shape == (len(self._tables), heads, dim)
        assert query.is_contiguous()
        out = torch.empty_like(query)
        for row, (table, last) in enumerate(zip(self._tables, self._last, strict=True)):
            length = (len(table) - 1) * self._page_size + last
            first = max(0, length - 1 - self._window) if self._window >= 0 else 0
            keys, values = (
                part[table].flatten(0, 1)[first:length].repeat_interleave(heads // kv_heads, dim=1) for part in cache
            )
            scores = torch.einsum("hd,thd->ht", query[row], keys) * self._scale
            if self._cap:
                scores = self._cap * torch.tanh(scores / self._cap)
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=1), values)
        return out
