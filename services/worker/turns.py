"""What workers tell a policy: how long a prompt and its chunks take by themselves; and what a policy is now.

Until a worker has learned how long prompts take, GUESSED_TOKEN_S stands in for it.
"""

from __future__ import annotations

from typing import Final

from services.engine.plan import Slice
from services.latency import PrefillFit
from services.schedule.auto import Auto
from services.schedule.policy import Policy

GUESSED_TOKEN_S: Final = 1e-3
"""Rather too long: a prompt that joins too low is promoted, one that joins too high holds others up."""


def prompt_s(fit: PrefillFit | None, tokens: int) -> float:
    """Of a whole prompt."""
    return tokens * GUESSED_TOKEN_S if fit is None else fit.prompt_s(tokens)


def chunk_s(fit: PrefillFit | None, piece: Slice, step_s: float) -> float:
    """Of a chunk in a step that took `step_s`, which is what it is charged at most."""
    if fit is None:
        return step_s
    tokens = len(piece.token_ids)
    return min(step_s, fit.step_s(tokens=tokens, squares=tokens * (2 * piece.start + tokens)))


def mode_of(policy: Policy) -> str:
    """The name of the policy that it is, or is at the moment."""
    return policy.mode if isinstance(policy, Auto) else policy.name


def described(policy: Policy) -> str:
    """Its name, and what it is now if that changes."""
    mode = mode_of(policy)
    return mode if mode == policy.name else f"{policy.name} ({mode})"
