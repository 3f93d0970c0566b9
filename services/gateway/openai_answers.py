"""The OpenAI answers: bodies, stream chunks and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from services.errors import DiptychError, InvalidArgument, NotFound
from services.gateway.answer import LoggedToken
from services.gateway.openai_logprobs import BytesOf, Json, chat_logprobs, completion_logprobs
from services.gateway.placement import Usage
from services.rpc.errors import status_of

_STATUS = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,  # nginx's number for a client that closed its request
    "UNAVAILABLE": 503,
    "ABORTED": 503,
    "FAILED_PRECONDITION": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}


def status_code(error: BaseException) -> int:
    """HTTP status of an error."""
    return _STATUS.get(status_of(error)[0].name, 500)


def error_body(error: BaseException) -> Json:
    """`{"error": …}` as OpenAI clients read it. An error that is not ours says no more than its kind."""
    code, message, _ = status_of(error)
    known = isinstance(error, DiptychError | TimeoutError)
    details: Json = {
        "message": message if known else "internal error; the gateway's log says more",
        "type": _TYPES.get(status_code(error), "server_error"),
        "param": (error.field or None) if isinstance(error, InvalidArgument) else None,
        "code": "model_not_found" if isinstance(error, NotFound) else code.name.lower(),
    }
    if isinstance(error, NotFound):
        details["param"] = "model"
    return {"error": details}


@dataclass(kw_only=True, slots=True)
class Choice:
    """One answer as it comes in; `reason` once it has ended."""

    index: int
    text: str = ""
    shown: list[LoggedToken] = field(default_factory=list)
    reason: str = ""

    def add(self, text: str, shown: Sequence[LoggedToken]) -> None:
        """The next part of it."""
        self.text += text
        self.shown += shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How the answers are written. `created` is wall-clock seconds; `logprobs`: they were asked for."""

    chat: bool
    request_id: str
    created: int
    model: str
    logprobs: bool
    bytes_of: BytesOf

    def body(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """The whole answers."""
        written: list[JsonValue] = [self._choice(choice) for choice in choices]
        return {**self._head("chat.completion"), "choices": written, "usage": usage_body(usage)}

    def _choice(self, choice: Choice) -> Json:
        logprobs = self._logprobs(choice.shown)
        written: Json = {"index": choice.index, "logprobs": logprobs, "finish_reason": choice.reason}
        if self.chat:
            written["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            written["text"] = choice.text
        return written

    def chunk(self, index: int, text: str, shown: Sequence[LoggedToken], *, first: bool, wants_usage: bool) -> Json:
        """A part of a streamed answer."""
        choice: Json = {"index": index, "logprobs": self._logprobs(shown), "finish_reason": None}
        if self.chat:
            choice["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            choice["text"] = text
        return self._chunk([choice], {"usage": None} if wants_usage else {})

    def last_chunk(self, index: int, reason: str, *, wants_usage: bool) -> Json:
        """The end of a streamed answer."""
        choice: Json = {"index": index, "logprobs": None, "finish_reason": reason}
        if self.chat:
            choice["delta"] = {}
        else:
            choice["text"] = ""
        return self._chunk([choice], {"usage": None} if wants_usage else {})

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream whose client asked for the usage."""
        return self._chunk([], {"usage": usage_body(usage)})

    def _logprobs(self, shown: Sequence[LoggedToken]) -> Json | None:
        if not self.logprobs:
            return None
        return (chat_logprobs if self.chat else completion_logprobs)(shown, self.bytes_of)

    def _chunk(self, choices: list[JsonValue], more: Json) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": choices, **more}

    def _head(self, chat_object: str) -> Json:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}",
            "object": chat_object if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }


def usage_body(usage: Usage) -> Json:
    """Token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
