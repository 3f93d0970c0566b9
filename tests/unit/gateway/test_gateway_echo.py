"""The echoed prompt: its text, where its tokens stand in it, and what of the first piece follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import make_tiny
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from services.engine.sampling_spec import TokenLogprobs
from services.errors import DiptychError
from services.gateway.answer import LoggedToken, Piece
from services.gateway.echo import Echo, tokenize
from services.gateway.request import ChatPrompt, GenerationRequest, Message, Prompt, Sampling, TextPrompt, TokenPrompt
from services.gateway.text import Tokenizer

TEXTS = ["x", "the capital of France — 日本 🎉\n\t x  y", " the<|im_end|>é", "\x00 \x7f"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama"))


def asked(prompt: Prompt, *, logprobs: int | None = 0, **fields: object) -> GenerationRequest:
    return replace(GenerationRequest(prompt=prompt, sampling=Sampling(logprobs=logprobs), echo="before"), **fields)


def text_prompt(text: str) -> TextPrompt:
    return TextPrompt(field="prompt", text=text)


def echo_of(tokenizer: Tokenizer, request: GenerationRequest) -> Echo:
    token_ids, echo = tokenize(tokenizer, request)
    assert echo is not None and list(echo.token_ids) == token_ids == tokenizer.encode(request.prompt)
    return echo


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_echoed_as_it_is_and_its_tokens_stand_where_their_bytes_do(byte_level: Tokenizer, text: str) -> None:
    echo = echo_of(byte_level, asked(text_prompt(text)))
    assert echo.text == text
    raw = [byte_level.token_bytes(token_id) for token_id in echo.token_ids]
    complete = [b"".join(raw[:i]).decode(errors="ignore") for i in range(len(raw))]
    assert echo.text_offsets == [len(before) for before in complete]


@pytest.mark.parametrize("text", TEXTS[:2])
def test_token_ids_are_echoed_as_the_text_they_mean(byte_level: Tokenizer, text: str) -> None:
    by_text = echo_of(byte_level, asked(text_prompt(text)))
    ids = TokenPrompt(field="prompt", token_ids=by_text.token_ids)
    assert echo_of(byte_level, asked(ids)) == by_text


def test_special_tokens_among_token_ids_have_no_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(text_prompt("a<|im_end|>b"))
    echo = echo_of(byte_level, asked(TokenPrompt(field="prompt", token_ids=ids)))
    assert (echo.text, echo.text_offsets) == ("ab", [0, 1, 1])


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_space_belongs_to_its_token_wherever_a_tokenizer_says_the_word_is(trim_offsets: bool) -> None:
    """And a token that the tokenizer adds stands before the text, not in it."""
    fast = FastTokenizer(models.BPE(vocab={"<s>": 0, "a": 1, "Ġ": 2, "Ġa": 3}, merges=[("Ġ", "a")]))
    fast.add_special_tokens(["<s>"])
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim_offsets), begin])
    echo = echo_of(Tokenizer(fast, "", {}), asked(text_prompt("a a a")))
    assert (echo.text, list(echo.token_ids), echo.text_offsets) == ("a a a", [0, 1, 3, 3], [0, 0, 1, 3])


def test_without_an_echo_there_is_none(byte_level: Tokenizer) -> None:
    chat = ChatPrompt(field="messages", messages=[Message(role="user", content="x")])
    for prompt in (text_prompt("x"), chat):
        assert tokenize(byte_level, asked(prompt, echo="no")) == (byte_level.encode(prompt), None)


PROMPT = Echo(text="ab", token_ids=[1, 2], text_offsets=[0, 1], alone=False)
SECOND = TokenLogprobs(-2.0, (7,), (-0.5,))
OWN = TokenLogprobs(-3.0)
SHOWN = LoggedToken(token_id=3, logprobs=OWN, text_offset=2)
FIRST = Piece(text="c", token_ids=[3], reason="stop", logprobs=[OWN], shown=[SHOWN], prompt_logprobs=[SECOND])
LED = (
    LoggedToken(token_id=1, logprobs=None, text_offset=0),
    LoggedToken(token_id=2, logprobs=SECOND, text_offset=1),
)


def test_the_prompt_goes_before_the_first_piece_and_nothing_foretells_its_first_token() -> None:
    assert PROMPT.lead(FIRST) == replace(FIRST, text="abc", shown=(*LED, SHOWN))


def test_without_logprobs_the_prompt_is_text_alone() -> None:
    bare = Piece(text="c", token_ids=[3])
    assert replace(PROMPT, text_offsets=None).lead(bare) == replace(bare, text="abc", shown=())


def test_a_prompt_alone_is_followed_by_nothing_and_ends_for_its_length() -> None:
    expected = Piece(text="ab", token_ids=(), reason="length", shown=LED, prompt_logprobs=[SECOND])
    assert replace(PROMPT, alone=True).lead(FIRST) == expected


@pytest.mark.parametrize("found", [[], [SECOND, SECOND]])
def test_a_first_piece_that_does_not_tell_of_every_token_is_an_error(found: list[TokenLogprobs]) -> None:
    with pytest.raises(DiptychError, match=f"2 prompt tokens came with {len(found)}"):
        PROMPT.lead(replace(FIRST, prompt_logprobs=found))
