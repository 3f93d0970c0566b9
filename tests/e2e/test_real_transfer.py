"""The KV really moves between processes, every byte of it and no more; and when it cannot, the request says so."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from asking import ask, request, until_free, workers
from by_hand import services_by_hand
from diptych.v1 import worker_pb2
from meshes import Mesh

TINY_TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # layers × {K, V} × KV heads × head dim × fp32


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
async def test_the_bytes_on_the_wire_are_the_layouts_arithmetic(mesh: Mesh, tokens: int) -> None:
    prompt = [200 + tokens, *range(3, 2 + tokens)]  # none begins like another: nothing of it is cached
    answer = await ask(mesh, request(prompt, max_tokens=2))
    transfer = answer.phases.transfer
    assert (transfer.bytes, transfer.transport) == (tokens * TINY_TOKEN_BYTES, "ucx")
    assert transfer.pieces >= 1
    assert answer.phases.prefill_worker == "prefill-0"
    assert answer.phases.decode_worker == "decode-0"
    children = mesh.children()
    assert children["prefill-0"].pid != children["decode-0"].pid


async def test_chunks_leave_in_pieces_while_the_prompt_is_still_computed(mesh: Mesh) -> None:
    answer = await ask(mesh, request([7 + i % 300 for i in range(500)], max_tokens=2))
    assert answer.phases.prefill_chunks == 8
    assert answer.phases.transfer.pieces > 1
    assert answer.phases.transfer.bytes == 500 * TINY_TOKEN_BYTES


async def test_the_memory_of_a_request_is_free_on_both_sides_when_it_is_over(mesh: Mesh) -> None:
    await asyncio.gather(*(ask(mesh, request([3 + i] * 40, max_tokens=5)) for i in range(6)))
    await until_free(mesh)
    assert sorted(worker.ref.name for worker in await workers(mesh)) == ["decode-0", "prefill-0"]


async def test_the_two_workers_have_met_and_say_what_their_link_can_do(mesh: Mesh) -> None:
    links: list[worker_pb2.Link] = []
    async with asyncio.timeout(30):
        while not links:
            decode, prefill = sorted(await workers(mesh), key=lambda each: each.ref.name)
            links = list(decode.links)
    (link,) = links
    assert (link.error, link.transport, link.lanes) == ("", "ucx", "tcp/lo")
    assert link.peer_incarnation == prefill.ref.incarnation
    assert 1e7 < link.bytes_per_s < 1e11
    assert not prefill.links


async def test_with_ucx_blocked_nothing_is_quietly_recomputed(tiny_llama: str, redis_url: str) -> None:
    """A prefill worker without a usable UCX transport says so and ends; without local prefill a request is an error.

    What is answered where local prefill is allowed, `test_right_answers` shows.
    """
    with services_by_hand(
        tiny_llama,
        redis_url,
        scheduler=["--local-prefill=never"],
        prefill_env={"UCX_TLS": "self"},
        expect_prefill=0,
    ) as made:
        made.mesh.wait_for(lambda: "prefill: UCX cannot" in (made.logs / "prefill").read_text())
        with pytest.raises(grpc.aio.AioRpcError, match="no prefill worker") as failed:
            await ask(made.mesh, request([5, 6, 7], max_tokens=3), limit_s=30)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        await until_free(made.mesh)
