"""The shell around the decode core: a request that waits for blocks keeps its hand-off, as long as it waits."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import numpy as np
import pytest
from diptych.v1 import worker_pb2

from kvtransfer import Arena, KvLayout
from kvtransfer import Received as Arrived
from services.decode.copier import Copier
from services.decode.hand_off import HandOff, Puller
from services.decode.messages import Cancel, Command, Copied, Copy, Drained, Received, Reserved, Submit, TransferFailed
from services.decode.service import DecodeService
from services.engine.sampling_spec import SamplingSpec
from services.errors import HandOffLost

KEY = "r#0"
ARENA = Arena(KvLayout(model="m", dtype="fp32", layers=2, kv_heads=1, head_dim=2, block_tokens=4), blocks=6)
ARRIVED = Arrived(
    first_token_id=7,
    finished=None,
    bytes=1,
    pieces=1,
    duration_s=0.1,
    exposed_s=0.0,
    wire_s=0.1,
    transport="memory",
    encoding="plain",
)


class FakePuller:
    """Notes what it is asked for. `lost` ends the renewals; a pull waits for `arrive`."""

    def __init__(self) -> None:
        self.keeping = 0
        self.released: list[str] = []
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrive = asyncio.Event()

    async def keep(self, hand_off: HandOff) -> None:
        self.keeping += 1
        try:
            await asyncio.shield(self.lost)
        finally:
            self.keeping -= 1

    async def pull(self, hand_off: HandOff, blocks: tuple[int, ...], **limits: float) -> Arrived:
        await self.arrive.wait()
        return ARRIVED

    async def release(self, hand_off: HandOff) -> None:
        self.released.append(hand_off.transfer_id)


class Commands:
    """A step thread that only takes notes."""

    def __init__(self) -> None:
        self.taken: list[Command] = []
        self.came = asyncio.Event()

    def submit(self, command: Command) -> None:
        self.taken.append(command)
        self.came.set()

    async def next(self) -> Command:
        self.came.clear()
        await asyncio.wait_for(self.came.wait(), 1)
        return self.taken[-1]


async def waiting() -> tuple[DecodeService, FakePuller, Commands]:
    puller, commands = FakePuller(), Commands()
    service = DecodeService(cast(Puller, puller), Copier(ARENA, host_blocks=4))
    service.attach(commands)
    submit = Submit(
        key=KEY,
        token_ids=(1, 2),
        sampling=SamplingSpec(),
        max_new_tokens=4,
        stop_token_ids=frozenset(),
        local=False,
    )
    service.open(
        submit, HandOff(transfer_id="t", sender=worker_pb2.WorkerRef(name="p"), deadline_s=time.monotonic() + 60)
    )
    await asyncio.sleep(0)
    assert puller.keeping == 1
    return service, puller, commands


async def test_a_request_renews_its_hand_off_until_it_has_blocks_and_pulls() -> None:
    service, puller, commands = await waiting()
    service.deliver([Reserved(key=KEY, blocks=(0,), skip_tokens=0)])
    await asyncio.sleep(0.01)
    assert puller.keeping == 0
    puller.arrive.set()
    await commands.next()
    await asyncio.sleep(0)
    assert commands.taken[1:] == [Received(key=KEY, first_token_id=7, finish=None), Drained(KEY)]
    service.close(KEY)
    assert service.outstanding == 0


async def test_a_request_that_is_closed_while_it_waits_stops_renewing_and_releases() -> None:
    service, puller, commands = await waiting()
    service.close(KEY)
    await asyncio.sleep(0.01)
    assert (puller.keeping, puller.released, service.outstanding) == (0, ["t"], 0)
    assert commands.taken[-1] == Cancel(KEY)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_that_is_closed_before_its_kv_has_come_releases_whether_its_pull_has_begun(begun: bool) -> None:
    """A pull that was cancelled before its first step told the sender nothing: the KV stayed until its lease ended."""
    service, puller, commands = await waiting()
    service.deliver([Reserved(key=KEY, blocks=(0,), skip_tokens=0)])
    if begun:
        await asyncio.sleep(0)
    service.close(KEY)
    await asyncio.sleep(0.01)
    assert (puller.released, service.outstanding) == (["t"], 0)
    assert commands.taken[-1] == Drained(KEY)


async def test_a_hand_off_that_is_over_at_the_sender_fails_the_request_before_it_has_blocks() -> None:
    service, puller, commands = await waiting()
    puller.lost.set_exception(HandOffLost("expired"))
    command = await commands.next()
    assert isinstance(command, TransferFailed)
    with pytest.raises(HandOffLost, match="expired"):
        raise command.error
    service.close(KEY)


async def test_copies_are_made_and_reported_also_when_their_request_is_closed_meanwhile() -> None:
    service, _, commands = await waiting()
    ARENA.array[:] = np.arange(ARENA.array.size).reshape(ARENA.array.shape)
    before = ARENA.array.copy()
    service.deliver([Copy(key=KEY, out=True, blocks=(1, 4), host_blocks=(3, 0))])
    service.close(KEY)
    copied = await until(commands, Copied)
    assert copied.error is None and copied.seconds > 0
    ARENA.array[:] = 0
    service.deliver([Copy(key=KEY, out=False, blocks=(2, 5), host_blocks=(3, 0))])
    await until(commands, Copied, count=2)
    assert (ARENA.array[:, :, [2, 5]] == before[:, :, [1, 4]]).all()


async def test_a_copy_that_fails_is_reported_with_its_error() -> None:
    service, _, commands = await waiting()
    service.deliver([Copy(key=KEY, out=True, blocks=(1, 4), host_blocks=(3,))])
    copied = await until(commands, Copied)
    assert copied.key == KEY and "no pairs" in str(copied.error)
    service.close(KEY)


async def until(commands: Commands, kind: type[Copied], count: int = 1) -> Copied:
    """The last of so many commands of a kind, once they are there."""
    async with asyncio.timeout(5):
        while len(found := [command for command in commands.taken if isinstance(command, kind)]) < count:
            commands.came.clear()
            await commands.came.wait()
    return found[-1]
