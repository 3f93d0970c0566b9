"""Control messages survive the wire as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from diptych.v1 import kv_transfer_pb2 as pb
from diptych.v1 import worker_pb2

from kvtransfer.compression import PLAIN_ONLY, Allowed
from kvtransfer.errors import PeerLost, ProtocolViolation
from kvtransfer.layout import KvLayout
from kvtransfer.messages import Accepted, Acknowledge, Finished, Message, Open, Posted, Sent
from services.errors import InvalidArgument
from services.worker.kv_control import ServingControl, from_request, from_response, to_request, to_response

LAYOUT = KvLayout(
    model="m",
    dtype="bf16",
    layers=30,
    kv_heads=3,
    head_dim=64,
    block_tokens=16,
    layer_begin=10,
    layer_end=20,
    head_begin=1,
    head_end=2,
)
SENDER = worker_pb2.WorkerRef(name="prefill-0", address="h:1", incarnation="ab")


@pytest.mark.parametrize(
    "message",
    [
        Open(transfer_id="t", sender_incarnation="ab", receiver_incarnation="cd", layout=LAYOUT, skip_tokens=32),
        Open(
            transfer_id="t",
            sender_incarnation="ab",
            receiver_incarnation="cd",
            layout=LAYOUT,
            skip_tokens=0,
            allowed=Allowed(encodings=("int8", "fp8"), link_bytes_per_s=1.25e8, only_if_slower=True),
        ),
        Posted(pieces=4),
        Acknowledge(bytes=1 << 40),
    ],
)
def test_receiver_messages_round_trip(message: Message) -> None:
    wire = to_request(message, SENDER).SerializeToString()
    assert from_request(pb.PullRequest.FromString(wire)) == message


@pytest.mark.parametrize(
    "message",
    [
        Accepted(
            tokens=7,
            pieces=3,
            bytes=1 << 33,
            layout=LAYOUT,
            data_address=b"\0\xff",
            transport="ucx",
            tag_base=(1 << 63) + 5,
        ),
        Sent(piece=0, bytes=0),
        Sent(piece=2, bytes=5, crc32=0),
        Sent(piece=2, bytes=5, crc32=(1 << 32) - 1),
        Finished(first_token_id=0, finished=None, since_computed_s=0.0),
        Finished(first_token_id=49_151, finished="stop", since_computed_s=1.25),
        Finished(first_token_id=1, finished="length", since_computed_s=0.0),
    ],
)
def test_sender_messages_round_trip(message: Message) -> None:
    wire = to_response(message).SerializeToString()
    assert from_response(pb.PullResponse.FromString(wire)) == message


def test_what_is_no_message_is_an_error() -> None:
    with pytest.raises(ProtocolViolation):
        from_request(pb.PullRequest())
    with pytest.raises(ProtocolViolation):
        from_response(pb.PullResponse())
    with pytest.raises(InvalidArgument, match=r"layout\.dtype: must be one of bf16, fp32, got 'int3'"):
        from_request(pb.PullRequest(open=pb.PullOpen(layout=worker_pb2.KvLayout(dtype="int3"))))
    with pytest.raises(InvalidArgument, match="layout"):
        from_request(pb.PullRequest(open=pb.PullOpen(layout=worker_pb2.KvLayout(dtype="fp32"))))


async def _requests(*messages: pb.PullRequest) -> AsyncIterator[pb.PullRequest]:
    for message in messages:
        yield message


async def test_the_senders_end_gives_everything_said_before_it_closed_and_nothing_after() -> None:
    control = ServingControl(_requests(to_request(Posted(pieces=1), SENDER)))
    assert await control.receive() == Posted(pieces=1)
    assert await control.receive() is None
    await control.send(Sent(piece=0, bytes=3))
    await control.close()
    await control.close()
    with pytest.raises(PeerLost):
        await control.send(Sent(piece=1, bytes=3))
    async with asyncio.timeout(1):
        said = [from_response(message) async for message in control.outgoing()]
    assert said == [Sent(piece=0, bytes=3)]


def test_a_peer_that_knows_no_encodings_allows_none_and_chooses_none() -> None:
    opening = to_request(
        Open(transfer_id="t", sender_incarnation="ab", receiver_incarnation="cd", layout=LAYOUT, skip_tokens=0), SENDER
    )
    assert not opening.open.ListFields()[-1][0].name.startswith(("encodings", "link", "only"))
    opened = from_request(opening)
    assert isinstance(opened, Open) and opened.allowed == PLAIN_ONLY
    accepted = from_response(
        pb.PullResponse(accepted=pb.PullAccepted(layout=pb.PullOpen(layout=opening.open.layout).layout))
    )
    assert isinstance(accepted, Accepted) and accepted.encoding == "plain"


def test_an_encoding_of_a_later_version_is_passed_over_in_open_and_refused_in_accepted() -> None:
    opening = to_request(
        Open(transfer_id="t", sender_incarnation="ab", receiver_incarnation="cd", layout=LAYOUT, skip_tokens=0), SENDER
    )
    opening.open.encodings.extend([9, pb.KV_ENCODING_FP8])
    opened = from_request(opening)
    assert isinstance(opened, Open) and opened.allowed.encodings == ("fp8",)
    with pytest.raises(ProtocolViolation, match="encoding 9"):
        from_response(pb.PullResponse(accepted=pb.PullAccepted(layout=opening.open.layout, encoding=9)))


def test_a_bandwidth_that_is_no_number_is_refused() -> None:
    opening = to_request(
        Open(transfer_id="t", sender_incarnation="ab", receiver_incarnation="cd", layout=LAYOUT, skip_tokens=0), SENDER
    )
    opening.open.link_bytes_per_s = float("nan")
    with pytest.raises(ProtocolViolation, match="link_bytes_per_s"):
        from_request(opening)
