"""The bytes of single tokens, read from the vocabulary.

Decoding a token alone would lose them: half a character becomes a replacement character, a leading space is stripped.
Which writing a vocabulary uses is found out by decoding two tokens whose meaning is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Bytes by token id, for byte-level vocabularies and those of SentencePiece (▁ for a space, <0x0A> for a byte)."""

    def __init__(self, vocab: Mapping[str, int], decode: Callable[[Sequence[int]], str]) -> None:
        self._names = {token_id: name for name, token_id in vocab.items()}
        space = vocab.get("Ġ")
        newline = vocab.get("<0x0A>")
        self._alphabet = _alphabet() if space is not None and decode([space]) == " " else None
        self._fallback = newline is not None and decode([newline]) == "\n"

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; none for an id without a token."""
        name = self._names.get(token_id, "")
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[character] for character in name)
            except KeyError:  # an added token is written as it is
                return name.encode()
        if self._fallback and (match := _FALLBACK.fullmatch(name)):
            return bytes.fromhex(match[1])
        return name.replace("▁", " ").encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte: itself where it is printable, else the next free one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
