"""The simulator: small runs computed by hand, the same run twice, jumps against single steps, and limited memory."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest

from services.latency import Latency, PrefillFit, StepFit
from services.schedule.catalog import POLICIES, policy_named
from services.schedule.mlfq import Mlfq
from services.schedule.swap import SwapMode
from services.simulation.engine import Outcome, Simulation
from services.simulation.machine import OPT_13B_A100, Machine, Request
from services.simulation.memory import MemoryLimit

UNIT = Latency(
    prefill=PrefillFit(a_s=0.0, b_s=0.01, c_s=0.0, chunk_tokens=200, error=0.0, steps=0),
    step=StepFit(a_s=1.0, b_s=0.0, c_s=0.0, error=0.0, steps=0),
)
"""A decode step takes a second, a prompt a second for each 100 tokens, 200 of them in one step at most."""


def request(key: str, at_s: float, prompt: int, output: int) -> Request:
    return Request(key=key, arrival_s=at_s, prompt_tokens=prompt, output_tokens=output)


def ends(outcome: Outcome) -> dict[str, tuple[float, float]]:
    """First token and end of each."""
    return {one.request.key: (one.first_token_s, one.end_s) for one in outcome.records}


def simulated(requests: list[Request], policy: str, *, batch: int = 1, aggregated: bool = False) -> Outcome:
    machine = Machine(latency=UNIT, batch=batch, aggregated=aggregated)
    return Simulation(machine, policy_named(policy, step_s=1.0, starvation_s=1e9), requests).run()


@pytest.mark.parametrize("chunk_tokens", [512, 2048], ids=["in chunks", "whole"])
def test_where_half_the_prompts_are_long_to_join_below_pays_for_each_token(chunk_tokens: int) -> None:
    """Of 2048 tokens a step has room for a whole prompt. The gains are 1.5 and 1.1; one of 1 would be none."""
    assert OPT_13B_A100.prefill is not None
    latency = replace(OPT_13B_A100, prefill=replace(OPT_13B_A100.prefill, chunk_tokens=chunk_tokens))
    numbers, now_s, made = random.Random(0), 0.0, []
    for index in range(600):
        now_s += numbers.expovariate(6.4)
        output = numbers.choices((5, 33, 351), (80, 12, 8))[0]
        made.append(request(str(index), now_s, numbers.choice((64, 1536)), output))
    naive, skip = (
        mean(
            record.latency_per_token_s
            for record in Simulation(Machine(latency=latency, aggregated=True), policy_named(policy), made)
            .run()
            .records
        )
        for policy in ("mlfq-naive", "mlfq")
    )
    assert naive / skip > (1.25 if chunk_tokens == 512 else 1.05)


def traffic(count: int, rate: float, seed: int = 0) -> list[Request]:
    numbers, now_s, made = random.Random(seed), 0.0, []
    for index in range(count):
        now_s += numbers.expovariate(rate)
        prompt, output = numbers.choices(((64, 8), (256, 64), (1024, 300)), (80, 12, 8))[0]
        made.append(request(str(index), now_s, prompt, output))
    return made


def test_no_request_is_no_time() -> None:
    assert simulated([], "fcfs") == Outcome()


def test_first_come_first_served_by_hand() -> None:
    outcome = simulated([request("a", 0.0, 1, 3), request("b", 0.5, 1, 1), request("c", 10.0, 1, 1)], "fcfs")
    assert ends(outcome) == {"a": (1.0, 3.0), "b": (4.0, 4.0), "c": (11.0, 11.0)}
    assert outcome.computing_s == 5.0


def test_feedback_queues_by_hand() -> None:
    """a, then b for its first step, both demoted; a's two steps of level 1 are interrupted by c."""
    outcome = simulated([request("a", 0.0, 1, 3), request("b", 0.5, 1, 2), request("c", 2.5, 1, 1)], "mlfq")
    assert ends(outcome) == {"a": (1.0, 5.0), "b": (2.0, 6.0), "c": (4.0, 4.0)}
    waits = {one.request.key: (one.longest_wait_s, one.preemptions) for one in outcome.records}
    assert waits == {"a": (1.0, 2), "b": (3.0, 1), "c": (0.5, 0)}


def test_a_prompt_is_computed_in_chunks_beside_the_rows_and_its_last_chunk_gives_the_first_token() -> None:
    outcome = simulated([request("a", 0.0, 100, 3), request("b", 0.5, 300, 2)], "fcfs", batch=2, aggregated=True)
    # a's prompt 1 s; then b's 200 tokens beside a's second token 1 + 2 s, 100 beside the third 1 + 1 s; b alone 1 s.
    assert ends(outcome) == {"a": (1.0, 6.0), "b": (6.0, 7.0)}


def test_who_decodes_goes_on_in_the_places_of_prompts_that_get_no_token() -> None:
    """The first of both prompts takes all that a step has for prompts."""
    long = [replace(request(key, 0.5, 2000, 1), priority=1) for key in "bc"]
    outcome = simulated([request("a", 0.0, 1, 6), *long], "priority", batch=2, aggregated=True)
    assert {one.request.key: one.preemptions for one in outcome.records}["a"] == 0
    assert ends(outcome)["a"][1] < min(ends(outcome)[key][1] for key in "bc")


def test_the_oracle_is_told_the_whole_service_time() -> None:
    outcome = simulated([request("long", 0.0, 1, 9), request("a", 0.0, 1, 3), request("b", 0.0, 1, 1)], "srpt-oracle")
    assert {key: end_s for key, (_, end_s) in ends(outcome).items()} == {"b": 1.0, "a": 4.0, "long": 13.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_traffic_gives_the_same_run(policy: str) -> None:
    def run() -> Outcome:
        return Simulation(Machine(batch=4, aggregated=True), policy_named(policy), traffic(60, 3.0)).run()

    first = run()
    assert first == run()
    assert sorted(int(one.request.key) for one in first.records) == list(range(60))


class Single(Mlfq):
    """Never lets several steps be taken at once."""

    def steady_steps(self, step_s: float, now_s: float) -> int:
        return 1


@pytest.mark.parametrize("tokens", [0, 4000], ids=["unlimited", "KV-limited"])
def test_several_steps_at_once_are_what_single_steps_are(tokens: int) -> None:
    """Long steps in between make the measured step time differ a little: completions agree to a percent."""
    limit = MemoryLimit(tokens=tokens) if tokens else None
    means, turns = [], []
    for policy in (Mlfq(), Single()):
        outcome = Simulation(Machine(batch=4), policy, traffic(150, 1.2), limit).run()
        means.append(sum(one.completion_s for one in outcome.records) / 150)
        turns.append(outcome.turns)
    assert means[0] == pytest.approx(means[1], rel=0.01 if not tokens else 0.05)
    assert turns[0] < turns[1] * 0.8


@pytest.mark.parametrize("swap", SwapMode)
@pytest.mark.parametrize("policy", ["fcfs", "mlfq"])
def test_blocks_are_accounted_for_after_every_turn_and_all_come_back(policy: str, swap: SwapMode) -> None:
    limit = MemoryLimit(swap=swap, tokens=2400)
    run = Simulation(Machine(batch=4, aggregated=True), policy_named(policy), traffic(40, 1.5), limit)
    while len(run.outcome.records) < 40:
        run.turn()
        run.check()
    assert run.free_blocks() == 2400 // 16


def test_swapped_requests_end_and_copies_are_counted() -> None:
    limit = MemoryLimit(tokens=2400)
    outcome = Simulation(Machine(batch=4), policy_named("mlfq"), traffic(40, 1.5), limit).run()
    assert len(outcome.records) == 40
    assert outcome.swapped_bytes > 0
    assert 0 < outcome.idle_by_swap < 0.5


def test_enough_memory_is_as_good_as_infinite_memory() -> None:
    policy, requests = "mlfq", traffic(60, 1.5)
    infinite = Simulation(Machine(batch=4), policy_named(policy), requests).run()
    enough = Simulation(Machine(batch=4), policy_named(policy), requests, MemoryLimit(tokens=1 << 20)).run()
    assert enough.swapped_bytes == 0
    means = [sum(one.completion_s for one in outcome.records) for outcome in (infinite, enough)]
    assert means[0] == pytest.approx(means[1], rel=0.01)


@pytest.mark.parametrize(("prompt", "refused"), [(2000, False), (2001, True)])
def test_a_request_larger_than_memory_is_refused_by_its_name(prompt: int, refused: bool) -> None:
    requests, limit = [request("large", 0.0, prompt, 32)], MemoryLimit(tokens=2048)
    if refused:
        with pytest.raises(ValueError, match="'large' is larger than a memory of 2048 tokens"):
            Simulation(Machine(), policy_named("fcfs"), requests, limit)
    else:
        assert len(Simulation(Machine(), policy_named("fcfs"), requests, limit).run().records) == 1


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0)])
def test_a_request_without_prompt_or_answer_is_refused(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match="'a'"):
        request("a", 0.0, prompt, output)


def test_a_machine_that_could_not_run_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="batch"):
        Machine(batch=0)
    with pytest.raises(ValueError, match="latency"):
        Machine(latency=Latency())
