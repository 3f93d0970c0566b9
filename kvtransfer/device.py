"""The arena and the staging memory of one device: the only place that knows NumPy from CuPy.

CuPy is imported when a "cuda:N" device is asked for, never before; UCX is not stream-ordered, so every copy on a GPU is
done when the call returns.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvtransfer import huge_pages, packing
from kvtransfer.errors import TransportUnavailable
from kvtransfer.layout import KvLayout
from kvtransfer.manifest import Piece

Buffer = npt.NDArray[np.uint8]
"""One-dimensional bytes, of NumPy or CuPy."""

Array = npt.NDArray[np.generic]
"""Of NumPy or CuPy."""

_THREADS: Final = 256
_MOST_THREAD_BLOCKS: Final = 4096
"""More work than this is a loop inside the kernel."""

# bf16 has no NumPy type; its bits travel as uint16.
ARRAY_TYPES: Final[dict[str, type[np.generic]]] = {"bf16": np.uint16, "fp32": np.float32}


class _Backend(Protocol):
    """Memory of one device, and copies: of a piece between an arena's array and a message, of blocks to host memory."""

    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array: ...
    def bytes(self, count: int, on_host: bool) -> Buffer: ...
    def pinned(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array: ...
    def populate(self, array: Array) -> bool: ...
    def save(self, blocks: Array, host: Array) -> None: ...
    def restore(self, host: Array, blocks: Array) -> None: ...
    def gather(self, arena: Arena, piece: Piece, block_ids: Sequence[int], message: Buffer) -> None: ...
    def scatter(self, arena: Arena, piece: Piece, block_ids: Sequence[int], message: Buffer) -> None: ...


class _Cpu:
    """NumPy: one copy of slices for each run of blocks that are neighbours."""

    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        return huge_pages.zeros(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

    def bytes(self, count: int, on_host: bool) -> Buffer:
        # At the beginning of a page, as blocks mostly are in their arena: some processors copy three times slower to an
        # address that is, within its page, a little above the source's.
        return huge_pages.zeros(count) if count >= huge_pages.HUGE_PAGE_BYTES else huge_pages.page_aligned(count)

    def pinned(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        return self.zeros(shape, dtype)

    def populate(self, array: Array) -> bool:
        return huge_pages.populate(array)

    def save(self, blocks: Array, host: Array) -> None:
        host[:] = blocks

    def restore(self, host: Array, blocks: Array) -> None:
        blocks[:] = host

    def gather(self, arena: Arena, piece: Piece, block_ids: Sequence[int], message: Buffer) -> None:
        packed, planes = _packed(arena, piece, message), _planes(arena, piece)
        for tokens, slots in _runs(arena, piece, block_ids):
            packed[:, :, tokens] = planes[:, :, slots]

    def scatter(self, arena: Arena, piece: Piece, block_ids: Sequence[int], message: Buffer) -> None:
        packed, planes = _packed(arena, piece, message), _planes(arena, piece)
        for tokens, slots in _runs(arena, piece, block_ids):
            planes[:, :, slots] = packed[:, :, tokens]


class _Cuda:
    """CuPy: one kernel for each piece, on a stream of our own, so that it runs beside torch's steps."""

    def __init__(self, number: int) -> None:
        try:
            self._cupy = importlib.import_module("cupy")
            self._pinned = importlib.import_module("cupyx").empty_pinned
            self._device = self._cupy.cuda.Device(number)
            self._device.use()
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
        except Exception as error:  # cupy's own error types cannot be named without importing it
            raise TransportUnavailable(f"cuda:{number} cannot be used: {error}") from error

    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        with self._device:
            return cast("Array", self._cupy.zeros(shape, dtype))

    def bytes(self, count: int, on_host: bool) -> Buffer:
        with self._device:
            return cast("Buffer", (self._pinned if on_host else self._cupy.empty)(count, np.uint8))

    def pinned(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        with self._device:
            return cast("Array", self._pinned(shape, dtype))

    def populate(self, array: Array) -> bool:
        return True  # a GPU's memory is there when it is allocated

    # No step that is under way touches blocks that are swapped: the copies run beside it.

    def save(self, blocks: Array, host: Array) -> None:
        with self._in_turn(at_once=True):
            self._cupy.ascontiguousarray(blocks).get(stream=self._stream, out=host)

    def restore(self, host: Array, blocks: Array) -> None:
        with self._in_turn(at_once=True):
            on_device = self._cupy.empty(host.shape, host.dtype)
            on_device.set(host, stream=self._stream)
            blocks[:] = on_device

    def gather(self, arena: Arena, piece: Piece, block_ids: Sequence[int], message: Buffer) -> None:
        table = packing.block_table(arena.layout, arena.blocks, piece, block_ids)
        with self._in_turn():
            if self._is_ours(message):
                self._launch("gather", arena, piece, table, message)
            else:
                on_device = self._cupy.empty(piece.bytes, np.uint8)
                self._launch("gather", arena, piece, table, on_device)
                on_device.get(stream=self._stream, out=message)

    def scatter(self, arena: Arena, piece: Piece, block_ids: Sequence[int], message: Buffer) -> None:
        table = packing.block_table(arena.layout, arena.blocks, piece, block_ids)
        with self._in_turn():
            on_device = message
            if not self._is_ours(message):
                on_device = self._cupy.empty(piece.bytes, np.uint8)
                on_device.set(message, stream=self._stream)
            self._launch("scatter", arena, piece, table, on_device)

    def _is_ours(self, message: Buffer) -> bool:
        return isinstance(message, self._cupy.ndarray)

    def _launch(self, name: str, arena: Arena, piece: Piece, table: packing.Table, message: Buffer) -> None:
        where = packing.geometry(arena.layout, arena.blocks, piece)
        grid = min(_MOST_THREAD_BLOCKS, -(-where.count // _THREADS))
        kernel = self._cupy.RawKernel(packing.source(arena.layout), name)  # compiled once: CuPy keeps the result
        kernel((grid,), (_THREADS,), (arena.array, message, self._cupy.asarray(table), *where.numbers))

    @contextlib.contextmanager
    def _in_turn(self, *, at_once: bool = False) -> Iterator[None]:
        """What is started inside runs on our stream, after everything that torch (on the default stream) was given
        before unless `at_once`, and is done at the end. The waiting thread sleeps: events spin unless they are told to
        block.
        """
        cuda = self._cupy.cuda
        with self._device, self._stream:
            before, done = (cuda.Event(block=True, disable_timing=True) for _ in range(2))
            if not at_once:
                before.record(cuda.Stream.null)
                self._stream.wait_event(before)
            try:
                yield
            finally:
                done.record(self._stream)
                done.synchronize()


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

    def populate(self) -> bool:
        """Commits the memory (see huge_pages.populate): otherwise the first write to a block may take milliseconds in
        every layer. False: the system cannot.
        """
        return self.backend.populate(self.array)

    def staging(self, count: int, *, on_host: bool = False) -> Buffer:
        """Allocates a staging buffer of `count` bytes on the arena's device; or, for a wire that cannot reach a GPU, in
        host memory that a GPU copies to and from directly (pinned).
        """
        return self.backend.bytes(count, on_host)

    def gather(self, piece: Piece, block_ids: Sequence[int], buffer: Buffer) -> None:
        """Copies the piece's KV out of the sequence's blocks into buffer[:piece.bytes]. Releases the GIL while
        copying. ValueError: a block is not in the arena.
        """
        self.backend.gather(self, piece, block_ids, buffer[: piece.bytes])

    def scatter(self, piece: Piece, block_ids: Sequence[int], buffer: Buffer) -> None:
        """Copies buffer[:piece.bytes] into the sequence's blocks, and touches nothing else of them. ValueError: a
        block is not in the arena.
        """
        self.backend.scatter(self, piece, block_ids, buffer[: piece.bytes])


def _packed(arena: Arena, piece: Piece, message: Buffer) -> Array:
    """The message as (layers, 2, tokens, heads, head_dim)."""
    layout = arena.layout
    shape = (piece.layers, 2, piece.tokens, piece.heads, layout.head_dim)
    return cast("Array", message.view(ARRAY_TYPES[layout.dtype]).reshape(shape))


def _planes(arena: Arena, piece: Piece) -> Array:
    """The piece's layers and heads of the arena, with blocks and their tokens as one axis of slots."""
    layout, array = arena.layout, arena.array
    slots = array.reshape(*array.shape[:2], arena.blocks * layout.block_tokens, *array.shape[4:])
    layers = slice(piece.layer_begin - layout.layer_begin, piece.layer_end - layout.layer_begin)
    return slots[layers, :, :, piece.head_begin - layout.head_begin : piece.head_end - layout.head_begin]


def _runs(arena: Arena, piece: Piece, block_ids: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Pairs of (tokens within the piece, slots of the arena), one for each run of blocks that are neighbours."""
    size = arena.layout.block_tokens
    token = piece.token_begin
    while token < piece.token_end:
        block = token // size
        if not 0 <= block_ids[block] < arena.blocks:
            raise ValueError(f"block {block_ids[block]} is not within [0, {arena.blocks})")
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
        self._arena, self._backend = arena, arena.backend
        layers, two, _, *inner = arena.array.shape
        self.array: Final = arena.backend.pinned((blocks, layers, two, *inner), ARRAY_TYPES[arena.layout.dtype])

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies blocks of the arena into as many of the host."""
        for device, host in self._pairs(blocks, host_blocks):
            self._backend.save(device, host)

    def restore(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies blocks of the host into as many of the arena."""
        for device, host in self._pairs(blocks, host_blocks):
            self._backend.restore(host, device)

    def _pairs(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> Iterator[tuple[Array, Array]]:
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
    """Writes bytes over a buffer of the same length, wherever it lives: they are there when the call returns."""
    host = np.frombuffer(content, np.uint8)
    if isinstance(buffer, np.ndarray):
        buffer[:] = host
        return
    cupy = importlib.import_module("cupy")
    buffer[:] = cupy.asarray(host)
    cupy.cuda.get_current_stream().synchronize()


def clear(buffers: Sequence[Buffer]) -> None:
    """Writes zeros over buffers of one device: they are there when the call returns."""
    for buffer in buffers:
        buffer[:] = 0
    if not all(isinstance(buffer, np.ndarray) for buffer in buffers):
        importlib.import_module("cupy").cuda.get_current_stream().synchronize()


def _backend(device: str) -> _Backend:
    if device == "cpu":
        return _Cpu()
    kind, _, number = device.partition(":")
    if kind == "cuda" and (number or "0").isdigit():
        return _Cuda(int(number or "0"))
    raise ValueError(f'device must be "cpu" or "cuda:N", not {device!r}')
