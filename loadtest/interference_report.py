"""What `loadtest interference` saw, summed up: gaps between tokens with and without long prompts. Pure but for the
table's types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.table import Table

from loadtest.report import Quantiles, quantiles

BAR_MS: Final = 42.0
BAR_RATIO: Final = 1.5
"""What a loaded p99 gap is to stay within: so many milliseconds, and so many times the quiet median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request. Times are seconds from the run's begin; `arrivals_s`: when each message with text came."""

    long: bool
    sent_s: float
    arrivals_s: tuple[float, ...]
    tokens: int

    @property
    def first_token_s(self) -> float:
        """Time to the first text."""
        return self.arrivals_s[0] - self.sent_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Time between two tokens, and when the second came."""

    at_s: float
    gap_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """A run against one server: quiet until `loaded_s`, then with long prompts until `end_s`."""

    name: str
    loaded_s: float
    end_s: float
    answers: tuple[Answer, ...]

    def gaps(self, *, loaded: bool) -> list[Gap]:
        """Of the short answers, those within one of the two parts."""
        begin_s, end_s = (self.loaded_s, self.end_s) if loaded else (0.0, self.loaded_s)
        every = (gap for answer in self.answers if not answer.long for gap in gaps(answer))
        return [gap for gap in every if gap.at_s - gap.gap_s >= begin_s and gap.at_s <= end_s]

    def first_tokens_s(self, *, long: bool) -> list[float]:
        """Of all requests of a kind that were sent while long prompts came."""
        return [a.first_token_s for a in self.answers if a.long == long and self.loaded_s <= a.sent_s < self.end_s]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One server's row. `loaded_p99_over_quiet_p50` is what the bar is about."""

    name: str
    quiet: Quantiles
    loaded: Quantiles
    loaded_p99_over_quiet_p50: float | None
    short_first_token: Quantiles
    long_first_token: Quantiles
    short_answers: int
    long_answers: int
    tokens_per_s: float

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)

    @property
    def holds(self) -> bool:
        """Whether loaded p99 is within the bar."""
        p99_s, ratio = self.loaded.p99_s, self.loaded_p99_over_quiet_p50
        return p99_s is not None and ratio is not None and p99_s * 1e3 <= BAR_MS and ratio <= BAR_RATIO


def gaps(answer: Answer) -> Iterator[Gap]:
    """The gaps of one answer, one for each message after the first.

    Servers do not say how many tokens a message carries; each is taken to carry its share of the answer's, so a server
    that sends several at once is not blamed for long gaps, nor praised for few.
    """
    share = answer.tokens / len(answer.arrivals_s)
    for before_s, at_s in zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False):
        yield Gap(at_s=at_s, gap_s=(at_s - before_s) / share)


def summarize(observed: Observed) -> Summary:
    """Sums a run up."""
    quiet, loaded = (quantiles([gap.gap_s for gap in observed.gaps(loaded=part)]) for part in (False, True))
    ratio = loaded.p99_s / quiet.p50_s if loaded.p99_s is not None and quiet.p50_s else None
    within = [a for a in observed.answers if observed.loaded_s <= a.sent_s]
    short = sum(not a.long for a in within)
    wall_s = observed.end_s - observed.loaded_s
    return Summary(
        name=observed.name,
        quiet=quiet,
        loaded=loaded,
        loaded_p99_over_quiet_p50=ratio,
        short_first_token=quantiles(observed.first_tokens_s(long=False)),
        long_first_token=quantiles(observed.first_tokens_s(long=True)),
        short_answers=short,
        long_answers=len(within) - short,
        tokens_per_s=len(observed.gaps(loaded=True)) / wall_s if wall_s > 0 else 0.0,
    )


def table(summaries: Sequence[Summary]) -> Table:
    """For people, in milliseconds."""
    made = Table(title="Gaps between tokens of short answers while long prompts arrive", title_justify="left")
    made.add_column("server")
    names = ("quiet p50", "p99", "loaded p50", "p90", "p99", "max", "p99 ÷ quiet p50", "bar")
    for name in (*names, "short first token p50", "p99", "long first token p50", "p99", "tokens/s"):
        made.add_column(name, justify="right")
    for row in summaries:
        ratio = row.loaded_p99_over_quiet_p50
        made.add_row(
            row.name,
            *_ms(row.quiet.p50_s, row.quiet.p99_s),
            *_ms(row.loaded.p50_s, row.loaded.p90_s, row.loaded.p99_s, row.loaded.max_s),
            "–" if ratio is None else f"{ratio:.2f}",
            "held" if row.holds else "not held",
            *_ms(row.short_first_token.p50_s, row.short_first_token.p99_s),
            *_ms(row.long_first_token.p50_s, row.long_first_token.p99_s),
            f"{row.tokens_per_s:.0f}",
        )
    return made


def _ms(*values_s: float | None) -> list[str]:
    return ["–" if value_s is None else f"{value_s * 1e3:,.1f}" for value_s in values_s]
