"""Computes a step with the engine: runs the model over the slices, samples where asked."""

from __future__ import annotations

from collections.abc import Sequence

from services.engine.runner import Runner
from services.engine.sampling import sample
from services.worker.work import Work


class Executor:
    """`Execute` over a Runner. Called on the step thread only."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, work: Sequence[Work]) -> list[int | None]:
        """Runs one step; raises EngineError when the model or its logits are broken."""
        logits = self._runner.run([item.slice for item in work])
        sampled = [item for item in work if item.slice.wants_logits]
        if not sampled:
            return [None] * len(work)
        tokens = iter(sample(logits, [item.sampling for item in sampled], [item.slice.end for item in sampled]))
        return [next(tokens) if item.slice.wants_logits else None for item in work]
