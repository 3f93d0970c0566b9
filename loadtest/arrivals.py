"""What is sent, and when: an open loop, in which nobody waits for an answer before the next request arrives. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_WORDS = (
    "time river stone letter window garden morning question answer number city winter story machine paper light "
    "music house water friend table summer bridge market teacher island forest engine picture voice"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One request of a plan. `at_s` counts from the start of the run."""

    at_s: float
    prompt: str
    max_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Uniform ranges, both ends included, of what a plan consists of."""

    prompt_words: tuple[int, int] = (8, 96)
    max_tokens: tuple[int, int] = (8, 32)


def poisson(rate: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Arrival times in [0, duration_s) with `rate` arrivals a second on average."""
    if rate <= 0:
        raise ValueError(f"rate must be positive, not {rate}")
    at_s = rng.expovariate(rate)
    while at_s < duration_s:
        yield at_s
        at_s += rng.expovariate(rate)


def plan(rate: float, duration_s: float, seed: int, mix: Mix | None = None) -> tuple[Planned, ...]:
    """A whole run; the same arguments give the same plan."""
    mix = mix or Mix()
    rng = random.Random(seed)
    return tuple(
        Planned(
            at_s=at_s,
            prompt=words(rng.randint(*mix.prompt_words), rng),
            max_tokens=rng.randint(*mix.max_tokens),
            seed=rng.getrandbits(32),
        )
        for at_s in poisson(rate, duration_s, rng)
    )


def words(count: int, rng: random.Random) -> str:
    """So many words; most vocabularies have a token for each."""
    return " ".join(rng.choices(_WORDS.split(), k=count))
