"""K5 at the real workers: whatever is wrong with the reference to a hand-off, it is an error before the first token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
from asking import ask, request, until_free, workers
from diptych.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, request_pb2, worker_pb2
from google.protobuf.duration_pb2 import Duration
from meshes import Mesh

CODE = grpc.StatusCode
LOST = (CODE.ABORTED,)  # the gateway places such a request again
LIMIT = Duration(seconds=3)
_ids = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Both:
    """The two workers of a mesh, called as the gateway calls them."""

    prefill: worker_pb2.WorkerRef
    decode: worker_pb2.WorkerRef

    async def computed(self, transfer_id: str, sequence: request_pb2.Sequence) -> prefill_pb2.PrefillResponse:
        """Lets prefill compute the prompt and keep it under that id."""
        async with grpc.aio.insecure_channel(self.prefill.address) as channel:
            asked = prefill_pb2.PrefillRequest(
                sequence=sequence, transfer_id=transfer_id, worker=self.prefill, hand_off_limit=LIMIT
            )
            return await prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(asked, timeout=20)

    async def decoded(self, sequence: request_pb2.Sequence, hand_off: decode_pb2.HandOff) -> list[int]:
        """What decode makes of a hand-off. Raises AioRpcError; not one token has come before."""
        async with grpc.aio.insecure_channel(self.decode.address) as channel:
            asked = decode_pb2.DecodeRequest(sequence=sequence, worker=self.decode, hand_off=hand_off)
            token_ids: list[int] = []
            try:
                async for message in decode_pb2_grpc.DecodeServiceStub(channel).Decode(asked, timeout=20):
                    token_ids += message.token_ids
            except grpc.aio.AioRpcError:
                assert not token_ids, "tokens came before the error"
                raise
            return token_ids

    def hand_off(self, transfer_id: str, **changes: object) -> decode_pb2.HandOff:
        """A reference that is right but for the changes."""
        right = {"transfer_id": transfer_id, "sender": self.prefill, "limit": LIMIT}
        return decode_pb2.HandOff(**(right | changes))  # type: ignore[arg-type]


def sequence(tokens: int = 40) -> request_pb2.Sequence:
    """A prompt that no other one here begins like."""
    number = next(_ids)
    ids = [3 + (7 * number + i * (number + 1)) % 300 for i in range(tokens)]
    return request_pb2.Sequence(
        request_id=f"by-hand-{number}", token_ids=ids, sampling=request_pb2.SamplingParams(seed=1), max_new_tokens=5
    )


@pytest.fixture
async def both(mesh: Mesh) -> Both:
    refs = {worker.ref.name: worker.ref for worker in await workers(mesh)}
    return Both(prefill=refs["prefill-0"], decode=refs["decode-0"])


async def refused(both: Both, prompt: request_pb2.Sequence, hand_off: decode_pb2.HandOff) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await both.decoded(prompt, hand_off)
    return raised.value


async def test_a_right_reference_is_taken_once_and_then_used_up(mesh: Mesh, both: Both) -> None:
    prompt = sequence()
    first = await both.computed("k5-used", prompt)
    token_ids = await both.decoded(prompt, both.hand_off("k5-used"))
    assert len(token_ids) == 5 and token_ids[0] == first.token_id
    prompt = sequence()  # another one: decode knows the KV of the first
    assert (await refused(both, prompt, both.hand_off("k5-used"))).code() in LOST
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await both.computed("k5-used", prompt)
    assert raised.value.code() in (CODE.ALREADY_EXISTS, CODE.ABORTED)
    await until_free(mesh)


async def test_an_unknown_reference_is_lost_at_its_limit(mesh: Mesh, both: Both) -> None:
    limit = Duration(nanos=300_000_000)
    error = await refused(both, sequence(), both.hand_off("k5-never-heard-of", limit=limit))
    assert error.code() in LOST and "k5-never-heard-of" in (error.details() or "")
    await until_free(mesh)


async def test_an_empty_reference_is_refused(mesh: Mesh, both: Both) -> None:
    limit = Duration(nanos=300_000_000)
    assert (await refused(both, sequence(), decode_pb2.HandOff(limit=limit))).code() in (*LOST, CODE.INVALID_ARGUMENT)
    await until_free(mesh)


async def test_a_reference_to_an_earlier_life_of_the_sender_is_stale(mesh: Mesh, both: Both) -> None:
    """The sender has the KV, under that very id: only the incarnation tells that another one was meant."""
    prompt = sequence()
    await both.computed("k5-stale", prompt)
    old = worker_pb2.WorkerRef(name="prefill-0", address=both.prefill.address, incarnation="0123456789abcdef")
    error = await refused(both, prompt, both.hand_off("k5-stale", sender=old))
    assert error.code() in LOST and "incarnation" in (error.details() or "")
    await until_free(mesh)  # the lease ends


async def test_nobody_at_the_senders_address_is_a_lost_hand_off(mesh: Mesh, both: Both) -> None:
    gone = worker_pb2.WorkerRef(name="gone", address="127.0.0.1:1", incarnation="0123456789abcdef")
    assert (await refused(both, sequence(), both.hand_off("k5-gone", sender=gone))).code() in LOST
    await until_free(mesh)


async def test_a_hand_off_of_another_prompt_is_refused(mesh: Mesh, both: Both) -> None:
    """One token more than was computed: the lengths are compared before anything moves."""
    prompt = sequence()
    await both.computed("k5-other", prompt)
    longer = request_pb2.Sequence()
    longer.CopyFrom(prompt)
    longer.token_ids.append(5)
    error = await refused(both, longer, both.hand_off("k5-other"))
    assert error.code() in LOST and "tokens" in (error.details() or "")
    await until_free(mesh)


@pytest.mark.parametrize(
    ("limit", "code"), [(Duration(), CODE.DEADLINE_EXCEEDED), (Duration(seconds=2**40), CODE.INVALID_ARGUMENT)]
)
async def test_a_hand_off_without_time_or_without_end_is_refused_at_once(
    mesh: Mesh, both: Both, limit: Duration, code: grpc.StatusCode
) -> None:
    assert (await refused(both, sequence(), both.hand_off("k5-limit", limit=limit))).code() == code
    assert len((await ask(mesh, request([5, 6, 7], max_tokens=3, ignore_eos=True))).token_ids) == 3
    await until_free(mesh)
