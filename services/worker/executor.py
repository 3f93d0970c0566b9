"""Computes a step with the engine: runs the model over the slices, samples, gives log-probabilities where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from services.engine.errors import EngineError, NonFiniteLogits
from services.engine.logprobs import token_logprobs
from services.engine.runner import Runner
from services.engine.sampling import Logits, sample
from services.worker.work import Computed, Work

_NOTHING = Computed()


class Executor:
    """`Execute` over a Runner. Called on the step thread only."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, work: Sequence[Work]) -> list[Computed | EngineError]:
        """Runs one step; raises EngineError when the model is broken. Logits that are fail only whose they are."""
        logits = self._runner.run([item.slice for item in work])
        ends = list(accumulate(item.slice.logit_count for item in work))
        results: list[Computed | EngineError] = [_NOTHING] * len(work)
        sampled = [index for index, item in enumerate(work) if item.slice.wants_logits]
        if sampled:
            # Mostly one row each, and then no copy.
            last = logits if len(sampled) == len(logits) else logits[[ends[index] - 1 for index in sampled]]
            for index, result in zip(sampled, _sample(last, [work[index] for index in sampled]), strict=True):
                results[index] = result
        for index, item in enumerate(work):
            if item.slice.wants_all_logits:
                own = logits[ends[index] - item.slice.logit_count : ends[index]]
                results[index] = _with_prompt(results[index], own, item)
        return results


def _sample(logits: Logits, work: Sequence[Work]) -> list[Computed | EngineError]:
    """A token for each row; a row that is not finite fails its request, and the others go on without it."""
    try:
        tokens = sample(
            logits,
            [item.sampling for item in work],
            [item.slice.end for item in work],
            [item.history for item in work],
        )
    except NonFiniteLogits as broken:
        good = sorted(set(range(len(work))) - set(broken.rows))
        results: list[Computed | EngineError] = [_failure(item) for item in work]
        for row, result in zip(good, _sample(logits[good], [work[row] for row in good]), strict=True):
            results[row] = result
        return results
    logged = {row: item.sampling.logprobs for row, item in enumerate(work) if item.sampling.logprobs is not None}
    if not logged:
        return [Computed(token_id=token) for token in tokens]
    found = token_logprobs(logits[list(logged)], [tokens[row] for row in logged], list(logged.values()))
    logprobs = dict(zip(logged, found, strict=True))
    return [Computed(token_id=token, logprobs=logprobs.get(row)) for row, token in enumerate(tokens)]


def _with_prompt(result: Computed | EngineError, logits: Logits, item: Work) -> Computed | EngineError:
    """`logits` are those after each of the slice's tokens: they foretell the tokens that follow."""
    history, alternatives = item.history, item.sampling.prompt_logprobs
    if isinstance(result, EngineError) or history is None or alternatives is None:
        return result
    following = history.token_ids[item.slice.start + 1 : min(item.slice.end + 1, history.prompt_tokens)]
    try:
        found = token_logprobs(logits[: len(following)], following, [alternatives] * len(following))
    except NonFiniteLogits:
        return _failure(item)
    return replace(result, prompt_logprobs=tuple(found))


def _failure(item: Work) -> EngineError:
    return EngineError(f"the model produced non-finite logits at the request's token {item.slice.end}")
