"""The calls that a "cuda:N" arena makes, by a fake of CuPy whose kernels are the NumPy twins."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import packing_twin
import pytest

from kvtransfer import Arena, KvLayout, MemoryTransport, packing, plan_pieces
from kvtransfer.device import HostArena, clear, copy_from_host
from kvtransfer.staging import StagingPool
from kvtransfer.transport.ucx import UcxTransport

LAYOUT = KvLayout(model="m", dtype="bf16", layers=3, kv_heads=3, head_dim=8, block_tokens=16)
SHARD = dataclasses.replace(LAYOUT, block_tokens=24, layer_begin=1, head_begin=1)
BLOCKS, ORDER = 12, [7, 0, 3, 4, 9, 1, 11]


class DeviceArray(np.ndarray):
    def get(self, stream, out) -> None:
        assert not isinstance(out, DeviceArray)
        out[...] = self

    def set(self, host, stream) -> None:
        assert not isinstance(host, DeviceArray)
        self[...] = host


class Device:
    current = 0

    def __init__(self, number: int) -> None:
        if number > 1:
            raise RuntimeError("invalid device ordinal")

    def use(self) -> None: ...

    def __enter__(self) -> None:
        Device.current += 1

    def __exit__(self, *_) -> None:
        Device.current -= 1


def make_cupy(log: list[str]) -> ModuleType:
    streams: list[Stream] = []

    class Stream:
        def __init__(self, non_blocking: bool = False) -> None:
            self.name = "ours" if non_blocking else "null"

        def __enter__(self) -> None:
            assert Device.current == 1
            streams.append(self)

        def __exit__(self, *_) -> None:
            streams.pop()

        def synchronize(self) -> None:
            log.append(f"we wait for {self.name}")

        def wait_event(self, event: Event) -> None:
            log.append(f"{self.name} waits for {event.on}")

    Stream.null = Stream()

    class Event:
        on = ""

        def __init__(self, block: bool, disable_timing: bool) -> None:
            assert block
            assert disable_timing

        def record(self, stream: Stream) -> None:
            self.on = stream.name

        def synchronize(self) -> None:
            log.append(f"we wait for {self.on}")

    class RawKernel:
        def __init__(self, source: str, name: str) -> None:
            assert f"void {name}(\n" in source
            self.name = name

        def __call__(self, grid, block, arguments) -> None:
            log.append(f"{self.name} on {streams[-1].name}")
            arena, packed, table, *numbers = arguments
            assert all(type(each) is DeviceArray for each in (arena, packed, table))
            assert table.dtype == np.int32
            assert grid[0] * block[0] >= min(numbers[0], 4096 * 256)
            units = np.dtype(f"V{packing.unit_bytes(LAYOUT)}")
            flat = (np.asarray(arena).reshape(-1).view(units), np.asarray(packed).view(units), np.asarray(table))
            {"gather": packing_twin.gather, "scatter": packing_twin.scatter}[self.name](*flat, *numbers)

    module = ModuleType("cupy")
    module.ndarray, module.RawKernel = DeviceArray, RawKernel
    module.cuda = SimpleNamespace(Device=Device, Stream=Stream, Event=Event)
    module.cuda.get_current_stream = lambda: streams[-1] if streams else Stream.null
    for make in (np.zeros, np.empty, np.asarray, np.ascontiguousarray):
        setattr(module, make.__name__, lambda *arguments, make=make: make(*arguments).view(DeviceArray))
    return module


@pytest.fixture
def log(monkeypatch) -> list[str]:
    log: list[str] = []
    pinned = ModuleType("cupyx")
    pinned.empty_pinned = np.empty
    monkeypatch.setitem(sys.modules, "cupy", make_cupy(log))
    monkeypatch.setitem(sys.modules, "cupyx", pinned)
    return log


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
def test_what_moves_is_what_moves_on_a_cpu(log, tokens, on_host):
    moved = []
    for device in ("cpu", "cuda:1"):
        source, target = Arena(LAYOUT, BLOCKS, device), Arena(SHARD, BLOCKS, device)
        source.array[...] = np.random.default_rng(3).integers(0, 60_000, source.array.shape)
        for piece in plan_pieces(LAYOUT, SHARD, tokens):
            message = source.staging(piece.bytes + 64, on_host=on_host)
            assert isinstance(message, DeviceArray) == (device != "cpu" and not on_host)
            source.gather(piece, ORDER, message)
            target.scatter(piece, ORDER, message)
        moved.append(np.asarray(target.array))
    np.testing.assert_array_equal(*moved)
    assert moved[0].any()


def test_a_copy_comes_after_torchs_work_and_is_done_when_it_returns(log):
    arena = Arena(LAYOUT, BLOCKS, "cuda:0")
    (piece,) = plan_pieces(LAYOUT, LAYOUT, 20)
    arena.gather(piece, ORDER, arena.staging(piece.bytes))
    assert log == ["ours waits for null", "gather on ours", "we wait for ours"]
    log.clear()
    arena.scatter(piece, ORDER, arena.staging(piece.bytes))
    assert log == ["ours waits for null", "scatter on ours", "we wait for ours"]


def test_a_block_outside_of_the_arena_is_refused_before_anything_runs(log):
    arena = Arena(LAYOUT, BLOCKS, "cuda:0")
    (piece,) = plan_pieces(LAYOUT, LAYOUT, 20)
    with pytest.raises(ValueError, match=r"block 12 is not within \[0, 12\)"):
        arena.gather(piece, [0, 12], arena.staging(piece.bytes))
    assert log == []


async def test_staging_is_host_memory_where_the_wire_cannot_reach_the_device(log):
    arena = Arena(LAYOUT, BLOCKS, "cuda:0")
    for on_host in (False, True):
        buffer = await StagingPool(arena, on_host=on_host).acquire(100, 1.0)
        assert isinstance(buffer.memory, DeviceArray) != on_host
        buffer.release()
    assert MemoryTransport("m").device_memory
    assert not UcxTransport("a" * 16).device_memory


def test_blocks_are_swapped_beside_the_steps_over_pinned_memory(log: list[str]) -> None:
    arena = Arena(LAYOUT, BLOCKS, "cuda:0")
    arena.array[...] = np.arange(arena.array.size).reshape(arena.array.shape) % 60_000
    before = np.array(arena.array)
    host = HostArena(arena, 4)
    assert not isinstance(host.array, DeviceArray)
    host.save([7, 0, 1], [3, 1, 2])
    arena.array[...] = 0
    host.restore([3, 1, 2], [5, 6, 7])
    assert (np.asarray(arena.array)[:, :, [5, 6, 7]] == before[:, :, [7, 0, 1]]).all()
    assert not np.asarray(arena.array)[:, :, [0, 1, 2, 3, 4, 8, 9, 10, 11]].any()
    assert set(log) == {"we wait for ours"}, "never for the kernels of a step"


@pytest.mark.parametrize("write", [lambda buffer: copy_from_host(b"12345678", buffer), lambda buffer: clear([buffer])])
def test_what_is_written_into_a_device_buffer_is_there_when_the_call_returns(log: list[str], write) -> None:
    """The wire does not wait for streams: a canary or a pattern still under way would be written over what arrived."""

    class OnDevice:  # no subclass of NumPy's array, as CuPy's is none
        def __setitem__(self, where, content) -> None:
            log.append("write")

    write(OnDevice())
    assert log == ["write", "we wait for null"]


def test_writing_into_host_memory_waits_for_no_stream(log: list[str]) -> None:
    buffer = np.ones(8, np.uint8)
    copy_from_host(b"12345678", buffer)
    assert buffer.tobytes() == b"12345678"
    clear([buffer, buffer])
    assert not buffer.any()
    assert log == []
