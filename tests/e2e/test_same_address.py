"""L2: a worker that was killed comes back at the same address, as somebody else."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from asking import ask, request, until_free, workers
from by_hand import HandMade, services_by_hand
from diptych.v1 import worker_pb2

BACK_S = 40


async def ref_of(made: HandMade, name: str, *, other_than: str = "") -> worker_pb2.WorkerRef:
    """The worker of that name once it is ready, in another life than `other_than`."""
    for _ in range(BACK_S * 10):
        for view in await workers(made.mesh):
            ready = view.state == worker_pb2.WORKER_STATE_READY
            if ready and view.ref.name == name and view.ref.incarnation != other_than:
                return view.ref
        await asyncio.sleep(0.1)
    raise AssertionError(f"{name} did not come back")


def start_again(made: HandMade, name: str, address: str, log: Path) -> subprocess.Popen[bytes]:
    """The same command, at the same address."""
    arguments = made.processes[name].args
    assert isinstance(arguments, list)
    port = address.rpartition(":")[2]
    with log.open("w") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*arguments, f"--port={port}"], env=env, stdout=file, stderr=file)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_first_request_after_a_kill_and_a_restart_at_the_same_address_works(
    tiny_llama: str, redis_url: str, tmp_path: Path, role: str
) -> None:
    """Killed in mid-request, so that the survivor holds connections, a transfer or a stream of the old life.

    Without a prefix cache, so that the KV moves again, and without local prefill, so that nobody else can compute it.
    """
    prompt = [3 + i % 300 for i in range(500)]
    flags = ("--dtype=fp32", "--prefix-cache=off", "--chunk-tokens=16")
    with services_by_hand(tiny_llama, redis_url, worker=flags, scheduler=["--local-prefill=never"]) as made:
        expected = await ask(made.mesh, request(prompt, max_tokens=20, ignore_eos=True))
        old = await ref_of(made, f"{role}-0")
        cut_off = asyncio.create_task(ask(made.mesh, request(prompt, max_tokens=1500, ignore_eos=True)))
        await asyncio.sleep(0.3)
        made.processes[role].kill()
        made.processes[role].wait()
        again = start_again(made, role, old.address, tmp_path / "again")
        try:
            new = await ref_of(made, f"{role}-0", other_than=old.incarnation)
            assert new.address == old.address
            await asyncio.wait([cut_off])
            cut_off.exception()  # an error or, placed again, an answer
            answer = await ask(made.mesh, request(prompt, max_tokens=20, ignore_eos=True), limit_s=30)
            assert answer.token_ids == expected.token_ids
            assert answer.phases.placements == 1
            assert answer.phases.transfer.bytes == expected.phases.transfer.bytes > 0
            await until_free(made.mesh)
        finally:
            again.terminate()
            again.wait(20)
