"""The bytes of single tokens: put in a row, they are the text, whatever characters the tokens were cut in."""

from __future__ import annotations

import pytest
from tiny_models import VOCAB, make_tiny
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from services.gateway.request import TextPrompt
from services.gateway.text import Tokenizer
from services.gateway.token_bytes import TokenBytes

TEXTS = ("the capital of France — 日本 🎉\n\t x  y", "", "\x00\x7f", "Ġ ▁ <0x0A>")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_vocabulary_gives_the_texts_own_bytes(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(TextPrompt(field="text", text=text))
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


def test_every_byte_has_a_token_and_an_id_without_one_has_no_bytes(byte_level: Tokenizer) -> None:
    single = {own for own in map(byte_level.token_bytes, range(VOCAB)) if len(own) == 1}
    assert len(single) == 256
    assert byte_level.token_bytes(VOCAB) == b""


def test_special_tokens_are_written_as_they_are(byte_level: Tokenizer) -> None:
    (end,) = byte_level.encode(TextPrompt(field="text", text="<|im_end|>"))
    assert byte_level.token_bytes(end) == b"<|im_end|>"


def test_an_added_token_outside_the_alphabet_is_written_as_it_is() -> None:
    own = TokenBytes({"Ġ": 0, "日本": 1}, lambda ids: " " if list(ids) == [0] else "日本")
    assert (own[0], own[1]) == (b" ", "日本".encode())


def test_a_sentencepiece_vocabulary_keeps_leading_spaces_and_single_bytes() -> None:
    vocab = {"<unk>": 0, "▁the": 1, "▁": 2, "<0x0A>": 3, "<0xE6>": 4, "<0x97>": 5, "<0xA5>": 6, "s": 7}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(fast, "", {})
    ids = [1, 7, 2, 4, 5, 6, 3]
    assert tokenizer.decode(ids) == "thes 日\n", "the reference strips the first space"
    assert b"".join(map(tokenizer.token_bytes, ids)) == " thes 日\n".encode()
    assert tokenizer.token_bytes(4) == b"\xe6"
