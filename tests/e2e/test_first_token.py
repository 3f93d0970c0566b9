"""Cases F1–F4: the first token is sampled by prefill and is judged like any other."""

from __future__ import annotations

import httpx
import pytest
import torch
from asking import ask, request, until_free
from diptych.v1 import request_pb2
from meshes import Mesh
from transformers import AutoModelForCausalLM

BLOCK = 16
END = 2


async def test_max_tokens_1_gives_one_token_and_nothing_is_decoded(mesh: Mesh) -> None:
    """F1."""
    answer = await ask(mesh, request([5, 6, 7], max_tokens=1, ignore_eos=True))
    assert answer.finish is not None
    assert len(answer.token_ids) == 1
    assert answer.finish.reason == request_pb2.FINISH_REASON_LENGTH
    assert answer.finish.usage.completion_tokens == 1
    assert not answer.phases.HasField("time_per_token")
    body = {"model": "tiny-llama", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=30) as client:
        reply = (await client.post(f"{mesh.http}/v1/completions", json=body)).json()
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 1)
    await until_free(mesh)


async def test_a_first_token_that_completes_a_stop_string_ends_the_request_there(mesh: Mesh) -> None:
    """F2: finished at prefill, one terminal message, nothing of the stop string shown, everything freed."""
    prompt = [5, 6, 7, 8]
    free = await ask(mesh, request(prompt, max_tokens=4, ignore_eos=True))
    first = (await ask(mesh, request(prompt, max_tokens=1, ignore_eos=True))).text
    assert first and free.text.startswith(first)
    stopped = await ask(mesh, request(prompt, max_tokens=50, ignore_eos=True, stop=[first]))
    assert stopped.finish is not None
    assert (stopped.text, stopped.finish.reason) == ("", request_pb2.FINISH_REASON_STOP)
    assert stopped.finish.usage.completion_tokens == 1
    await until_free(mesh)


def prompt_whose_first_token_ends_it(folder: str) -> list[int]:
    """Searches, with transformers alone, for a prompt after which greedy decoding says end-of-sequence at once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        prompts = torch.randint(3, 352, (512, 6), generator=generator)
        with torch.inference_mode():
            last = model(prompts).logits[:, -1]
        if len(hits := (last.argmax(-1) == END).nonzero()):
            return prompts[int(hits[0])].tolist()
    raise AssertionError("this model never ends at once")


async def test_a_first_token_that_is_end_of_sequence_ends_the_request_there(mesh: Mesh) -> None:
    """F2: the same prompt goes on when told to ignore the end."""
    prompt = prompt_whose_first_token_ends_it(mesh.model)
    answer = await ask(mesh, request(prompt, max_tokens=9))
    assert answer.finish is not None
    assert answer.finish.reason == request_pb2.FINISH_REASON_STOP
    assert (answer.text, answer.token_ids) == ("", [END])
    assert answer.finish.usage.completion_tokens == 1
    ignored = await ask(mesh, request(prompt, max_tokens=9, ignore_eos=True))
    assert len(ignored.token_ids) == 9 and ignored.token_ids[0] == END
    await until_free(mesh)


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1])
async def test_prompts_at_block_edges_hand_off_whole_and_usage_agrees(
    mesh: Mesh, aggregated_mesh: Mesh, tokens: int
) -> None:
    """F3, F4."""
    prompt = [300 + tokens, *range(20, 19 + tokens)]  # none begins like another: nothing of it is cached
    asked = request(prompt, max_tokens=BLOCK + 2, ignore_eos=True)
    apart, together = await ask(mesh, asked), await ask(aggregated_mesh, asked)
    assert apart.finish is not None and together.finish is not None
    assert apart.token_ids == together.token_ids
    assert apart.finish.usage == together.finish.usage
    assert apart.finish.usage.prompt_tokens == tokens
    assert apart.phases.transfer.bytes and not together.phases.transfer.bytes
