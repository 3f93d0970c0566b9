"""What the decode core is told, and what it says: commands in, events out. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.sampling_spec import SamplingSpec, TokenLogprobs
from services.engine.sequence import FinishReason
from services.errors import DiptychError
from services.schedule.policy import Change


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """A request to decode. `local`: its KV is computed here instead of being handed over.

    `prompt_tokens` of its tokens are the client's prompt, the others were generated in earlier placements; 0 means all.
    `deadline_s`: monotonic time after which nobody waits for it.
    """

    key: str
    token_ids: tuple[int, ...]
    sampling: SamplingSpec
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    local: bool
    prompt_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The logits of a prompt computed here are needed, all of them: none of it may come from a cache."""
        return self.local and self.sampling.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants it any more. Unknown keys are fine."""

    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """The KV of all its tokens is in the reserved blocks; nothing writes to them any more."""

    key: str
    first_token_id: int
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The hand-off is lost; `Drained` follows when nothing writes to the blocks any more."""

    key: str
    error: DiptychError


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing writes to the blocks of a failed or cancelled hand-off any more."""

    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """The copy that was asked for with `Copy` has ended: nothing reads or writes its blocks on its behalf any more.

    With an error, nobody knows what is in the blocks that it wrote to.
    """

    key: str
    seconds: float
    error: DiptychError | None = None


Command = Submit | Cancel | Received | TransferFailed | Drained | Copied


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Copy KV between blocks of the device and as many of the host, to the host if `out`; `Copied` must follow."""

    key: str
    out: bool
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """Blocks for the hand-off are there: pull the KV of tokens from `skip_tokens` on into them.

    That of the tokens before is there already, in whole blocks that others may share: nobody may write to them.
    """

    key: str
    blocks: tuple[int, ...]
    skip_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """New tokens, in order; `offset` counts this request's generated tokens before the first one here.

    `logprobs`: one for each token where the request asked for them; None for a first token that was handed over.
    """

    key: str
    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """The KV is there and the first token known; once, before the first Tokens. Monotonic seconds of this process."""

    key: str
    submitted_s: float
    admitted_s: float
    ready_s: float  # received, or the local prefill computed
    cached_tokens: int  # of the prompt, from the prefix cache
    chunks: int  # of the local prefill
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of a prompt computed here, from its second token on


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """What scheduling did with a request that decodes. `changes`: the first ones, for its trace."""

    lowest_level: int = 0  # of the feedback queue; 0 is the top
    preemptions: int = 0  # times it could have gone on and others ran instead
    recomputed: int = 0  # times it gave its blocks up and was computed again
    swapped_bytes: int = 0  # in both directions
    waited_s: float = 0.0  # without a step while it decoded
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The request is over; everything it held is free. Monotonic seconds of this process."""

    key: str
    reason: FinishReason
    ready_s: float
    ended_s: float
    turns: Turns = Turns()


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The request is over with an error."""

    key: str
    error: DiptychError


Event = Reserved | Copy | Began | Tokens | Finished | Failed
