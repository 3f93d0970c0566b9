"""What a faulty transport does wrong, as data and as the text in which people write it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_BYTES: Final = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "kiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES_PER_S: Final = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_COUNT: Final = {"": 1.0}

_UNITS: Final = {
    "rate": _BYTES_PER_S,
    "delay": _SECONDS,
    "reorder": _SECONDS,
    "cut-after": _BYTES,
    "cut-in": _BYTES,
    "drop-ack": _COUNT,
    "seed": _COUNT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes wrong with what one side says. Nothing by default.

    `bytes_per_s`: rate of the link that all its connections share; 0: as fast as it is. `delay_s`: how much later every
    message arrives. `reorder_s`: and how much later still at most, by chance, so that messages overtake one another.
    `cut_after_bytes`: the first connection that has carried so many bytes of KV breaks there. `cut_in_bytes`: a
    connection breaks so many bytes into the first message of KV that is longer. Each of the two happens once; None:
    never. Messages of probes, which workers exchange when they meet, count for neither.
    `dropped_acknowledgements`: so many of the first acknowledgements are lost. The same `seed` makes the same choices.
    """

    bytes_per_s: float = 0.0
    delay_s: float = 0.0
    reorder_s: float = 0.0
    cut_after_bytes: int | None = None
    cut_in_bytes: int | None = None
    dropped_acknowledgements: int = 0
    seed: int = 0


def parse_fault(text: str) -> Fault:
    """Reads, for example, "rate=1Gbit,delay=5ms,reorder=2ms,cut-after=3MB,cut-in=1MB,drop-ack=1,seed=7".

    "" is no fault. ValueError names the part that is wrong, and what may stand there.
    """
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in _UNITS:
            raise ValueError(f"{part!r} is none of {', '.join(f'{each}=' for each in _UNITS)}")
        if name in values:
            raise ValueError(f"{name}= is there twice")
        values[name] = _quantity(name, value)
    if values.get("rate") == 0:
        raise ValueError("rate= must be more than 0")
    cut_after, cut_in = values.get("cut-after"), values.get("cut-in")
    return Fault(
        bytes_per_s=values.get("rate", 0.0),
        delay_s=values.get("delay", 0.0),
        reorder_s=values.get("reorder", 0.0),
        cut_after_bytes=None if cut_after is None else int(cut_after),
        cut_in_bytes=None if cut_in is None else int(cut_in),
        dropped_acknowledgements=int(values.get("drop-ack", 0)),
        seed=int(values.get("seed", 0)),
    )


def _quantity(name: str, text: str) -> float:
    units = _UNITS[name]
    digits = text.rstrip("".join({letter for unit in units for letter in unit}))
    unit = text[len(digits) :]
    whole = units is _COUNT
    number = digits.replace(".", "", 0 if whole else 1)
    if unit not in units or not (number.isascii() and number.isdigit()):
        what = "a whole number" if whole else f"a number and one of {', '.join(units)}"
        raise ValueError(f"{name}={text!r} is not {what}")
    return float(digits) * units[unit]
