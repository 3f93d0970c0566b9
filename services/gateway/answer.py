"""The answer as it grows: tokens in from the legs, events for the client out. Pure.

Life of an answer here
1. `begin_leg()`: a placement starts; offsets of its legs count from the tokens that are here already.
2. `accept(offset, token_ids, reason)`: tokens of either leg, possibly twice (the first token comes from both). New ones
   become text, held back while a character or a stop string may be incomplete.
3. The last token comes with a reason, or a stop string is found: the answer is finished, later tokens are ignored.
A lost leg changes nothing here: the next one goes on after the last token. A leg that skips a token, or contradicts one
that was taken, is an error: what was sent never changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.engine.sampling_spec import TokenLogprobs
from services.errors import DiptychError
from services.gateway.detokenizer import Detokenizer
from services.gateway.stop import StopMatcher

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedToken:
    """A token of the text that was handed out. `text_offset`: characters of the text before it.

    `logprobs` None: the first token of an echoed prompt, which nothing foretells.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    text_offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What became known at once: text to append, and the tokens it came from. `reason` is set on the last one.

    Where log-probabilities were asked for, `logprobs` are those of `token_ids`, one for one, and `shown` are the tokens
    whose text is in the text up to here and was not before: a token that a stop string has cut away, or that ends the
    answer, never is. `prompt_logprobs` come with the first piece.
    """

    text: str
    token_ids: Sequence[int]
    reason: FinishReason | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    shown: Sequence[LoggedToken] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


@dataclass(kw_only=True)
class Answer:
    """One answer. `clock` gives monotonic seconds; `echo_chars`: characters of an echoed prompt before it."""

    decode: Callable[[Sequence[int]], str]
    stops: Sequence[str]
    end_token_ids: frozenset[int]
    clock: Callable[[], float]
    echo_chars: int = 0
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    first_token_s: float | None = None  # on `clock`
    last_token_s: float | None = None

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.decode)
        self._matcher = StopMatcher(self.stops)
        self._leg_begin = 0
        self._made_chars = self.echo_chars  # text that the tokens have completed
        self._shown_chars = self.echo_chars  # text that was handed out: what may begin a stop string is held back
        self._hidden: deque[LoggedToken] = deque()  # tokens whose text was not

    def begin_leg(self) -> None:
        """The next offsets are those of a new placement."""
        self._leg_begin = len(self.token_ids)

    @property
    def leg_tokens(self) -> int:
        """Tokens that the current placement has brought."""
        return len(self.token_ids) - self._leg_begin

    def accept(
        self,
        offset: int,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Piece | None:
        """Takes tokens [offset, offset + len) of the current leg; returns what is new, None when nothing is.

        `logprobs` are one for each token, or none. Raises DiptychError when a token is missing before them or one of
        them contradicts a token taken before.
        """
        if logprobs and len(logprobs) != len(token_ids):
            raise DiptychError(f"{len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
        known = self.leg_tokens
        old = self.token_ids[self._leg_begin + offset :][: len(token_ids)]
        if list(token_ids[: len(old)]) != old:
            raise DiptychError(f"the legs disagree about the tokens at {offset}")
        if self.reason is not None:
            return None
        if offset > known:
            raise DiptychError(f"tokens {known} to {offset} of the answer are missing")
        piece = self._take(token_ids[len(old) :], logprobs[len(old) :], reason)
        return piece if piece.token_ids or piece.reason is not None else None

    def _take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], reason: FinishReason | None) -> Piece:
        text = ""
        taken: list[int] = []
        for token_id in token_ids:
            taken.append(token_id)
            self._count(token_id)
            if token_id not in self.end_token_ids:
                if logprobs:
                    own = logprobs[len(taken) - 1]
                    self._hidden.append(LoggedToken(token_id=token_id, logprobs=own, text_offset=self._made_chars))
                made = self._detokenizer.push([token_id])
                self._made_chars += len(made)
                text += self._matcher.push(made)
            if self._matcher.matched:
                self.reason = "stop"
                break
        if self.reason is None and reason is not None:
            text += self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
            self.reason = "stop" if self._matcher.matched else reason
        self._shown_chars += len(text)
        return Piece(
            text=text, token_ids=taken, reason=self.reason, logprobs=logprobs[: len(taken)], shown=self._show()
        )

    def _show(self) -> tuple[LoggedToken, ...]:
        """Those of the hidden tokens whose text, or the beginning of it, is shown by now."""
        whole = self.reason is not None and not self._matcher.matched  # also what has no text at all
        shown: list[LoggedToken] = []
        while self._hidden and (whole or self._hidden[0].text_offset < self._shown_chars):
            shown.append(self._hidden.popleft())
        return tuple(shown)

    def _count(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.last_token_s = self.clock()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    def time_per_token_s(self) -> float | None:
        """Mean time between tokens after the first; None with fewer than two."""
        if self.first_token_s is None or self.last_token_s is None or len(self.token_ids) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (len(self.token_ids) - 1)
