"""The bound on waiting where KV is short: the real policy and the real swap plans over simulated blocks and copies."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from services.schedule.mlfq import Mlfq
from services.schedule.policy import Job
from services.simulation.engine import Simulation
from services.simulation.machine import OPT_13B_TOKEN_BYTES, PCIE_BYTES_PER_S, Machine, Request
from services.simulation.memory import MemoryLimit

STARVATION_S = 1.0
LARGEST_TOKENS = 1024 + 300
STEP_S = 0.03
"""No step here is longer."""


class Watched(Mlfq):
    """Notes each wait that ends: how long it was, when it was admitted to the top level and as which one there."""

    def __init__(self) -> None:
        super().__init__(starvation_s=STARVATION_S)
        self.waits: list[tuple[float, int]] = []  # s, place in the top level at promotion or arrival; 0: was not there
        self.promoted = 0
        self._top: dict[str, int] = {}
        self._last_s: dict[str, float] = {}
        self._now_s = 0.0

    def arrive(self, job: Job, now_s: float) -> None:
        super().arrive(job, now_s)
        self._last_s[job.key] = now_s
        if self.level(job.key) == 0:
            self._top[job.key] = self.levels()[0]

    def choose(self, batch: int, now_s: float) -> Sequence[str]:
        chosen = super().choose(batch, now_s)
        up = [change.key for change in self.take_changes() if change.what == "promoted"]
        for place, key in enumerate(reversed(up)):
            self._top[key] = self.levels()[0] - place
        self.promoted += len(up)
        self._now_s = now_s
        return chosen

    def ran(self, keys: Iterable[str], seconds: float, now_s: float, *, steps: int = 1) -> None:
        keys = list(keys)
        for key in keys:
            self.waits.append((self._now_s - self._last_s[key], self._top.pop(key, 0)))
            self._last_s[key] = now_s
        super().ran(keys, seconds, now_s, steps=steps)


def traffic(count: int, rate: float, seed: int) -> list[Request]:
    numbers, now_s, made = random.Random(seed), 0.0, []
    for index in range(count):
        now_s += numbers.expovariate(rate)
        prompt, output = numbers.choices(((64, 8), (256, 64), (1024, 300)), (80, 12, 8))[0]
        made.append(Request(key=str(index), arrival_s=now_s, prompt_tokens=prompt, output_tokens=output))
    return made


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("tokens", "batch", "rate"), [(1500, 4, 4.0), (2400, 16, 8.0), (4000, 64, 16.0)])
def test_nobody_waits_longer_than_the_bound_when_kv_is_short(tokens: int, batch: int, rate: float, seed: int) -> None:
    """From one to three of the largest requests have room, and up to fifteen live at a time, so most waits end
    with a swap. When all that live were chosen, wherever their KV was, promoted ones waited for seconds until somebody
    ended. B is taken as 1, which it is at least; who was not in the top level waits for `STARVATION_S` and a step.
    """
    policy = Watched()
    Simulation(Machine(batch=batch), policy, traffic(100, rate, seed), MemoryLimit(tokens=tokens)).run()
    copy_s = (LARGEST_TOKENS + 16) * OPT_13B_TOKEN_BYTES / PCIE_BYTES_PER_S
    exchange_s = 3 * (copy_s + STEP_S)
    assert policy.promoted > 30
    for wait_s, top in policy.waits:
        swap_in_s = (top + 1) * exchange_s if top else 0.0
        assert wait_s <= STARVATION_S + max(1, top) * STEP_S + swap_in_s
