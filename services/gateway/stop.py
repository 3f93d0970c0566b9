"""Stop strings, matched on text, however the text was cut into pieces.

The text ends at the leftmost place where any stop string stands in it. Text that may still turn out to belong to a stop
string is held back; what was handed out is never taken back, and what was held back is handed out once or never.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is found. Without stop strings it holds nothing back."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Takes the next piece; returns what may be shown. Once `matched`, nothing is taken any more."""
        if self.matched:
            return ""
        text = self._held + text
        match = self._find(text)
        open_at = self._open_prefix(text)
        if match is not None and match <= open_at:
            return self._end_at(text, match)
        self._held = text[open_at:]
        return text[:open_at]

    def flush(self) -> str:
        """No more text comes: returns what was held back, as far as it may be shown."""
        if self.matched:
            return ""
        text, match = self._held, self._find(self._held)
        if match is not None:
            return self._end_at(text, match)
        self._held = ""
        return text

    def _end_at(self, text: str, match: int) -> str:
        self.matched, self._held = True, ""
        return text[:match]

    def _find(self, text: str) -> int | None:
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _open_prefix(self, text: str) -> int:
        """Where the leftmost unfinished stop string begins; the text's length where there is none."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[at:]
            if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                return at
        return len(text)
