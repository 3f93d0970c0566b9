"""`python -m loadtest schedule --real`: schedules on live meshes with the real model, the same traffic for each.

The meshes of a mode stand beside each other and work in turns, seed by seed, every other seed in reverse, so that what
is compared was measured within minutes; an idle mesh uses no core. First every mesh gets the same warm-up, from which
its workers learn how long they compute; their own latency models and a backlog then say which rate is load 1.0.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from loadtest.arrivals import Planned
from loadtest.client import Measured, latencies, run_plan
from loadtest.progress import every
from loadtest.schedule_modes import BATCH, Live, Mode, planned, values
from loadtest.schedule_runs import Cell, Run
from services.cli.cores import plan_cores
from services.cli.launch import LaunchedMesh, launched
from services.errors import StartError
from services.latency import Latency

WARM_UP_LIMIT_S: Final = 180.0
BACKLOG_LIMIT_S: Final = 600.0
LEARN_LIMIT_S: Final = 10.0
"""Workers say once a second what they have learned."""
PROGRESS_S: Final = 5.0
TAIL: Final = 1.3
"""A run is predicted to take so many times the time in which its requests arrive."""

Say = Callable[[str], None]


def live_runs(live: Live, *, say: Say) -> Iterator[Run]:
    """All runs that fit into the time. `say` is told what is going on, every few seconds.

    StartError: a mesh did not come up, or does not say how fast it is. ValueError: a request failed.
    """
    modes = live.chosen()
    runs = live.seeds * sum(len(mode.policies) for mode in modes)
    say(
        f"{runs} runs of {live.count} requests to {live.model}: {live.limit_s / 60:g} min at most beside the meshes'"
        " starts; seeds that would take longer are left out"
    )
    for mode in modes:
        yield from _runs_of(live, mode, live.limit_s / len(modes), say)


def _runs_of(live: Live, mode: Mode, limit_s: float, say: Say) -> Iterator[Run]:
    with ExitStack() as stack:
        meshes = {policy: stack.enter_context(_mesh(mode, policy, live.model, say)) for policy in mode.policies}
        stack.enter_context(_beside_steps(mode))
        end_s = time.monotonic() + limit_s
        latency = _learned_by_all(mode, meshes, say)
        longer = _longer(mode, next(iter(meshes.values())), latency, say)
        rate = mode.load_1(latency) / longer
        run_s = TAIL * live.count / rate
        busy = f", prefill is busy {mode.prefill_busy(latency, rate):.0%} then" if mode.prefill else ""
        say(f"{mode.name}: load 1.0 is {rate:.2f} requests a second{busy}; a run takes about {run_s:.0f} s")
        for seed in range(live.first_seed, live.first_seed + live.seeds):
            if time.monotonic() + run_s * len(meshes) > end_s:
                say(f"{mode.name}: no time is left for seed {seed} and later ones")
                return
            requests = planned(mode.workload, rate, live.count, seed)
            for policy, mesh in reversed(meshes.items()) if seed % 2 else meshes.items():
                title = f"{mode.name}, {policy}, seed {seed}"
                measured = _sent(mesh, requests, end_s - time.monotonic(), partial(_say_under, say, title))
                run = Run(cell=_cell(mode, policy, live.count), seed=seed, values=_values(measured, title))
                predicted_s = mode.predicted_jct_s(latency, policy, rate, live.count, seed)
                say(f"{title}: mean completion {run.values['mean_jct_s']:.2f} s ({predicted_s:.2f} s by their latency)")
                yield run


def _say_under(say: Say, title: str, words: str) -> None:
    say(f"{title}: {words}")


def _cell(mode: Mode, policy: str, count: int) -> Cell:
    return Cell(workload=mode.workload.name, mode=mode.name, load=1.0, batch=BATCH, policy=policy, count=count)


def _values(measured: Sequence[Measured], title: str) -> dict[str, float]:
    try:
        return values(measured)
    except ValueError as error:
        raise ValueError(f"{title}: {error}") from None


@contextmanager
def _mesh(mode: Mode, policy: str, model: str, say: Say) -> Iterator[LaunchedMesh]:
    title = f"{mode.name}, {policy}"
    flags = [f"--prefill={mode.prefill}", f"--model={model}", "--log-level=warning"]
    with launched(
        flags,
        progress=every(PROGRESS_S, lambda elapsed_s: say(f"{title}: starting a mesh, {elapsed_s:.0f} s")),
        environ={"DIPTYCH_SCHEDULE": policy, "DIPTYCH_MAX_BATCH": str(BATCH)},
    ) as mesh:
        yield mesh
        say(f"{title}: stopping its mesh")


@contextmanager
def _beside_steps(mode: Mode) -> Iterator[None]:
    """This process keeps to the cores that a mesh does not decode on, as far as there are any."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, plan_cores(sorted(cores), decode=1, prefill=mode.prefill).others or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _learned_by_all(mode: Mode, meshes: Mapping[str, LaunchedMesh], say: Say) -> Latency:
    """Warms all meshes up. Their workers are alike: who is in the middle is taken, which is less noisy than one."""
    learned: list[Latency] = []
    for policy, mesh in meshes.items():
        title = f"{mode.name}, {policy}: warm-up"
        waves = mode.warm_up()
        for number, wave in enumerate(waves, 1):
            _values(_sent(mesh, wave, WARM_UP_LIMIT_S, partial(_say_under, say, title)), title)
            if number % 6 == 0:
                say(f"{title}: {number} of {len(waves)}")
        learned.append(_learned(mesh))
        say(f"{title}: {described(learned[-1])}; just busy at {mode.load_1(learned[-1]):.2f} requests a second")
    return sorted(learned, key=mode.load_1)[len(learned) // 2]


def _longer(mode: Mode, mesh: LaunchedMesh, latency: Latency, say: Say) -> float:
    """How many times as long as predicted a mesh takes for a backlog, first come, first served; 1 at least."""
    title = f"{mode.name}, fcfs: backlog"
    measured = _sent(mesh, mode.backlog(latency), BACKLOG_LIMIT_S, partial(_say_under, say, title))
    _values(measured, title)
    taken_s, predicted_s = max(one.total_s for one in measured), mode.predicted_backlog_s(latency)
    say(f"{title}: answered after {taken_s:.1f} s ({predicted_s:.1f} s by their latency)")
    return max(1.0, taken_s / predicted_s)


def described(latency: Latency) -> str:
    """In words."""
    assert latency.step is not None and latency.prefill is not None
    step_s = latency.step.step_s(context_tokens=BATCH * 256, batch=BATCH)
    return (
        f"a step of {BATCH} takes {step_s * 1e3:.1f} ms, a prompt of 512 {latency.prefill.prompt_s(512) * 1e3:.0f} ms"
    )


def _learned(mesh: LaunchedMesh) -> Latency:
    """What the mesh's workers know of their speed: decode's steps, and prompts where they are computed."""
    end_s = time.monotonic() + LEARN_LIMIT_S
    while True:
        known = latencies(mesh.scheduler, limit_s=LEARN_LIMIT_S)
        step = next((one.step for one in known if one.step), None)
        prefill = next((one.prefill for one in known if one.prefill), None)
        if step and prefill:
            return Latency(prefill=prefill, step=step)
        if time.monotonic() > end_s:
            raise StartError("the workers have not learned from the warm-up how fast they are")
        time.sleep(0.5)


def _sent(mesh: LaunchedMesh, requests: Sequence[Planned], limit_s: float, say: Say) -> list[Measured]:
    return asyncio.run(watched(mesh.grpc, requests, limit_s, say))


async def watched(address: str, requests: Sequence[Planned], limit_s: float, say: Say) -> list[Measured]:
    """Sends them and says how many are answered. ValueError: not all were within `limit_s`."""
    begin_s, answered = time.monotonic(), 0

    def count() -> None:
        nonlocal answered
        answered += 1

    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            say(f"{answered} of {len(requests)} answered after {time.monotonic() - begin_s:.0f} s")

    telling = asyncio.create_task(tell())
    try:
        async with asyncio.timeout(limit_s):
            return await run_plan(address, requests, limit_s=limit_s, clock=time.monotonic, answered=count)
    except TimeoutError:
        raise ValueError(f"only {answered} of {len(requests)} requests were answered within {limit_s:.0f} s") from None
    finally:
        telling.cancel()
