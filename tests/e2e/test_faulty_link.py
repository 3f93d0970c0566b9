"""Workers whose link is made bad with --fault: answers stay right, and nothing is kept."""

from __future__ import annotations

import pytest
from asking import ask, request, until_free
from meshes import StartMesh

TINY_TOKEN_BYTES = 768
PROMPTS = [[200 + i, *range(3, 102)] for i in range(3)]  # none begins like another


@pytest.mark.slow
async def test_a_cut_hand_off_and_a_lost_acknowledgement_cost_time_and_change_no_answer(start_mesh: StartMesh) -> None:
    """The first hand-off is cut in its middle, the first that arrives is never acknowledged."""
    cut_at = 50 * TINY_TOKEN_BYTES
    mesh = start_mesh(environ={"DIPTYCH_FAULT": f"delay=20ms,reorder=10ms,rate=100Mbit,cut-after={cut_at}B,drop-ack=1"})
    options = {"max_tokens": 20, "ignore_eos": True}
    answers = [await ask(mesh, request(prompt, **options)) for prompt in PROMPTS]
    assert answers[0].phases.placements == 2, "the first hand-off was not cut"
    moved = [answer.phases.transfer for answer in answers if answer.phases.transfer.bytes]
    assert len(moved) >= 2
    assert all(each.duration.ToTimedelta().total_seconds() >= 0.02 for each in moved)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert (await ask(mesh, request(prompt, **options))).token_ids == answer.token_ids
    await until_free(mesh)
