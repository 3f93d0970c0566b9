"""Decode steps as CUDA graphs: a step of small kernels is bound by the time it takes to launch them, a replay is not.

A graph computes over fixed tensors, so there is one for each size: the number of sequences and their longest context,
both rounded up to powers of two. Missing rows repeat the last one: the same token, position and slot compute and write
the same values twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from services.engine.attention import KvBatch, SinglesView
from services.engine.flashinfer import PagedDecode
from services.engine.model import LoadedModel
from services.engine.plan import Indices, Singles, StepPlan, token_slots
from services.engine.pool import KvPool

SMALLEST_CONTEXT = 256
MOST_ROWS = 256
_WARM_UPS = 3

Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""Takes a computation over fixed tensors; returns what repeats it with their new content."""


def capture_cuda(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Records `compute` as a CUDA graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            compute()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


class GraphedDecode:
    """All graphs of one runner."""

    def __init__(self, model: LoadedModel, pool: KvPool, capture: Capture, library: ModuleType | None) -> None:
        """`library`: FlashInfer, to attend with it instead of torch."""
        self._model, self._pool, self._capture, self._library = model, pool, capture, library
        self._steps: dict[tuple[int, int], _Step] = {}

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Float32 logits (rows, vocab) of a step; None when it is not a step of single tokens that all want logits."""
        singles = plan.singles
        if plan.chunks or singles is None or len(plan.logit_rows) != len(singles.rows) or len(singles.rows) > MOST_ROWS:
            return None
        size = (_power_of_two(len(singles.rows)), _power_of_two(max(SMALLEST_CONTEXT, int(singles.lengths.max()))))
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = _Step(self._model, self._pool, *size, self._library)
        step.fill(plan, singles)
        if step.replay is None:
            step.replay = self._capture(step.compute)
        return step.replay()[: len(singles.rows)].clone()


@dataclass(slots=True)
class _Fixed:
    """The tensors of one size."""

    token_ids: torch.Tensor  # (rows,)
    positions: torch.Tensor  # (rows,)
    write_slots: torch.Tensor  # (rows,)
    slots: torch.Tensor  # (rows, context)


class _Step:
    """One size."""

    def __init__(self, model: LoadedModel, pool: KvPool, rows: int, context: int, library: ModuleType | None) -> None:
        self._model, self._pool, self._rows, self._context = model, pool, rows, context
        device = pool.device

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._fixed = _Fixed(zeros(rows), zeros(rows), zeros(rows), zeros(rows, context))
        self._every_row = torch.arange(rows, device=device)
        blocks = rows * -(-context // pool.block_tokens)
        self._paged = PagedDecode(library, pool.block_tokens, device, batch=rows, blocks=blocks) if library else None
        self.replay: Callable[[], torch.Tensor] | None = None

    def fill(self, plan: StepPlan, singles: Singles) -> None:
        """Brings a step's numbers into the fixed tensors."""
        missing = self._rows - len(singles.rows)
        fixed = self._fixed
        for tensor, values in (
            (fixed.token_ids, plan.token_ids),
            (fixed.positions, plan.positions),
            (fixed.write_slots, plan.write_slots),
        ):
            tensor.copy_(torch.from_numpy(_padded(values, missing)))
        if self._paged:
            last = singles.tables[singles.starts[-1] :]
            starts = np.concatenate((singles.starts, len(singles.tables) + np.arange(missing) * len(last)))
            tables = np.concatenate((singles.tables, np.tile(last, missing)))
            lengths = _padded(singles.lengths, missing)
            rows = np.arange(self._rows, dtype=np.int64)
            self._paged.begin(Singles(rows=rows, lengths=lengths, tables=tables, starts=starts))
            return
        slots = np.empty((self._rows, self._context), dtype=np.int64)
        for row, (start, length) in enumerate(zip(singles.starts.tolist(), singles.lengths.tolist(), strict=True)):
            slots[row, :length] = token_slots(singles.tables[start:], 0, length, self._pool.block_tokens)
            slots[row, length:] = slots[row, 0]
        slots[len(singles.rows) :] = slots[len(singles.rows) - 1]
        fixed.slots.copy_(torch.from_numpy(slots))

    def compute(self) -> torch.Tensor:
        """Float32 logits (rows, vocab) from the fixed tensors alone."""
        fixed = self._fixed
        batch = KvBatch.of_fixed(self._pool, fixed.write_slots, self._view, self._paged)
        return self._model.logits(fixed.token_ids, fixed.positions, self._every_row, batch)

    def _view(self, window: int | None) -> SinglesView:
        """Masks are computed inside the graph: they follow from the positions."""
        fixed = self._fixed
        key = torch.arange(self._context, device=self._pool.device)[None, :]
        position = fixed.positions[:, None]
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        mask = torch.zeros(hidden.shape, dtype=self._model.compute_dtype, device=hidden.device)
        return SinglesView(self._every_row, fixed.slots, mask.masked_fill(hidden, float("-inf"))[:, None, None, :])


def _padded(values: Indices, missing: int) -> Indices:
    return np.concatenate((values, np.repeat(values[-1:], missing)))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
