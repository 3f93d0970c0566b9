"""Log-probabilities and penalties through the whole mesh, disaggregated and aggregated, against transformers alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import cache

import grpc.aio
import openai
import pytest
import torch
from asking import Answer, ask, request, until_free, workers
from diptych.v1 import decode_pb2, decode_pb2_grpc, gateway_pb2, gateway_pb2_grpc, request_pb2, worker_pb2
from meshes import Mesh
from openai.types.chat import ChatCompletionTokenLogprob
from transformers import AutoModelForCausalLM, PreTrainedModel

CHUNK_TOKENS = 64  # of the shared mesh
VOCAB = 352
NEW_TOKENS = 12


@cache
def reference(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def log_softmax(folder: str, token_ids: Sequence[int]) -> torch.Tensor:
    """Row p: the log-probabilities of what follows the tokens up to p."""
    with torch.inference_mode():
        return torch.log_softmax(reference(folder)(torch.tensor([list(token_ids)])).logits[0].double(), dim=-1)


def prompt_of(tokens: int) -> list[int]:
    return torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


@pytest.fixture(params=["disaggregated", "aggregated"])
def either_mesh(request: pytest.FixtureRequest) -> Mesh:
    found: Mesh = request.getfixturevalue("mesh" if request.param == "disaggregated" else "aggregated_mesh")
    return found


async def messages(mesh: Mesh, asked: gateway_pb2.GenerateRequest) -> list[gateway_pb2.GenerateResponse]:
    async with grpc.aio.insecure_channel(mesh.grpc) as channel:
        return [m async for m in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(asked, timeout=60)]


def check(found: Sequence[request_pb2.TokenLogprobs], rows: torch.Tensor, token_ids: Sequence[int], top: int) -> None:
    """One for each token, whose row is that of what came before it."""
    assert len(found) == len(token_ids) == len(rows)
    for logprobs, row, token in zip(found, rows, token_ids, strict=True):
        assert logprobs.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(top)
        assert list(logprobs.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [float(row[i]) for i in logprobs.top_token_ids] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 20])
async def test_prompt_and_answer_have_the_references_logprobs_wherever_chunks_end(
    either_mesh: Mesh, tokens: int
) -> None:
    prompt = prompt_of(tokens)
    sampling = request_pb2.SamplingParams(temperature=0.7, seed=5, presence_penalty=1.0, logprobs=3, prompt_logprobs=20)
    got = await messages(either_mesh, request(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, sampling=sampling))
    answer = [token for message in got for token in message.token_ids]
    rows = log_softmax(either_mesh.model, [*prompt, *answer])
    check(got[0].prompt_logprobs, rows[: tokens - 1], prompt[1:], 20)
    assert not any(message.prompt_logprobs for message in got[1:])
    check([one for message in got for one in message.logprobs], rows[tokens - 1 : -1], answer, 3)
    await until_free(either_mesh)


async def test_who_asks_for_no_logprobs_gets_none(mesh: Mesh) -> None:
    got = await messages(mesh, request(prompt_of(5), max_tokens=3))
    assert not any(message.logprobs or message.prompt_logprobs for message in got)


def expected_greedy(folder: str, prompt: Sequence[int], sampling: request_pb2.SamplingParams) -> list[int]:
    """The definition, token by token, over logits of a whole forward each time."""
    answer: list[int] = []
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            logits = reference(folder)(torch.tensor([[*prompt, *answer]])).logits[0, -1].double().tolist()
        for token in {*prompt, *answer}:
            factor = sampling.repetition_penalty or 1.0
            logits[token] *= factor if logits[token] < 0 else 1 / factor
        for token in set(answer):
            logits[token] -= answer.count(token) * sampling.frequency_penalty + sampling.presence_penalty
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        answer.append(logits.index(max(logits)))
    return answer


PENALTIES = [
    request_pb2.SamplingParams(),
    request_pb2.SamplingParams(repetition_penalty=5.0),
    request_pb2.SamplingParams(presence_penalty=2.0, frequency_penalty=2.0),
    request_pb2.SamplingParams(frequency_penalty=-2.0),
    request_pb2.SamplingParams(repetition_penalty=0.4, presence_penalty=1.0, logit_bias={7: 4.0, 9: -100.0}),
]


async def test_greedy_answers_under_penalties_are_the_definitions_all_in_one_batch(either_mesh: Mesh) -> None:
    prompt = [5, 6, 7, 5, 6, 7, 5, 6, 7]
    asked = [request(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, sampling=sampling) for sampling in PENALTIES]
    answers: list[Answer] = await asyncio.gather(*(ask(either_mesh, one) for one in asked))
    expected = [expected_greedy(either_mesh.model, prompt, sampling) for sampling in PENALTIES]
    assert [answer.token_ids for answer in answers] == expected
    assert all(one != expected[0] for one in expected[1:]), "each of them changes the text"


async def test_a_request_that_goes_on_elsewhere_counts_its_old_answer_as_answer(mesh: Mesh) -> None:
    """As after a loss: the tokens sent so far come as tokens to start from. Were they taken for the prompt's, the
    frequency penalty would forget them, and the text would be another."""
    prompt, cut = [5, 6, 7] * 3, 5
    sampling = request_pb2.SamplingParams(frequency_penalty=2.0, presence_penalty=2.0)
    whole = (await ask(mesh, request(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, sampling=sampling))).token_ids
    (worker,) = [view for view in await workers(mesh) if view.role == worker_pb2.ROLE_DECODE]

    async def rest(prompt_tokens: int) -> list[int]:
        sequence = request_pb2.Sequence(
            request_id="again",
            token_ids=[*prompt, *whole[:cut]],
            sampling=sampling,
            max_new_tokens=NEW_TOKENS - cut,
            prompt_tokens=prompt_tokens,
        )
        async with grpc.aio.insecure_channel(worker.ref.address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            call = stub.Decode(decode_pb2.DecodeRequest(sequence=sequence, worker=worker.ref), timeout=30)
            return [token async for message in call for token in message.token_ids]

    assert await rest(len(prompt)) == whole[cut:]
    assert await rest(0) != whole[cut:], "this text would not notice"
    with pytest.raises(grpc.aio.AioRpcError, match="prompt_tokens"):
        await rest(len(prompt) + cut + 1)


def same_as(got: Sequence[ChatCompletionTokenLogprob], expected: Sequence[ChatCompletionTokenLogprob]) -> None:
    """The same tokens and, but for the rounding of another cut of the prompt, the same log-probabilities."""
    assert [(entry.token, entry.bytes) for entry in got] == [(entry.token, entry.bytes) for entry in expected]
    for one, other in zip(got, expected, strict=True):
        assert [top.token for top in one.top_logprobs] == [top.token for top in other.top_logprobs]
        numbers = [[entry.logprob, *(top.logprob for top in entry.top_logprobs)] for entry in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


async def test_the_openai_client_gets_the_logprobs_of_the_text_streamed_and_not(either_mesh: Mesh) -> None:
    options = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 30,
        "temperature": 0.8,
        "seed": 4,
        "frequency_penalty": 0.5,
        "logprobs": True,
        "top_logprobs": 4,
    }
    async with openai.AsyncOpenAI(base_url=f"{either_mesh.http}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(**options)
        assert whole.choices[0].logprobs is not None
        entries = whole.choices[0].logprobs.content
        streamed = [
            entry
            async for chunk in await client.chat.completions.create(stream=True, **options)
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content
        ]
        stop = whole.choices[0].message.content[4:6]
        stopped = await client.chat.completions.create(stop=stop, **options)
    same_as(streamed, entries)
    raw = bytes(byte for entry in entries for byte in entry.bytes)
    assert raw.decode(errors="replace") == whole.choices[0].message.content
    assert all(len(entry.top_logprobs) == 4 and entry.logprob <= 0 for entry in entries)
    assert all(math.fsum(math.exp(top.logprob) for top in entry.top_logprobs) < 1.0001 for entry in entries)
    cut = stopped.choices[0].logprobs.content
    assert 0 < len(cut) < len(entries)
    same_as(cut, entries[: len(cut)])
