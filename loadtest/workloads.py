"""Lengths and arrivals of simulated traffic. Pure: the same seed gives the same requests, whatever serves them.

What is fitted to what: the means of ShareGPT-like and Alpaca-like lengths are those that vLLM's paper gives for the two
data sets (Kwon et al., SOSP 2023, figure 11: 161 in and 338 out, 19 in and 58 out); their spread is ours, lognormal
with σ = 1, cut off where prompt and answer exceed OPT's 2,048 tokens. Arrivals are gamma with the variation cv of gaps
(shape 1 ÷ cv², scale cv² ÷ rate); 1 is Poisson. Traces keep their order, lengths and gaps; only their clock is scaled.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.simulation.machine import Request

Lengths = tuple[int, int]
"""Tokens of prompt and answer."""
MOST_TOKENS: Final = 2048
HALF_LONG: Final = "half-long"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Traffic. `trace` (arrival in s, lengths) replaces `lengths` and `cv`; `flood`: see `flooded`."""

    name: str
    lengths: Callable[[random.Random], Lengths] | None = None
    cv: float = 1.0
    trace: tuple[tuple[float, Lengths], ...] = ()
    flood: bool = False

    def requests(self, rate: float, count: int, seed: int) -> list[Request]:
        """So many of them, at `rate` a second on average. ValueError for a rate that is not positive."""
        if rate <= 0:
            raise ValueError(f"rate: {rate} is not positive")
        rng = random.Random(f"{self.name} {seed}")
        if self.trace:
            return _replayed(self.trace, rate, count, rng)
        if self.flood:
            return flooded(rate, count, rng)
        assert self.lengths is not None, "a workload has lengths or a trace"
        now_s, made = 0.0, []
        for index in range(count):
            now_s += rng.gammavariate(1 / self.cv**2, self.cv**2 / rate)
            made.append(_request(index, now_s, self.lengths(rng)))
        return made


def skewed(rng: random.Random) -> Lengths:
    """Four of five are short, one of twelve is long: variation of the answers 2.7."""
    return rng.choices(((64, 8), (256, 64), (1024, 700)), (80, 12, 8))[0]


def half_long(rng: random.Random) -> Lengths:
    """Skewed answers; every second prompt is long, whatever its answer is."""
    return (rng.choice((64, 1536)), skewed(rng)[1] // 2 + 1)


def lognormal(sigma: float, mean: float, rng: random.Random) -> int:
    """At least 1."""
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def spread(sigma: float) -> Callable[[random.Random], Lengths]:
    """Answers of 200 tokens on average after prompts of 256."""
    return lambda rng: (256, min(MOST_TOKENS - 256, lognormal(sigma, 200, rng)))


def fitted(prompt_mean: float, output_mean: float) -> Callable[[random.Random], Lengths]:
    """Lognormal with σ = 1, drawn again while they exceed MOST_TOKENS."""

    def drawn(rng: random.Random) -> Lengths:
        while True:
            lengths = lognormal(1.0, prompt_mean, rng), lognormal(1.0, output_mean, rng)
            if sum(lengths) <= MOST_TOKENS:
                return lengths

    return drawn


def flooded(rate: float, count: int, rng: random.Random) -> list[Request]:
    """A light tenant at a quarter of the rate and, through the middle third of its time, another at twice the rate.

    Both send short chats. `count` is the light tenant's requests; its own are the same with and without the flood.
    """
    light, now_s = [], 0.0
    for index in range(count):
        now_s += rng.expovariate(rate / 4)
        light.append(_request(index, now_s, chat(rng), tenant="light", priority=1))
    flood: list[Request] = []
    at_s = now_s / 3
    while at_s < now_s * 2 / 3:
        at_s += rng.expovariate(rate * 2)
        flood.append(_request(count + len(flood), at_s, chat(rng), tenant="flood"))
    return sorted([*light, *flood], key=lambda request: request.arrival_s)


def chat(rng: random.Random) -> Lengths:
    """Short questions and answers."""
    return lognormal(0.5, 100, rng), min(400, lognormal(0.8, 60, rng))


def synthetic() -> tuple[Workload, ...]:
    """All that need no file."""
    return (
        Workload(name="skewed", lengths=skewed),
        Workload(name=HALF_LONG, lengths=half_long),
        *(Workload(name=f"lognormal-{sigma}", lengths=spread(sigma)) for sigma in (0.5, 1.0, 1.5)),
        Workload(name="sharegpt-like", lengths=fitted(161, 338)),
        Workload(name="alpaca-like", lengths=fitted(19.3, 58.5)),
        Workload(name="gamma-1", lengths=spread(0.8), cv=1.0),
        Workload(name="gamma-4", lengths=spread(0.8), cv=4.0),
        Workload(name="flood", flood=True, lengths=chat),
    )


def traced(folder: Path) -> tuple[Workload, ...]:
    """The Azure LLM inference traces of 2023 in a folder, as far as they are there. ValueError: a file is no trace."""
    found = []
    for name in ("conv", "code"):
        path = folder / f"azure_2023_{name}.csv"
        if path.exists():
            found.append(Workload(name=f"azure-{name}", trace=_read(path)))
    return tuple(found)


def _read(path: Path) -> tuple[tuple[float, Lengths], ...]:
    with path.open(newline="") as file:
        try:
            return tuple(
                (float(row["arrival_s"]), (int(row["prompt_tokens"]), max(1, int(row["output_tokens"]))))
                for row in csv.DictReader(file)
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: {error} (arrival_s, prompt_tokens and output_tokens are needed)") from None


def _replayed(trace: Sequence[tuple[float, Lengths]], rate: float, count: int, rng: random.Random) -> list[Request]:
    """A stretch of the trace from a random place on, its clock scaled to the rate."""
    count = min(count, len(trace))
    first = rng.randrange(len(trace) - count + 1)
    part = trace[first : first + count]
    begin_s = part[0][0]
    scale = (count - 1) / rate / max(part[-1][0] - begin_s, 1e-9)
    return [_request(index, (at_s - begin_s) * scale, lengths) for index, (at_s, lengths) in enumerate(part)]


def _request(index: int, at_s: float, lengths: Lengths, *, tenant: str = "", priority: int = 0) -> Request:
    prompt, output = lengths
    return Request(
        key=str(index),
        arrival_s=at_s,
        prompt_tokens=prompt,
        output_tokens=output,
        tenant=tenant,
        priority=priority,
    )
