"""A request as the gateway understands it, and the one validation that both doors share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.engine.sampling_spec import MAX_LOGIT_BIASES, MAX_LOGPROBS
from services.errors import InvalidArgument, NotFound

MAX_ANSWERS = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_NAME_CHARS = 256
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompt:
    """Plain text. `field` is what the client calls it."""

    field: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """A conversation, oldest turn first."""

    field: str
    messages: Sequence[Message]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    field: str
    token_ids: Sequence[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt

Echo = Literal["no", "before", "instead"]
"""Whether the text begins with the prompt's. "instead": there is nothing more; one token is computed and dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen, and what is reported of their probabilities; request.proto has the words.

    The zero value is greedy. `seed` None: the gateway draws one. `logprobs`, `prompt_logprobs` None: not reported.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """The client's objectives in seconds; None means none."""

    time_to_first_token_s: float | None = None
    time_per_token_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What a client wants. `model` empty means the only one; `max_tokens` 0 means as many as the context allows.

    With an echo `sampling.prompt_logprobs` equals `sampling.logprobs`; with "instead" `max_tokens` is 1.
    """

    prompt: Prompt
    model: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    echo: Echo = "no"
    answers: int = 1
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    slo: Slo = field(default_factory=Slo)
    client_request_id: str = ""


def answer_seed(seed: int, index: int) -> int:
    """The seed of one of several answers, in [0, 2^64); the first one's is that of the request.

    The steps are those of a Weyl sequence (2^64 over the golden ratio, odd): the answers of requests with neighbouring
    seeds do not meet. As keys of the counter-based generator all seeds are equally good.
    """
    return (seed + index * 0x9E3779B97F4A7C15) % (1 << 64)


def validate(request: GenerationRequest, *, model: str, vocab: int) -> None:
    """Checks everything that needs no tokenizer.

    Raises InvalidArgument naming the field and its limit, or NotFound for a model other than `model`.
    """
    if request.model not in ("", model):
        raise NotFound(f"model {request.model!r} does not exist; this gateway serves {model!r}")
    _check_prompt(request.prompt, vocab)
    _check_sampling(request.sampling)
    _check_penalties(request.sampling, vocab)
    _check_logprobs(request.sampling)
    _check_stops(request.stop)
    if not 1 <= request.answers <= MAX_ANSWERS:
        raise InvalidArgument("answers", f"{request.answers} is not in [1, {MAX_ANSWERS}]")
    if request.max_tokens < 0:
        raise InvalidArgument("max_tokens", f"{request.max_tokens} is negative")
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise InvalidArgument("deadline", "must be longer than 0 s")
    for name, objective in (
        ("slo.time_to_first_token", request.slo.time_to_first_token_s),
        ("slo.time_per_token", request.slo.time_per_token_s),
    ):
        if objective is not None and not objective > 0:
            raise InvalidArgument(name, "must be longer than 0 s")
    for name, value in (("tenant", request.tenant), ("client_request_id", request.client_request_id)):
        if len(value) > MAX_NAME_CHARS:
            raise InvalidArgument(name, f"{len(value)} characters are more than {MAX_NAME_CHARS}")


def check_length(prompt: Prompt, *, longest_token: int, context_tokens: int) -> None:
    """Raises InvalidArgument for a text that cannot fit the context, whatever its tokens are.

    Tokenizing takes seconds a megabyte and cannot be stopped. `longest_token`: characters of the model's longest token.
    """
    match prompt:
        case TextPrompt():
            length = len(prompt.text)
        case ChatPrompt():
            length = sum(len(message.content) for message in prompt.messages)
        case TokenPrompt():
            return
    if length > longest_token * context_tokens:
        raise InvalidArgument(
            prompt.field, f"{length} characters cannot fit into the context of {context_tokens} tokens"
        )


def check_prompt_logprobs(request: GenerationRequest, prompt_tokens: int, *, max_bytes: int) -> None:
    """Raises InvalidArgument for a report that fits no message: it comes as one, with the first token."""
    sampling = request.sampling
    if sampling.prompt_logprobs is None:
        return
    size = prompt_tokens * (12 + 9 * sampling.prompt_logprobs)  # upper bound: a token id takes 5 bytes, a logprob 4
    if size > max_bytes:
        raise InvalidArgument(
            "prompt_logprobs" if request.echo == "no" else "logprobs",
            f"{sampling.prompt_logprobs} for {prompt_tokens} tokens are up to {size} bytes, more than {max_bytes}",
        )


def fit(prompt: Prompt, prompt_tokens: int, max_tokens: int, *, context_tokens: int) -> int:
    """Tokens that may be generated. Raises InvalidArgument when prompt and max_tokens do not fit the context."""
    if prompt_tokens == 0:
        raise InvalidArgument(prompt.field, "must hold at least one token")
    if prompt_tokens >= context_tokens:
        raise InvalidArgument(
            prompt.field,
            f"{prompt_tokens} tokens leave no room for an answer in the context of {context_tokens} tokens",
        )
    if prompt_tokens + max_tokens > context_tokens:
        raise InvalidArgument(
            "max_tokens",
            f"prompt ({prompt_tokens} tokens) + max_tokens ({max_tokens}) = {prompt_tokens + max_tokens} "
            f"is over the context of {context_tokens} tokens",
        )
    return max_tokens or context_tokens - prompt_tokens


def _check_prompt(prompt: Prompt, vocab: int) -> None:
    match prompt:
        case TextPrompt():
            if not prompt.text:
                raise InvalidArgument(prompt.field, "must not be empty")
        case ChatPrompt():
            if not prompt.messages:
                raise InvalidArgument(prompt.field, "must hold at least one message")
            for index, message in enumerate(prompt.messages):
                if message.role not in ROLES:
                    where = f"{prompt.field}[{index}].role"
                    raise InvalidArgument(where, f"{message.role!r} is none of {', '.join(ROLES)}")
        case TokenPrompt():
            if not prompt.token_ids:
                raise InvalidArgument(prompt.field, "must hold at least one token id")
            low, high = min(prompt.token_ids), max(prompt.token_ids)
            if low < 0 or high >= vocab:
                wrong = low if low < 0 else high
                raise InvalidArgument(prompt.field, f"token id {wrong} is outside the vocabulary [0, {vocab})")


def _check_sampling(sampling: Sampling) -> None:
    if not (math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= 2):
        raise InvalidArgument("temperature", f"{sampling.temperature:g} is not a number in [0, 2]")
    if not 0 < sampling.top_p <= 1:
        raise InvalidArgument("top_p", f"{sampling.top_p:g} is not in (0, 1]")
    if not 0 <= sampling.top_k < 1 << 32:
        raise InvalidArgument("top_k", f"{sampling.top_k} is not in [0, 2^32)")
    if not 0 <= sampling.min_p < 1:
        raise InvalidArgument("min_p", f"{sampling.min_p:g} is not in [0, 1)")
    if sampling.seed is not None and not 0 <= sampling.seed < 1 << 64:
        raise InvalidArgument("seed", f"{sampling.seed} is not in [0, 2^64)")


def _check_penalties(sampling: Sampling, vocab: int) -> None:
    if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
        raise InvalidArgument("repetition_penalty", f"{sampling.repetition_penalty:g} is not a number above 0")
    for name, penalty in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ):
        if not -2 <= penalty <= 2:
            raise InvalidArgument(name, f"{penalty:g} is not in [-2, 2]")
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidArgument("logit_bias", f"{len(sampling.logit_bias)} tokens are more than {MAX_LOGIT_BIASES}")
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < vocab:
            raise InvalidArgument("logit_bias", f"token id {token_id} is outside the vocabulary [0, {vocab})")
        if not -100 <= bias <= 100:
            raise InvalidArgument("logit_bias", f"{bias:g} for token id {token_id} is not in [-100, 100]")


def _check_logprobs(sampling: Sampling) -> None:
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidArgument(name, f"{count} is not in [0, {MAX_LOGPROBS}]")


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidArgument("stop", f"{len(stops)} strings are more than {MAX_STOPS}")
    if not all(stops):
        raise InvalidArgument("stop", "a stop string must not be empty")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARS:
        raise InvalidArgument("stop", f"a string of {longest} characters is longer than {MAX_STOP_CHARS}")
