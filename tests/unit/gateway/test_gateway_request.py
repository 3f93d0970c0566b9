"""The one validation of both doors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.errors import DiptychError, InvalidArgument, NotFound
from services.gateway.openai_fields import ChatBody, CompletionBody, parse
from services.gateway.request import (
    ChatPrompt,
    GenerationRequest,
    Message,
    Prompt,
    Sampling,
    Slo,
    TextPrompt,
    TokenPrompt,
    answer_seed,
    check_length,
    check_prompt_logprobs,
    fit,
    validate,
)

TEXT = TextPrompt(field="text", text="hi")
GOOD = GenerationRequest(prompt=TEXT)


def check(request: GenerationRequest) -> None:
    validate(request, model="tiny", vocab=100)


def turns(*roles: str) -> ChatPrompt:
    return ChatPrompt(field="chat", messages=[Message(role=role, content="x") for role in roles])


@pytest.mark.parametrize(
    "request_",
    [
        GOOD,
        replace(GOOD, model="tiny"),
        replace(GOOD, prompt=TokenPrompt(field="t", token_ids=[0, 99])),
        replace(GOOD, prompt=turns("system", "user", "assistant", "user")),
        replace(GOOD, sampling=Sampling(temperature=2.0, top_p=1.0, top_k=0, min_p=0.999, seed=2**64 - 1)),
        replace(GOOD, sampling=Sampling(temperature=0.0, top_p=1e-6, seed=0)),
        replace(GOOD, sampling=Sampling(repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=2.0)),
        replace(GOOD, sampling=Sampling(logit_bias={0: -100.0, 99: 100.0}, logprobs=20, prompt_logprobs=0)),
        replace(GOOD, stop=["x" * 256] * 16),
        replace(GOOD, deadline_s=0.001),
        replace(GOOD, answers=16),
    ],
)
def test_what_is_at_a_limit_is_taken(request_: GenerationRequest) -> None:
    check(request_)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (replace(GOOD, prompt=TextPrompt(field="text", text="")), "text"),
        (replace(GOOD, prompt=TokenPrompt(field="ids", token_ids=[])), "ids"),
        (replace(GOOD, prompt=TokenPrompt(field="ids", token_ids=[1, 100])), "ids"),
        (replace(GOOD, prompt=TokenPrompt(field="ids", token_ids=[-1])), "ids"),
        (replace(GOOD, prompt=turns()), "chat"),
        (replace(GOOD, prompt=turns("user", "robot")), "chat[1].role"),
        (replace(GOOD, sampling=Sampling(temperature=float("nan"))), "temperature"),
        (replace(GOOD, sampling=Sampling(temperature=float("inf"))), "temperature"),
        (replace(GOOD, sampling=Sampling(temperature=-0.1)), "temperature"),
        (replace(GOOD, sampling=Sampling(temperature=2.1)), "temperature"),
        (replace(GOOD, sampling=Sampling(top_p=0.0)), "top_p"),
        (replace(GOOD, sampling=Sampling(top_p=1.1)), "top_p"),
        (replace(GOOD, sampling=Sampling(top_p=float("nan"))), "top_p"),
        (replace(GOOD, sampling=Sampling(top_k=-1)), "top_k"),
        (replace(GOOD, sampling=Sampling(min_p=1.0)), "min_p"),
        (replace(GOOD, sampling=Sampling(min_p=float("nan"))), "min_p"),
        (replace(GOOD, sampling=Sampling(seed=2**64)), "seed"),
        (replace(GOOD, sampling=Sampling(seed=-1)), "seed"),
        (replace(GOOD, sampling=Sampling(repetition_penalty=0.0)), "repetition_penalty"),
        (replace(GOOD, sampling=Sampling(repetition_penalty=float("inf"))), "repetition_penalty"),
        (replace(GOOD, sampling=Sampling(presence_penalty=2.1)), "presence_penalty"),
        (replace(GOOD, sampling=Sampling(presence_penalty=float("nan"))), "presence_penalty"),
        (replace(GOOD, sampling=Sampling(frequency_penalty=-2.1)), "frequency_penalty"),
        (replace(GOOD, sampling=Sampling(logit_bias={100: 1.0})), "logit_bias"),
        (replace(GOOD, sampling=Sampling(logit_bias={-1: 1.0})), "logit_bias"),
        (replace(GOOD, sampling=Sampling(logit_bias={1: 100.1})), "logit_bias"),
        (replace(GOOD, sampling=Sampling(logit_bias={1: float("nan")})), "logit_bias"),
        (replace(GOOD, sampling=Sampling(logit_bias=dict.fromkeys(range(301), 1.0))), "logit_bias"),
        (replace(GOOD, sampling=Sampling(logprobs=21)), "logprobs"),
        (replace(GOOD, sampling=Sampling(logprobs=-1)), "logprobs"),
        (replace(GOOD, sampling=Sampling(prompt_logprobs=21)), "prompt_logprobs"),
        (replace(GOOD, max_tokens=-1), "max_tokens"),
        (replace(GOOD, answers=0), "answers"),
        (replace(GOOD, answers=17), "answers"),
        (replace(GOOD, stop=["a", ""]), "stop"),
        (replace(GOOD, stop=["a"] * 17), "stop"),
        (replace(GOOD, stop=["x" * 257]), "stop"),
        (replace(GOOD, deadline_s=0.0), "deadline"),
        (replace(GOOD, deadline_s=-1.0), "deadline"),
        (replace(GOOD, slo=Slo(time_per_token_s=0.0)), "slo.time_per_token"),
        (replace(GOOD, tenant="x" * 257), "tenant"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_by_name(request_: GenerationRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check(request_)
    assert raised.value.field == field and str(raised.value).startswith(f"{field}: ")


def test_the_first_answer_draws_with_the_requests_seed_and_each_other_with_one_of_its_own() -> None:
    """The seeds are a promise in gateway.proto: a client can ask for one of the answers alone."""
    seeds = (0, 1, 2, 2**64 - 1)
    assert [answer_seed(seed, 0) for seed in seeds] == list(seeds)
    assert answer_seed(7, 3) == 7 + 3 * 0x9E3779B97F4A7C15 - 2**64
    every = [answer_seed(seed, index) for seed in range(100) for index in range(16)]
    assert len(set(every)) == len(every) and all(0 <= seed < 2**64 for seed in every)


@pytest.mark.parametrize(("n", "answers"), [("null", 1), ("1", 1), ("16", 16)])
def test_n_is_the_number_of_answers(n: str, answers: int) -> None:
    body = parse(CompletionBody, f'{{"model": "m", "prompt": "x", "n": {n}}}'.encode())
    assert body.to_request().answers == answers


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound, match="'gpt-x'"):
        check(replace(GOOD, model="gpt-x"))


@pytest.mark.parametrize(("prompt", "asked", "given"), [(1, 9, 9), (1, 0, 9), (9, 1, 1), (9, 0, 1), (5, 5, 5)])
def test_what_fits_the_context_is_given(prompt: int, asked: int, given: int) -> None:
    assert fit(TEXT, prompt, asked, context_tokens=10) == given


@pytest.mark.parametrize(
    ("prompt", "asked", "field", "said"),
    [
        (0, 1, "text", "at least one token"),
        (10, 0, "text", "10 tokens leave no room for an answer in the context of 10 tokens"),
        (11, 1, "text", "11 tokens leave no room"),
        (5, 6, "max_tokens", r"prompt \(5 tokens\) \+ max_tokens \(6\) = 11 is over the context of 10 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers_and_the_limit(
    prompt: int, asked: int, field: str, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said) as raised:
        fit(TEXT, prompt, asked, context_tokens=10)
    assert raised.value.field == field


def test_prompt_logprobs_that_fit_no_message_are_refused() -> None:
    check_prompt_logprobs(GOOD, 10**9, max_bytes=100)
    asked = replace(GOOD, sampling=Sampling(prompt_logprobs=2))
    check_prompt_logprobs(asked, 10, max_bytes=300)
    for request, field in ((asked, "prompt_logprobs"), (replace(asked, echo="before"), "logprobs")):
        with pytest.raises(InvalidArgument, match="2 for 11 tokens are up to 330 bytes, more than 300") as raised:
            check_prompt_logprobs(request, 11, max_bytes=300)
        assert raised.value.field == field


def test_an_openai_chat_becomes_a_request() -> None:
    raw = b"""{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 7,
        "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": -1, "stop": "x", "user": "me", "n": 1,
        "logprobs": false, "tools": [], "stream": true, "stream_options": {"include_usage": true}}"""
    body = parse(ChatBody, raw)
    assert body.wants_usage and body.stream
    assert body.to_request() == GenerationRequest(
        prompt=ChatPrompt(field="messages", messages=[Message(role="user", content="hi")]),
        model="tiny",
        sampling=Sampling(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, seed=2**64 - 1),
        max_tokens=7,
        stop=("x",),
    )


@pytest.mark.parametrize(
    ("body", "expected"), [('{"model":"m","prompt":"x"}', 16), ('{"model":"m","prompt":"x","max_tokens":3}', 3)]
)
def test_completions_are_sixteen_tokens_unless_told(body: str, expected: int) -> None:
    request = parse(CompletionBody, body.encode()).to_request()
    assert request.max_tokens == expected and request.sampling.temperature == 1.0


def test_a_chat_may_fill_the_context_unless_told() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}'
    request = parse(ChatBody, body).to_request()
    assert request.max_tokens == 0
    assert request.prompt == ChatPrompt(field="messages", messages=[Message(role="user", content="x")])


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ('"n": 0', "n"),
        ('"n": 17', "n"),
        ('"best_of": 2', "best_of"),
        ('"n": 2, "best_of": 2', "best_of"),
        ('"n": true', "n"),
        ('"logprobs": true', "logprobs"),
        ('"top_logprobs": 1', "top_logprobs"),
        ('"prompt_logprobs": 1', "prompt_logprobs"),
        ('"echo": 1', "echo"),
        ('"echo": true, "max_tokens": -1', "max_tokens"),
        ('"echo": false, "max_tokens": 0', "max_tokens"),
        ('"logit_bias": {"one": 2}', "logit_bias"),
        ('"logit_bias": {"-1": 2}', "logit_bias"),
        ('"logit_bias": {"99999999999": 2}', "logit_bias"),
        ('"logit_bias": {"1": "x"}', "logit_bias"),
        ('"logit_bias": [1]', "logit_bias"),
        ('"frequency_penalty": "x"', "frequency_penalty"),
        ('"temperature": "hot"', "temperature"),
        ('"temperature": true', "temperature"),
        ('"max_tokens": 0', "max_tokens"),
        ('"stream": 1', "stream"),
        ('"stream_options": {"include_usage": true}', "stream_options"),
        ('"stream_options": {"other": 1}, "stream": true', "stream_options.other"),
        ('"stop": [1]', "stop"),
        ('"what": null', "what"),
    ],
)
def test_openai_fields_are_refused_by_name(more: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse(CompletionBody, f'{{"model": "m", "prompt": "x", {more}}}'.encode()).to_request()
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("more", "echo", "max_tokens", "prompt_logprobs"),
    [
        ('"echo": true', "before", 16, None),
        ('"echo": true, "max_tokens": 3, "logprobs": 2', "before", 3, 2),
        ('"echo": true, "max_tokens": 0, "logprobs": 0', "instead", 1, 0),
        ('"echo": false, "logprobs": 2', "no", 16, None),
        ('"echo": null, "max_tokens": 1', "no", 1, None),
    ],
)
def test_an_echo_asks_for_the_logprobs_of_the_prompt_too(
    more: str, echo: str, max_tokens: int, prompt_logprobs: int | None
) -> None:
    request = parse(CompletionBody, f'{{"model": "m", "prompt": "x", {more}}}'.encode()).to_request()
    assert (request.echo, request.max_tokens, request.sampling.prompt_logprobs) == (echo, max_tokens, prompt_logprobs)


@pytest.mark.parametrize(("echo", "served"), [("null", True), ("false", True), ("true", False)])
def test_a_chat_is_not_echoed(echo: str, served: bool) -> None:
    raw = f'{{"model": "m", "messages": [], "echo": {echo}}}'.encode()
    if served:
        assert parse(ChatBody, raw).to_request().echo == "no"
        return
    with pytest.raises(InvalidArgument) as raised:
        parse(ChatBody, raw)
    assert raised.value.field == "echo"


def test_penalties_bias_and_logprobs_become_the_sampling() -> None:
    more = """"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.25, "logit_bias": {"7": -100}"""
    expected = Sampling(
        temperature=1.0,
        presence_penalty=1.0,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={7: -100.0},
        logprobs=3,
    )
    text = parse(CompletionBody, f'{{"model": "m", "prompt": "x", "logprobs": 3, {more}}}'.encode())
    assert text.to_request().sampling == expected
    chat = f'{{"model": "m", "messages": [], "logprobs": true, "top_logprobs": 3, {more}}}'
    assert parse(ChatBody, chat.encode()).to_request().sampling == expected


@pytest.mark.parametrize(
    ("more", "logprobs"),
    [
        ('"logprobs": true', 0),
        ('"logprobs": true, "top_logprobs": 20', 20),
        ('"logprobs": false, "top_logprobs": 0', None),
        ('"logprobs": null', None),
    ],
)
def test_a_chats_logprobs_are_two_fields(more: str, logprobs: int | None) -> None:
    body = parse(ChatBody, f'{{"model": "m", "messages": [], {more}}}'.encode())
    assert body.to_request().sampling.logprobs == logprobs


@pytest.mark.parametrize("more", ['"top_logprobs": 2', '"logprobs": true, "top_logprobs": 21'])
def test_alternatives_without_logprobs_or_too_many_are_refused(more: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse(ChatBody, f'{{"model": "m", "messages": [], {more}}}'.encode()).to_request()
    assert raised.value.field == "top_logprobs"


def test_contradicting_limits_are_refused() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":1,"max_completion_tokens":2}'
    with pytest.raises(InvalidArgument, match="contradicts"):
        parse(ChatBody, body).to_request()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ('"x"', TextPrompt(field="prompt", text="x")),
        ('["x"]', TextPrompt(field="prompt", text="x")),
        ("[1, 2]", TokenPrompt(field="prompt", token_ids=[1, 2])),
        ("[[1, 2]]", TokenPrompt(field="prompt", token_ids=[1, 2])),
    ],
)
def test_a_prompt_is_text_or_ids(prompt: str, expected: Prompt) -> None:
    assert parse(CompletionBody, f'{{"model":"m","prompt":{prompt}}}'.encode()).to_request().prompt == expected


@pytest.mark.parametrize("prompt", ['""', '[""]', "[]", "[[]]", '["a","b"]', "[1,true]", "[1.5]", "{}", "null", "3"])
def test_a_prompt_that_is_neither_is_refused(prompt: str) -> None:
    with pytest.raises(DiptychError) as raised:
        check(replace(parse(CompletionBody, f'{{"model":"m","prompt":{prompt}}}'.encode()).to_request(), model=""))
    assert isinstance(raised.value, InvalidArgument) and raised.value.field == "prompt"


@pytest.mark.parametrize("longest_token", [1, 13])
def test_a_text_that_no_tokens_could_make_fit_is_refused_before_it_is_tokenized(longest_token: int) -> None:
    def of(length: int) -> tuple[Prompt, ...]:
        half = Message(role="user", content="x" * (length // 2))
        rest = Message(role="user", content="x" * (length - length // 2))
        return TextPrompt(field="text", text="x" * length), ChatPrompt(field="text", messages=[half, rest])

    limit = 100 * longest_token
    for prompt in (*of(limit), TokenPrompt(field="t", token_ids=range(limit + 1))):
        check_length(prompt, longest_token=longest_token, context_tokens=100)
    for prompt in of(limit + 1):
        with pytest.raises(InvalidArgument, match=f"text: {limit + 1} characters cannot fit .* 100 tokens"):
            check_length(prompt, longest_token=longest_token, context_tokens=100)
