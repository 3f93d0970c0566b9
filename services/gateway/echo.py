"""The prompt at the beginning of the answer's text, which is what `echo` asks for. Pure.

Its tokens stand before those of the answer, with the log-probabilities that came with the first piece; nothing
foretells the first of them. What follows is the answer as it would be without an echo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.engine.sampling_spec import TokenLogprobs
from services.errors import DiptychError
from services.gateway.answer import LoggedToken, Piece
from services.gateway.detokenizer import Detokenizer
from services.gateway.request import GenerationRequest, TextPrompt
from services.gateway.text import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """A prompt to be shown. `text_offsets`: characters of `text` before each token; None where none are reported.

    `alone`: nothing of the answer is shown.
    """

    text: str
    token_ids: Sequence[int]
    text_offsets: Sequence[int] | None
    alone: bool

    def lead(self, first: Piece) -> Piece:
        """The first piece with the prompt before it. Raises DiptychError where it lacks the prompt's logprobs."""
        if self.alone:
            first = replace(first, text="", token_ids=(), reason="length", logprobs=(), shown=())
        return replace(first, text=self.text + first.text, shown=(*self._logged(first), *first.shown))

    def _logged(self, first: Piece) -> list[LoggedToken]:
        if self.text_offsets is None:
            return []
        found: Sequence[TokenLogprobs | None] = (None, *first.prompt_logprobs)
        if len(found) != len(self.token_ids):
            raise DiptychError(f"{len(self.token_ids)} prompt tokens came with {len(found) - 1} log-probabilities")
        return [
            LoggedToken(token_id=token_id, logprobs=logprobs, text_offset=offset)
            for token_id, logprobs, offset in zip(self.token_ids, found, self.text_offsets, strict=True)
        ]


def tokenize(tokenizer: Tokenizer, request: GenerationRequest) -> tuple[list[int], Echo | None]:
    """Token ids of the request's prompt, and its echo where one is wanted. Raises InvalidArgument as `encode` does."""
    if request.echo == "no":
        return tokenizer.encode(request.prompt), None
    logged = request.sampling.logprobs is not None
    offsets: Sequence[int] | None = None
    if isinstance(request.prompt, TextPrompt):
        text = request.prompt.text
        token_ids, offsets = tokenizer.encode_text(request.prompt)
    else:
        token_ids = tokenizer.encode(request.prompt)
        text = tokenizer.decode(token_ids)
        offsets = _offsets(tokenizer.decode, token_ids) if logged else None
    echo = Echo(
        text=text, token_ids=token_ids, text_offsets=offsets if logged else None, alone=request.echo == "instead"
    )
    return token_ids, echo


def _offsets(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[int]:
    detokenizer, offsets, made = Detokenizer(decode), [], 0
    for token_id in token_ids:
        offsets.append(made)
        made += len(detokenizer.push([token_id]))
    return offsets
