"""How a request samples, and what a sampled token is reported with. Plain values; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
"""Most alternatives that are reported for a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSpec:
    """How a request samples. The defaults are greedy. Raises ValueError naming the field that is out of range."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]; 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # [0, 1); 0 is off
    seed: int = 0  # uint64
    repetition_penalty: float = 1.0  # above 0; 1 is off
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, [-100, 100]), each id once
    logprobs: int | None = None  # alternatives reported with each generated token, [0, 20]; None is off
    prompt_logprobs: int | None = None  # the same for each token of the prompt
    # Asked for every row of every step, so worked out once.
    reads_history: bool = field(init=False, repr=False, compare=False)  # logits depend on the tokens so far
    changes_logits: bool = field(init=False, repr=False, compare=False)  # by penalties or bias

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and not negative, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, not {self.top_k}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must lie in [0, 1), not {self.min_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be an unsigned 64-bit number, not {self.seed}")
        self._check_changes()
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise ValueError(f"{name} must lie in [0, {MAX_LOGPROBS}], not {count}")
        penalties = (self.repetition_penalty != 1, self.presence_penalty != 0, self.frequency_penalty != 0)
        object.__setattr__(self, "reads_history", any(penalties))
        object.__setattr__(self, "changes_logits", any(penalties) or bool(self.logit_bias))

    def _check_changes(self) -> None:
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty must be finite and above 0, not {self.repetition_penalty}")
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -2 <= penalty <= 2:
                raise ValueError(f"{name}_penalty must lie in [-2, 2], not {penalty}")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(f"logit_bias may name {MAX_LOGIT_BIASES} tokens, not {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias:
            if token_id < 0 or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias must lie in [-100, 100] for a token id, not {bias} for {token_id}")


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The tokens before the one to sample: the first `prompt_tokens` are the client's prompt, the rest the answer."""

    token_ids: Sequence[int]
    prompt_tokens: int

    @property
    def answer(self) -> Sequence[int]:
        """The answer so far, wherever it was generated."""
        return self.token_ids[self.prompt_tokens :]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one token's place, as the model gave them: nothing is applied to them.

    `top_ids` are the most probable tokens, best first, and `top_logprobs` theirs; the token itself may be among them.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    @property
    def top(self) -> list[tuple[int, float]]:
        """The most probable tokens with their log-probabilities."""
        return list(zip(self.top_ids, self.top_logprobs, strict=True))
