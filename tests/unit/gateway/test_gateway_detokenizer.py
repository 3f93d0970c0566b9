"""The detokenizer with real tokenizers: byte-level BPE, and byte fallback as sentencepiece models have it. Case G7."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.gateway.detokenizer import Detokenizer

LINES = ["the capital of France is Paris", "the words of a small tokenizer", "naïve café"]
HARD = "Ünïcödé 日本語の文章 👩‍👩‍👧‍👦 émoji 🎉🎉 العربية и \u200d конец\n\ttab  two  spaces "


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4} | {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])


def decoding(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], at_once: int = 1) -> list[str]:
    detokenizer = Detokenizer(decoding(tokenizer))
    parts = [detokenizer.push(ids[at : at + at_once]) for at in range(0, len(ids), at_once)]
    return [*parts, detokenizer.flush()]


@BOTH
@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 1000])
def test_the_joined_stream_is_the_text(tokenizer: Tokenizer, at_once: int) -> None:
    ids = tokenizer.encode(HARD).ids
    parts = pieces(tokenizer, ids, at_once)
    assert "".join(parts) == tokenizer.decode(ids)
    assert not any("�" in part for part in parts)


@BOTH
def test_characters_come_as_soon_as_they_are_complete(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日本").ids
    parts = pieces(tokenizer, ids)
    assert [part for part in parts if part.strip()] == ["日", "本"]
    assert parts[-2].endswith("本"), "the last token completes the last character"


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=120), at_once=st.integers(1, 5))
def test_any_tokens_at_all_stream_to_what_they_decode_to(ids: list[int], at_once: int) -> None:
    assert "".join(pieces(BYTE_LEVEL, ids, at_once)) == decoding(BYTE_LEVEL)(ids)


def test_an_unfinished_character_at_the_end_comes_with_the_flush() -> None:
    ids = BYTE_LEVEL.encode("a日").ids[:-1]
    parts = pieces(BYTE_LEVEL, ids)
    assert parts[0] == "a" and set(parts[1:-1]) == {""}
    assert "".join(parts) == decoding(BYTE_LEVEL)(ids) == "a�"


def test_special_tokens_are_not_shown() -> None:
    end = BYTE_LEVEL.token_to_id("<|end|>")
    ids = [end, *BYTE_LEVEL.encode("the words").ids, end]
    assert "".join(pieces(BYTE_LEVEL, ids)) == "the words"


def test_the_first_words_space_survives_special_tokens_before_it() -> None:
    ids = BYTE_FALLBACK.encode("a a a").ids
    assert "".join(pieces(BYTE_FALLBACK, [0, *ids])) == decoding(BYTE_FALLBACK)([0, *ids])


def test_a_long_run_of_broken_characters_is_decoded_in_short_windows() -> None:
    """Decoding everything again for each token is quadratic: the gateway would stand still for a model gone mad."""
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decoding(BYTE_LEVEL)(ids)

    lead = BYTE_LEVEL.encode("日").ids[0]
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push([lead]) for _ in range(1000)) + detokenizer.flush()
    assert text == "�" * 1000
    assert longest < 100


def test_no_tokens_are_no_text() -> None:
    detokenizer = Detokenizer(decoding(BYTE_LEVEL))
    assert detokenizer.push([]) == "" and detokenizer.flush() == ""
