"""The shell around the prefill core: nothing stays behind of a transfer that ends early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
from google.protobuf.duration_pb2 import Duration

from kvtransfer import Arena, KvLayout, MemoryTransport, Sender
from kvtransfer.claims import Claim
from kvtransfer.errors import TransferUsed
from kvtransfer.states import SendState
from services.engine.sampling import SamplingSpec
from services.engine.sequence import FinishReason
from services.errors import Cancelled, DeadlineExceeded, HandOffLost, InvalidArgument
from services.prefill.core import Admitted, Command, Failed, FirstToken, Progress, Released, Submit
from services.prefill.service import PrefillService
from services.worker.convert import MAX_HAND_OFF_S, from_limit

KEY = "t"
SUBMIT = Submit(key=KEY, token_ids=(1, 2), sampling=SamplingSpec(), max_new_tokens=4, stop_token_ids=frozenset())
FIRST = FirstToken(
    key=KEY, token_id=3, finish=None, submitted_s=0.0, admitted_s=0.0, computed_s=0.0, cached_tokens=0, chunks=1
)


class UsedSender:
    """A sender whose every id was used or released before."""

    def offer(
        self,
        transfer_id: str,
        tokens: int,
        blocks: Sequence[int],
        limit_s: float,
        on_released: Callable[[str], object],
        *,
        lease_s: float,
    ) -> None:
        raise TransferUsed(f"transfer {transfer_id} was used before")


class Commands:
    """A step thread that only takes notes."""

    def __init__(self) -> None:
        self.taken: list[Command] = []
        self.begun = asyncio.Event()

    def submit(self, command: Command) -> None:
        self.taken.append(command)
        self.begun.set()


async def prompt_whose_id_was_released() -> tuple[PrefillService, Commands, asyncio.Task[FirstToken]]:
    service, commands = PrefillService(cast(Sender, UsedSender())), Commands()
    service.attach(commands)
    call = asyncio.create_task(service.prefill(SUBMIT, 5.0))
    await asyncio.wait_for(commands.begun.wait(), 1)
    service.deliver([Admitted(key=KEY, blocks=(0,))])
    return service, commands, call


@pytest.mark.parametrize(
    "last",
    [
        [Progress(key=KEY, computed_tokens=2), FIRST],
        [Failed(key=KEY, error=HandOffLost("released"), holds_blocks=False)],
        [Failed(key=KEY, error=Cancelled("cancelled"), holds_blocks=True)],
    ],
    ids=["the step was faster", "the release was faster", "a cancel was faster"],
)
async def test_a_prompt_whose_id_was_released_before_fails_at_once_and_leaves_nothing(
    last: list[Progress | FirstToken | Failed],
) -> None:
    service, commands, call = await prompt_whose_id_was_released()
    with pytest.raises(HandOffLost, match="used before"):
        await asyncio.wait_for(call, 1)
    assert Released(KEY) in commands.taken
    service.deliver(last)
    assert service.outstanding == 0


async def test_events_of_a_transfer_that_is_over_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    service = PrefillService(cast(Sender, UsedSender()))
    service.deliver([FIRST])
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


@pytest.mark.parametrize("seconds", [0, -5])
def test_a_hand_off_without_time_left_is_over(seconds: int) -> None:
    with pytest.raises(DeadlineExceeded):
        from_limit(Duration(seconds=seconds))


def test_kv_is_not_kept_for_ever() -> None:
    assert from_limit(Duration(seconds=int(MAX_HAND_OFF_S))) == MAX_HAND_OFF_S
    with pytest.raises(InvalidArgument, match="hand_off_limit"):
        from_limit(Duration(seconds=2**62))


@pytest.mark.parametrize(
    ("finish", "pulled", "kept"),
    [("length", False, False), ("length", True, True), (None, False, True)],
    ids=["nobody came", "somebody pulls", "decode goes on"],
)
async def test_kv_of_a_request_that_ended_here_is_not_kept_for_a_lease(
    monkeypatch: pytest.MonkeyPatch, finish: FinishReason | None, pulled: bool, kept: bool
) -> None:
    """A gateway that has its answer calls the decode leg off, maybe before decode has heard of it."""
    monkeypatch.setattr("services.prefill.service.FINISHED_LEASE_S", 0.0)
    layout = KvLayout(model="m", dtype="fp32", layers=1, kv_heads=1, head_dim=4, block_tokens=2)
    sender = Sender(MemoryTransport("a" * 16), Arena(layout, 1), incarnation="a" * 16)
    service, commands = PrefillService(sender), Commands()
    service.attach(commands)
    call = asyncio.create_task(service.prefill(SUBMIT, 5.0))
    await asyncio.wait_for(commands.begun.wait(), 1)
    service.deliver([Admitted(key=KEY, blocks=(0,)), Progress(key=KEY, computed_tokens=2)])
    offer = sender._offers[KEY]
    if pulled:
        offer.claim(Claim(receiver="b" * 16, area=layout.area))
    service.deliver([replace(FIRST, finish=finish)])
    assert (await asyncio.wait_for(call, 1)).token_id == FIRST.token_id
    await asyncio.sleep(0)  # timers that are due
    assert (offer.state is not SendState.RELEASED) == kept
    assert (Released(KEY) in commands.taken) != kept
    assert service.outstanding == kept
    await sender.aclose()
