"""The executor over a scripted runner: whose logits are broken fails alone, and who asks for log-probabilities gets
them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from services.engine.card import ModelCard
from services.engine.errors import EngineError
from services.engine.plan import Slice
from services.engine.sampling_spec import History, SamplingSpec
from services.worker.executor import Executor
from services.worker.work import Computed, Work

VOCAB = 30


class ScriptedRunner:
    """Logits that depend on token and position alone: row p of the table, moved on by the token. Some are broken."""

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.table = torch.randn((64, VOCAB), generator=torch.Generator().manual_seed(1)) * 3
        self.broken = broken  # tokens after which the logits are NaN

    @property
    def card(self) -> ModelCard:
        raise NotImplementedError

    @property
    def block_tokens(self) -> int:
        return 16

    def after(self, token: int, position: int) -> torch.Tensor:
        logits = self.table[position].roll(token)
        return logits * float("nan") if token in self.broken else logits

    def run(self, slices: Sequence[Slice]) -> torch.Tensor:
        rows = [
            self.after(token, position)
            for s in slices
            for position, token in enumerate(s.token_ids, s.start)
            if s.wants_all_logits or (s.wants_logits and position == s.end - 1)
        ]
        return torch.stack(rows) if rows else torch.empty((0, VOCAB))


def work(
    key: str,
    token_ids: Sequence[int],
    spec: SamplingSpec,
    *,
    start: int = 0,
    end: int | None = None,
    prompt_tokens: int | None = None,
) -> Work:
    """Tokens [start, end) of a sequence as a core would ask for them."""
    end = len(token_ids) if end is None else end
    piece = Slice(token_ids=tuple(token_ids[start:end]), start=start, blocks=(0,), wants_logits=end == len(token_ids))
    return Work.of(
        key,
        piece,
        spec,
        token_ids,
        prompt_tokens=len(token_ids) if prompt_tokens is None else prompt_tokens,
        wants_prompt_logprobs=spec.prompt_logprobs is not None,
    )


def good(result: Computed | EngineError) -> Computed:
    assert isinstance(result, Computed)
    return result


GREEDY = SamplingSpec()


def test_a_step_without_wanted_logits_gives_nothing() -> None:
    assert Executor(ScriptedRunner())([work("a", range(9), GREEDY, end=4)]) == [Computed()]
    assert Executor(ScriptedRunner())([]) == []


def test_requests_that_ask_for_nothing_carry_no_history() -> None:
    assert work("a", range(9), GREEDY).history is None
    assert work("a", range(9), SamplingSpec(presence_penalty=1.0), end=4).history is None, "nothing is sampled yet"
    assert work("a", range(9), SamplingSpec(presence_penalty=1.0)).history == History(
        token_ids=tuple(range(9)), prompt_tokens=9
    )


@pytest.mark.parametrize("broken", [(), (3,), (1, 3), (1, 2, 3)], ids=str)
def test_only_whose_logits_are_broken_fails_and_the_others_sample_as_if_alone(broken: tuple[int, ...]) -> None:
    runner = ScriptedRunner(frozenset(broken))
    specs = [SamplingSpec(temperature=1.0, seed=token, logprobs=2) for token in (1, 2, 3)]
    items = [work(str(spec.seed), [5, spec.seed], spec) for spec in specs]
    results = Executor(runner)([*items, work("silent", [7, 8], GREEDY, end=1)])
    assert results[-1] == Computed()
    for item, result in zip(items, results, strict=False):
        if int(item.key) in broken:
            assert isinstance(result, EngineError) and "non-finite" in str(result)
        else:
            assert Executor(ScriptedRunner())([item]) == [result]


def test_logprobs_are_of_the_raw_distribution_whatever_was_applied_to_it() -> None:
    runner = ScriptedRunner()
    spec = SamplingSpec(logit_bias=((4, 100.0),), logprobs=3, presence_penalty=2.0)
    (result,) = Executor(runner)([work("a", [1, 2], spec, prompt_tokens=1)])
    expected = torch.log_softmax(runner.after(2, 1).double(), dim=-1)
    assert good(result).token_id == 4
    logprobs = good(result).logprobs
    assert logprobs is not None and logprobs.logprob == pytest.approx(float(expected[4]))
    assert list(logprobs.top_ids) == expected.topk(3).indices.tolist()


def test_those_who_did_not_ask_get_no_logprobs_beside_one_who_did() -> None:
    asks = SamplingSpec(logprobs=0)
    first, second = Executor(ScriptedRunner())([work("a", [1], GREEDY), work("b", [2], asks)])
    assert good(first).logprobs is None and good(second).logprobs is not None


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
@pytest.mark.parametrize("resumed", [0, 1, 5], ids="{} tokens of an earlier answer".format)
def test_prompt_logprobs_are_one_for_each_token_after_the_first_wherever_chunks_end(
    tokens: int, chunk: int, resumed: int
) -> None:
    runner, spec = ScriptedRunner(), SamplingSpec(prompt_logprobs=2)
    ids = [(7 * i + 1) % VOCAB for i in range(tokens + resumed)]
    results = [
        good(Executor(runner)([work("a", ids, spec, start=s, end=min(s + chunk, len(ids)), prompt_tokens=tokens)])[0])
        for s in range(0, len(ids), chunk)
    ]
    found = [logprobs for result in results for logprobs in result.prompt_logprobs]
    expected = [torch.log_softmax(runner.after(ids[p], p).double(), dim=-1) for p in range(tokens - 1)]
    assert [logprobs.logprob for logprobs in found] == pytest.approx(
        [float(expected[p][ids[p + 1]]) for p in range(tokens - 1)]
    )
    assert [list(logprobs.top_ids) for logprobs in found] == [e.topk(2).indices.tolist() for e in expected]
    last = runner.after(ids[-1], len(ids) - 1)
    assert [result.token_id for result in results] == [None] * (len(results) - 1) + [int(last.argmax())]


def test_a_prompt_whose_logits_are_broken_in_its_middle_fails_alone() -> None:
    runner = ScriptedRunner(frozenset({3}))
    asks = SamplingSpec(prompt_logprobs=0)
    results = Executor(runner)([work("a", [2, 3, 4], asks), work("b", [2, 4], asks), work("c", [2, 3, 4], GREEDY)])
    assert isinstance(results[0], EngineError)
    assert len(good(results[1]).prompt_logprobs) == 1
    assert good(results[2]).token_id is not None, "nobody looks at the logits in its middle"
