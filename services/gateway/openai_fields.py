"""The OpenAI requests: which fields there are, what is not supported yet, and how they become a request of ours.

Fields are read strictly: a value of the wrong type, an unknown field and a field that is not supported yet are refused
by name. Ranges are checked where the native door's are (`request.validate`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import from_json

from services.engine.sampling_spec import MAX_LOGPROBS
from services.errors import InvalidArgument
from services.gateway.request import (
    MAX_ANSWERS,
    ChatPrompt,
    GenerationRequest,
    Message,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
)

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

# Known fields whose other values are not served where a body does not declare them; these values mean "off".
_OFF: Mapping[str, tuple[JsonValue, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_logprobs": (None,),
    "min_tokens": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
    "web_search_options": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "metadata": (None, {}),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """What a stream carries besides the answer."""

    include_usage: bool = False


class TextPart(_Strict):
    """A part of a message; only text is there."""

    type: Literal["text"]
    text: str


class ChatTurn(_Strict):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart]


class Body(_Strict):
    """What both kinds of requests have. None is the same as absent."""

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_ANSWERS)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def request(self, prompt: Prompt, max_tokens: int, logprobs: int | None) -> GenerationRequest:
        """The request of ours; `logprobs` as in Sampling."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options", "is only allowed when stream is true")
        if not self.model:
            raise InvalidArgument("model", "must not be empty")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return GenerationRequest(
            prompt=prompt,
            model=self.model,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
                min_p=self.min_p or 0.0,
                seed=None if self.seed is None else self.seed % (1 << 64),
                repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                logit_bias=_biases(self.logit_bias or {}),
                logprobs=logprobs,
            ),
            max_tokens=max_tokens,
            stop=tuple(stops),
            ignore_eos=bool(self.ignore_eos),
            answers=self.n or 1,
        )

    @property
    def wants_usage(self) -> bool:
        """A last chunk with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[ChatTurn]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def to_request(self) -> GenerationRequest:
        """Without a limit the answer may fill the context."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidArgument("max_completion_tokens", "contradicts max_tokens")
        turns = [Message(role=turn.role, content=_text(turn.content)) for turn in self.messages]
        limit = self.max_completion_tokens or self.max_tokens or 0
        return self.request(ChatPrompt(field="messages", messages=turns), limit, self._logprobs())

    def _logprobs(self) -> int | None:
        top = self.top_logprobs or 0
        if top and not self.logprobs:
            raise InvalidArgument("top_logprobs", "is only allowed when logprobs is true")
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidArgument("top_logprobs", f"{top} is not in [0, {MAX_LOGPROBS}]")
        return top if self.logprobs else None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: JsonValue
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = None
    echo: bool | None = None

    def to_request(self) -> GenerationRequest:
        """The prompt is text or token ids, also as a list of exactly one. With an echo it may be all that is wanted."""
        if self.max_tokens == 0 and not self.echo:
            raise InvalidArgument("max_tokens", "0 is only allowed when echo is true")
        limit = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        request = self.request(_prompt(self.prompt), limit or 1, self.logprobs)
        if not self.echo:
            return request
        sampling = replace(request.sampling, prompt_logprobs=self.logprobs)
        return replace(request, sampling=sampling, echo="before" if limit else "instead")


BodyT = TypeVar("BodyT", ChatBody, CompletionBody)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """Reads a body. Raises InvalidArgument naming the first field that is wrong."""
    try:
        fields = from_json(raw)
    except ValueError as error:
        raise InvalidArgument("", f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument("", "the body is not a JSON object")
    for name in [name for name in fields if name in _OFF and name not in kind.model_fields]:
        value = fields.pop(name)
        if not any(type(value) is type(off) and value == off for off in _OFF[name]):
            raise InvalidArgument(name, "is not supported yet with this value")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _one_line(error) from None


def _one_line(error: ValidationError) -> InvalidArgument:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # In unions pydantic's location ends with the name of the branch: the field is what comes before it.
    field = ""
    for step in first["loc"]:
        if isinstance(step, int):
            field += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "list", "int"):
            field += f".{step}" if field else step
        else:
            break
    problem = {"missing": "is required", "extra_forbidden": "unknown field"}.get(first["type"], first["msg"])
    return InvalidArgument(field, problem[:1].lower() + problem[1:])


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    if wrong := next((key for key in biases if not _TOKEN_ID.fullmatch(key)), None):
        raise InvalidArgument("logit_bias", f"{wrong!r} is not a token id")
    return {int(key): bias for key, bias in biases.items()}


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _prompt(prompt: JsonValue) -> Prompt:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) != 1:
            raise InvalidArgument("prompt", f"{len(prompt)} prompts in one request are not supported yet; send one")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(field="prompt", text=prompt)
    if isinstance(prompt, list):
        ids = [item for item in prompt if isinstance(item, int) and not isinstance(item, bool)]
        if len(ids) == len(prompt):
            return TokenPrompt(field="prompt", token_ids=ids)
    raise InvalidArgument("prompt", "must be a string, a list of token ids, or a list of one of these")
