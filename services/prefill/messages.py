"""What the prefill core is told, and what it says: commands in, events out. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.sampling_spec import SamplingSpec, TokenLogprobs
from services.engine.sequence import FinishReason
from services.errors import DiptychError


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """A prompt to compute. `key` is its transfer id.

    `prompt_tokens` of its tokens are the client's prompt, the others were generated in earlier placements; 0 means all.
    """

    key: str
    token_ids: tuple[int, ...]
    sampling: SamplingSpec
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    prompt_tokens: int = 0
    tenant: str = ""
    priority: int = 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The logits of the whole prompt are needed: none of it may come from a cache."""
        return self.sampling.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants it any more. Unknown keys are fine."""

    key: str


@dataclass(frozen=True, slots=True)
class Released:
    """The transfer is over and reads the blocks no longer. Unknown keys are fine."""

    key: str


Command = Submit | Cancel | Released


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """The prompt has its blocks; the transfer may be offered."""

    key: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The KV of tokens [0, computed_tokens) is in place."""

    key: str
    computed_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstToken:
    """The prompt is computed. Times are monotonic seconds of this process."""

    key: str
    token_id: int
    finish: FinishReason | None
    submitted_s: float
    admitted_s: float
    computed_s: float
    cached_tokens: int  # of the prompt, from the prefix cache
    chunks: int
    logprobs: TokenLogprobs | None = None  # of the token
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the client's prompt from its second token on


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """It will not be computed. When `holds_blocks`, `Released` must follow for them to be free."""

    key: str
    error: DiptychError
    holds_blocks: bool


Event = Admitted | Progress | FirstToken | Failed
