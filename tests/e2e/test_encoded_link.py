"""Workers that are told to encode KV on its way."""

from __future__ import annotations

from asking import ask, request, until_free
from meshes import StartMesh

TINY_TOKEN_BYTES = 768
PROMPT = [*range(3, 103)]


async def test_kv_travels_in_fewer_bytes_when_both_workers_say_so(start_mesh: StartMesh) -> None:
    mesh = start_mesh(environ={"DIPTYCH_WIRE_COMPRESSION": "int8"})
    answer = await ask(mesh, request(PROMPT, max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5
    assert 0 < answer.phases.transfer.bytes < 0.6 * len(PROMPT) * TINY_TOKEN_BYTES
    assert answer.phases.transfer.encoding == "int8"
    await until_free(mesh)
