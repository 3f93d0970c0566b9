"""Tokens to text, as they come: text is handed out when its characters are complete.

A token may be a part of a character. Decoding it alone gives a replacement character, so text is decoded from a window
of the last tokens, and replacement characters at its end are held back until more tokens have come. For byte-level
tokenizers the pieces joined equal the decoding of all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "�"
_WINDOW_TOKENS = 64


class Detokenizer:
    """The text of one answer. `decode` must be the tokenizer's own, special tokens left out."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens that the next text depends on
        self._old = 0  # tokens of the window whose text was shown already: context for the others
        self._shown = 0  # characters of the window's text that were handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that they complete."""
        if not token_ids:
            return ""
        self._window += token_ids
        text = self._decode(self._window)
        # All of them: where bytes are decoded a run at a time, one unfinished character breaks its finished neighbours.
        complete = len(text.rstrip(_REPLACEMENT))
        piece = text[self._shown : complete]
        self._shown = max(self._shown, complete)
        if complete == len(text):
            self._slide()
        elif len(self._window) > _WINDOW_TOKENS:
            piece += self._split(text)
        return piece

    def flush(self) -> str:
        """No more tokens come: returns the rest, incomplete characters as replacement characters."""
        piece = self._decode(self._window)[self._shown :]
        self._shown += len(piece)
        return piece

    def _slide(self) -> None:
        """Everything was shown: only the newest tokens stay, as context."""
        kept = self._window[self._old :]
        shown = len(self._decode(kept))
        if shown:  # nothing but special tokens is no context
            self._window, self._old, self._shown = kept, len(kept), shown

    def _split(self, text: str) -> str:
        """Keeps the window short through a long run of broken characters, where a cut provably changes nothing."""
        for cut in range(len(self._window) - 8, len(self._window) - 4):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if head + tail == text:
                piece = head[self._shown :]
                self._window, self._old = self._window[cut:], 0
                self._shown = max(0, self._shown - len(head))
                return piece
        return ""
