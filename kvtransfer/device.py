"""The arena and the staging memory of one device: the only place that knows NumPy from CuPy.

Both have the same array interface here. CuPy is imported when a "cuda:N" device is asked for, never before; UCX is not
stream-ordered, so every copy on a GPU is done when the call returns.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvtransfer import huge_pages
from kvtransfer.errors import TransportUnavailable
from kvtransfer.layout import KvLayout
from kvtransfer.manifest import Piece

Buffer = npt.NDArray[np.uint8]
"""One-dimensional bytes, of NumPy or CuPy."""

# bf16 has no NumPy type; its bits travel as uint16.
ARRAY_TYPES: Final[dict[str, type[np.generic]]] = {"bf16": np.uint16, "fp32": np.float32}


class _Backend(Protocol):
    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[np.generic]: ...
    def bytes(self, count: int) -> Buffer: ...
    def pinned(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[np.generic]: ...
    def to_host(self, blocks: npt.NDArray[np.generic], host: npt.NDArray[np.generic]) -> None: ...
    def to_device(self, host: npt.NDArray[np.generic], blocks: npt.NDArray[np.generic]) -> None: ...
    def synchronize(self) -> None: ...


class _Cpu:
    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        return huge_pages.zeros(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

    def bytes(self, count: int) -> Buffer:
        return np.empty(count, np.uint8)

    def pinned(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        return self.zeros(shape, dtype)

    def to_host(self, blocks: npt.NDArray[np.generic], host: npt.NDArray[np.generic]) -> None:
        host[:] = blocks

    def to_device(self, host: npt.NDArray[np.generic], blocks: npt.NDArray[np.generic]) -> None:
        blocks[:] = host

    def synchronize(self) -> None:
        pass


class _Cuda:
    """CuPy behind the same calls. Allocations live on one device; copies run on that device's current stream, those
    from and to the host on one of their own, beside the kernels.
    """

    def __init__(self, number: int) -> None:
        try:
            self._cupy = importlib.import_module("cupy")
            self._device = self._cupy.cuda.Device(number)
            self._device.use()
            self._swaps = self._cupy.cuda.Stream(non_blocking=True)
        except Exception as error:  # cupy's own error types cannot be named without importing it
            raise TransportUnavailable(f"cuda:{number} cannot be used: {error}") from error

    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        with self._device:
            return cast("npt.NDArray[np.generic]", self._cupy.zeros(shape, dtype))

    def bytes(self, count: int) -> Buffer:
        with self._device:
            return cast("Buffer", self._cupy.empty(count, np.uint8))

    def pinned(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        count = math.prod(shape)
        with self._device:
            memory = self._cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def to_host(self, blocks: npt.NDArray[np.generic], host: npt.NDArray[np.generic]) -> None:
        with self._device, self._swaps:
            self._cupy.ascontiguousarray(blocks).get(out=host)
            self._swaps.synchronize()

    def to_device(self, host: npt.NDArray[np.generic], blocks: npt.NDArray[np.generic]) -> None:
        with self._device, self._swaps:
            blocks[:] = self._cupy.asarray(host)
            self._swaps.synchronize()

    def synchronize(self) -> None:
        with self._device:
            self._cupy.cuda.get_current_stream().synchronize()


class Arena:
    """All KV blocks of one worker, in one allocation.

    `array` has the shape (layers, 2, blocks, block_tokens, kv_heads, head_dim) of this shard, 2 for K and V, and the
    type float32 or, for bf16, uint16. Who may write which block is the block pool's business, not the arena's.
    """

    def __init__(self, layout: KvLayout, blocks: int, device: str = "cpu") -> None:
        self.layout: Final = layout
        self.blocks: Final = blocks
        self.device: Final = device
        self.backend: Final = _backend(device)
        heads = (layout.local_heads, layout.head_dim)
        shape = (layout.local_layers, 2, blocks, layout.block_tokens, *heads)
        self.array: Final = self.backend.zeros(shape, ARRAY_TYPES[layout.dtype])
        # The same memory with blocks and their tokens as one axis of slots.
        self._slots = self.array.reshape(layout.local_layers, 2, blocks * layout.block_tokens, *heads)

    def staging(self, count: int) -> Buffer:
        """Allocates a staging buffer of `count` bytes on the arena's device."""
        return self.backend.bytes(count)

    def gather(self, piece: Piece, block_ids: Sequence[int], buffer: Buffer) -> None:
        """Copies the piece's KV out of the sequence's blocks into buffer[:piece.bytes]. Releases the GIL while
        copying.
        """
        packed = self._packed(piece, buffer)
        for tokens, slots in self._runs(piece, block_ids):
            packed[:, :, tokens] = self._layers(piece)[:, :, slots]
        self.backend.synchronize()

    def scatter(self, piece: Piece, block_ids: Sequence[int], buffer: Buffer) -> None:
        """Copies buffer[:piece.bytes] into the sequence's blocks, and touches nothing else of them."""
        packed = self._packed(piece, buffer)
        for tokens, slots in self._runs(piece, block_ids):
            self._layers(piece)[:, :, slots] = packed[:, :, tokens]
        self.backend.synchronize()

    def _packed(self, piece: Piece, buffer: Buffer) -> npt.NDArray[np.generic]:
        layout = self.layout
        shape = (piece.layers, 2, piece.tokens, layout.local_heads, layout.head_dim)
        typed = buffer[: piece.bytes].view(ARRAY_TYPES[layout.dtype])
        return cast("npt.NDArray[np.generic]", typed.reshape(shape))

    def _layers(self, piece: Piece) -> npt.NDArray[np.generic]:
        first = self.layout.layer_begin
        return self._slots[piece.layer_begin - first : piece.layer_end - first]

    def _runs(self, piece: Piece, block_ids: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """Pairs of (tokens within the piece, slots of the arena), one for each run of blocks that are neighbours."""
        size = self.layout.block_tokens
        token = piece.token_begin
        while token < piece.token_end:
            block = token // size
            if not 0 <= block_ids[block] < self.blocks:
                raise ValueError(f"block {block_ids[block]} is not within [0, {self.blocks})")
            last = block
            while (last + 1) * size < piece.token_end and block_ids[last + 1] == block_ids[last] + 1:
                last += 1
            end = min(piece.token_end, (last + 1) * size)
            slot = block_ids[block] * size + token % size
            begin = token - piece.token_begin
            yield slice(begin, begin + end - token), slice(slot, slot + end - token)
            token = end


class HostArena:
    """Blocks in host memory for those of an arena that have to give way: pinned where the arena is on a GPU.

    `array` has the shape (blocks, layers, 2, block_tokens, kv_heads, head_dim): what a block of the arena holds lies
    together. Copies are done when the calls return, and run without the GIL.
    """

    def __init__(self, arena: Arena, blocks: int) -> None:
        self._arena = arena
        layers, two, _, *inner = arena.array.shape
        self.array: Final = arena.backend.pinned((blocks, layers, two, *inner), ARRAY_TYPES[arena.layout.dtype])

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks of the arena into as many of the host."""
        for device, host in self._pairs(blocks, host_blocks):
            self._arena.backend.to_host(device, host)

    def restore(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies blocks of the host into as many of the arena."""
        for device, host in self._pairs(blocks, host_blocks):
            self._arena.backend.to_device(host, device)

    def _pairs(
        self, blocks: Sequence[int], host_blocks: Sequence[int]
    ) -> Iterator[tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]]:
        """Views of the same shape on the arena and on the host, one pair for each run of neighbours in both."""
        if len(blocks) != len(host_blocks):
            raise ValueError(f"{len(blocks)} blocks of the device and {len(host_blocks)} of the host are no pairs")
        begin = 0
        while begin < len(blocks):
            end = begin + 1
            while (
                end < len(blocks)
                and blocks[end] == blocks[end - 1] + 1
                and host_blocks[end] == host_blocks[end - 1] + 1
            ):
                end += 1
            device = self._arena.array[:, :, blocks[begin] : blocks[begin] + end - begin]
            yield device.transpose(2, 0, 1, 3, 4, 5), self.array[host_blocks[begin] : host_blocks[begin] + end - begin]
            begin = end


def copy_to_host(buffer: Buffer) -> bytes:
    """The bytes of a (short) buffer, wherever it lives."""
    if isinstance(buffer, np.ndarray):
        return buffer.tobytes()
    return cast("bytes", importlib.import_module("cupy").asnumpy(buffer).tobytes())


def copy_from_host(content: bytes, buffer: Buffer) -> None:
    """Writes bytes over a buffer of the same length, wherever it lives."""
    host = np.frombuffer(content, np.uint8)
    buffer[:] = host if isinstance(buffer, np.ndarray) else importlib.import_module("cupy").asarray(host)


def _backend(device: str) -> _Backend:
    if device == "cpu":
        return _Cpu()
    kind, _, number = device.partition(":")
    if kind == "cuda" and (number or "0").isdigit():
        return _Cuda(int(number or "0"))
    raise ValueError(f'device must be "cpu" or "cuda:N", not {device!r}')
