"""What feedback queues would gain over first come, first served, predicted from service times that were seen.

What is compared is the mean delay: completion − service time x. Real traffic lies between two kinds, and so does the
prediction, their weighted geometric mean. A burst weighs more: of a thousand times the few longest decide what is
predicted for steady traffic, and it varies by a tenth.

steady    one at a time, at random. Both are M/G/1 queues at one load ρ:

    first come, first served    λ·E[x²] ÷ (2·(1 − ρ))                                          Pollaczek–Khinchine
    feedback queues             (Wᵢ + x) ÷ (1 − ρᵢ₋₁) − x,  Wᵢ = λ·E[min(x, aᵢ)²] ÷ (2·(1 − ρᵢ)),  ρᵢ = λ·E[min(x, aᵢ)]

          for x that ends in level i, aᵢ being what a request may use down to level i (Kleinrock, Queueing Systems II,
          section 4.7: multilevel processor sharing with first come, first served in each level).

burst     many at once, and nobody after them: one of n waits for n·E[x] ÷ 2 on average, first come, first served, and
          for n·E[min(x, y)] where all take turns, x and y being two of them: no other gets more than it before its end.

A batch is a faster server that no request has for itself alone; it scales delays alike. Nearly equal service times make
this about 0.5, exponential ones 1, those of conversations (variation 0.7) 0.6, of mixed short and long answers 3 and
more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from services.schedule.ladder import LEVELS

BURST: Final = 0.75
"""Weight of a burst."""
LOAD: Final = 0.9
"""Where queues are long enough to matter. The sign of the gain hardly depends on it."""


def predicted_gain(service_s: Sequence[float], quantum_s: float) -> float:
    """Between both kinds of traffic. 1 without times."""
    return math.pow(steady_gain(service_s, quantum_s), 1 - BURST) * math.pow(burst_gain(service_s), BURST)


def burst_gain(service_s: Sequence[float]) -> float:
    """Mean delay first come, first served ÷ mean delay taking turns, of many that come at once. 1 without times."""
    times = sorted(service_s)
    count, total = len(times), sum(times)
    if not total:
        return 1.0
    least_s = sum(time * (2 * (count - place) - 1) for place, time in enumerate(times)) / count**2
    return total / count / 2 / least_s


def steady_gain(service_s: Sequence[float], quantum_s: float) -> float:
    """Mean delay first come, first served ÷ mean delay with quanta that double from `quantum_s`. 1 without times."""
    times = sorted(service_s)
    count, total = len(times), sum(times)
    if not total:
        return 1.0
    rate = LOAD * count / total
    sums = [0.0, *accumulate(times)]
    squares = [0.0, *accumulate(time * time for time in times)]
    served_s = rate * squares[-1] / count / 2 / (1 - LOAD)
    delay_s, first, load_above = 0.0, 0, 0.0
    for level in range(LEVELS):
        if first == count:
            break
        most_s = quantum_s * (2 ** (level + 1) - 1) if level + 1 < LEVELS else times[-1]
        end = bisect_right(times, most_s)
        load = rate * (sums[end] + (count - end) * most_s) / count
        wait_s = rate * (squares[end] + (count - end) * most_s**2) / count / 2 / (1 - load)
        used_s = sums[end] - sums[first]
        delay_s += ((end - first) * wait_s + used_s) / (1 - load_above) - used_s
        first, load_above = end, load
    return served_s * count / delay_s
