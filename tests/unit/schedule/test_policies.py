"""One suite for every policy, and what is each one's own."""

from __future__ import annotations

import random

import pytest

from services.schedule.auto import CROWDED, ENTER, EVERY, LEAST, LEAVE, ROOMY, Auto
from services.schedule.catalog import POLICIES, policy_named
from services.schedule.gain import burst_gain, predicted_gain, steady_gain
from services.schedule.mlfq import Mlfq
from services.schedule.policy import Job, Policy
from services.schedule.shortest import PATIENCE, shortest

every_policy = pytest.mark.parametrize("name", POLICIES)


def job(key: str, *, priority: int = 0, service_s: float | None = 5.0) -> Job:
    return Job(key=key, first_step_s=1.0, priority=priority, service_s=service_s)


def with_jobs(name: str, count: int) -> Policy:
    policy = policy_named(name, step_s=1.0)
    for index in range(count):
        policy.arrive(job(str(index)), 0.0)
    return policy


@every_policy
@pytest.mark.parametrize("live", [0, 1, 3, 4, 5])
def test_a_step_is_full_as_long_as_so_many_live_and_nobody_is_in_it_twice(name: str, live: int) -> None:
    chosen = with_jobs(name, live).choose(4, 0.0)
    assert len(chosen) == len(set(chosen)) == min(live, 4)


@every_policy
def test_its_name_is_what_it_is_chosen_by(name: str) -> None:
    assert policy_named(name).name == name


def test_another_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"'lottery' is none of fcfs, mlfq, .*auto"):
        policy_named("lottery")


@every_policy
def test_a_key_lives_once_and_ends_once(name: str) -> None:
    policy = with_jobs(name, 1)
    with pytest.raises(ValueError, match="'0'"):
        policy.arrive(job("0"), 1.0)
    policy.finish("0")
    assert policy.choose(4, 1.0) == []
    with pytest.raises(KeyError):
        policy.finish("0")
    with pytest.raises(KeyError):
        policy.level("0")


@every_policy
def test_everybody_ends_when_no_step_is_empty(name: str) -> None:
    policy, left, now_s = with_jobs(name, 9), {str(index): index + 1 for index in range(9)}, 0.0
    while left:
        chosen = policy.choose(2, now_s)
        assert chosen
        now_s += 1.0
        policy.ran(chosen, 1.0, now_s)
        for key in chosen:
            left[key] -= 1
            if not left[key]:
                del left[key]
                policy.finish(key)
        assert now_s <= 45
    assert sum(policy.levels()) == 0


@every_policy
def test_who_runs_next_is_first_among_the_upcoming_and_times_do_not_go_back(name: str) -> None:
    policy = with_jobs(name, 20)
    chosen = policy.choose(4, 0.0)
    policy.ran(chosen, 1.0, 1.0)
    chosen = policy.choose(4, 1.0)
    upcoming = policy.upcoming(10, 4, 1.0)
    assert {one.key for one in upcoming[:4]} == set(chosen)
    assert [one.enst_s for one in upcoming] == sorted(one.enst_s for one in upcoming)
    assert len({one.key for one in upcoming}) == len(upcoming) == 10
    assert list(policy.enst_s([one.key for one in upcoming], 4, 1.0)) == [one.enst_s for one in upcoming]


@every_policy
def test_levels_count_everybody(name: str) -> None:
    policy = with_jobs(name, 7)
    policy.ran(policy.choose(3, 0.0), 1.0, 1.0)
    assert sum(policy.levels()) == 7


@pytest.mark.parametrize(("field", "value"), [("first_step_s", -1.0), ("first_step_s", float("nan")), ("weight", 0.0)])
def test_a_job_that_cannot_be_ordered_is_refused_by_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Job(**{"key": "a", "first_step_s": 1.0, field: value})  # type: ignore[arg-type]


def test_first_come_is_served_to_its_end() -> None:
    policy = with_jobs("fcfs", 3)
    for at in range(50):
        assert policy.choose(1, float(at)) == ["0"]
        policy.ran(["0"], 1.0, at + 1.0)
    policy.finish("0")
    assert policy.choose(2, 50.0) == ["1", "2"]


def test_strict_priorities_preempt_and_equals_keep_their_order() -> None:
    policy = policy_named("priority")
    for key, priority in (("a", 0), ("b", 2), ("c", 2), ("d", -1)):
        policy.arrive(job(key, priority=priority), 0.0)
    assert policy.choose(4, 0.0) == ["b", "c", "a", "d"]


def test_the_oracle_runs_the_least_that_is_left_and_time_served_counts() -> None:
    policy = policy_named("srpt-oracle")
    policy.arrive(job("long", service_s=10.0), 0.0)
    policy.ran(policy.choose(1, 0.0), 7.0, 7.0)
    policy.arrive(job("new", service_s=4.0), 7.0)
    assert policy.choose(2, 7.0) == ["long", "new"]
    policy.arrive(job("short", service_s=2.0), 7.0)
    assert policy.choose(1, 7.0) == ["short"]
    with pytest.raises(ValueError, match="service_s"):
        policy.arrive(job("x", service_s=None), 7.0)


def completed(policy: Auto, times: list[float], *, waiting: int = 3) -> None:
    """Requests that were served for so long each, beside others that wait."""
    for index in range(waiting):
        policy.arrive(job(f"waiting {index} {id(times)}"), 0.0)
    for index, service_s in enumerate(times):
        key = f"{index} {id(times)}"
        policy.arrive(job(key), 0.0)
        policy.choose(1, 0.0)
        policy.ran([key], service_s, 0.0)
        policy.finish(key)
    policy.choose(1, 0.0)


SKEWED = [8.0] * 80 + [64.0] * 12 + [700.0] * 8
EVEN = [100.0, 110.0] * 600


def shuffled(times: list[float]) -> list[float]:
    return random.Random(0).sample(times, len(times))


def test_auto_starts_first_come_first_served_and_says_when_it_turns() -> None:
    policy = Auto(Mlfq(step_s=1.0))
    assert policy.mode == "fcfs"
    completed(policy, shuffled(SKEWED))
    assert policy.mode == "mlfq"
    modes = [change for change in policy.take_changes() if change.what == "mode"]
    assert [change.key for change in modes] == [""]
    assert "mlfq" in modes[0].detail
    completed(policy, EVEN)
    assert policy.mode == "fcfs"


def test_auto_stays_where_it_is_between_its_two_bounds_with_few_completions_and_without_a_queue() -> None:
    assert LEAVE < ENTER <= 1
    even, few, idle = (Auto(Mlfq(step_s=1.0)) for _ in range(3))
    completed(even, EVEN)
    completed(few, shuffled(SKEWED)[: LEAST - 1])
    completed(idle, shuffled(SKEWED), waiting=0)
    assert [policy.mode for policy in (even, few, idle)] == ["fcfs"] * 3
    assert EVERY < LEAST


def test_auto_turns_when_a_flood_leaves_another_tenant_behind_its_share() -> None:
    policy = Auto(Mlfq(step_s=1.0))
    for index in range(400):
        policy.arrive(Job(key=f"flood {index}", first_step_s=1.0, tenant="flood"), 0.0)
    policy.arrive(Job(key="light", first_step_s=1.0, tenant="light"), 0.0)
    for index in range(300):
        if policy.mode == "mlfq":
            break
        (key,) = policy.choose(1, float(index))
        policy.ran([key], 10.0, index + 1.0, steps=10)
        policy.finish(key)
    assert 512 * 2 < index * 10 < 512 * 2 + 200
    policy.choose(1, 400.0)
    detail = next(change.detail for change in policy.take_changes() if change.what == "mode")
    assert detail.endswith("a tenant behind its share")


def test_shortest_first_is_bounded_by_how_long_a_job_is_itself() -> None:
    policy = shortest()
    policy.arrive(Job(key="long", first_step_s=5.0), 0.0)
    policy.arrive(Job(key="as long", first_step_s=5.0), 0.0)
    last_s = PATIENCE * (5.0 - 0.5)
    policy.arrive(Job(key="short", first_step_s=0.5), last_s - 0.1)
    policy.arrive(Job(key="short, late", first_step_s=0.5), last_s + 0.1)
    assert policy.choose(4, last_s + 1) == ["short", "long", "as long", "short, late"]
    policy.ran(["long"], 4.9, last_s + 6)
    assert policy.choose(4, last_s + 6) == ["short", "long", "as long", "short, late"], "its rank is for good"


def test_auto_goes_by_lengths_that_are_known_from_the_first_request_on() -> None:
    policy = Auto(Mlfq(step_s=1.0), sized=True)
    assert policy.mode == "shortest"
    policy.arrive(Job(key="long", first_step_s=5.0), 0.0)
    policy.arrive(Job(key="short", first_step_s=0.5), 1.0)
    assert policy.choose(1, 1.0) == ["short"]
    completed(policy, shuffled(SKEWED))
    assert policy.mode == "shortest", "what completes varies, and nobody turns for that"
    policy.arrive(Job(key="light", first_step_s=90.0, tenant="light"), 0.0)
    flooded(policy, 0, 300)
    assert policy.mode == "mlfq", "it knows no shares, and somebody is behind"


def flooded(policy: Auto, first: int, count: int) -> None:
    """Requests of one tenant that all take as long, one after the other."""
    for index in range(first, first + count):
        key = f"flood {index}"
        policy.arrive(Job(key=key, first_step_s=1.0, tenant="flood"), 0.0)
        policy.choose(1, 0.0)
        policy.ran([key], 10.0, 0.0, steps=10)
        policy.finish(key)


def test_auto_keeps_shares_until_all_that_live_run_even_where_turns_lose() -> None:
    policy = Auto(Mlfq(step_s=1.0))
    for key in ("flood", "light"):
        policy.arrive(Job(key=key, first_step_s=1.0, tenant=key), 0.0)
    flooded(policy, 0, 300)
    assert policy.mode == "mlfq"
    policy.ran(["light"], 3400.0, 0.0, steps=3400)  # from here on nobody is behind
    flooded(policy, 300, 50)
    assert policy.gain < LEAVE
    assert policy.mode == "mlfq"
    policy.choose(2, 0.0)  # all that live
    flooded(policy, 350, 50)
    assert policy.mode == "fcfs"


def test_auto_does_not_learn_from_what_was_cancelled() -> None:
    policy = Auto(Mlfq(step_s=1.0))
    for index, service_s in enumerate(shuffled(SKEWED)):
        policy.arrive(job(str(index)), 0.0)
        policy.arrive(job(f"{index} waits"), 0.0)
        policy.choose(1, 0.0)
        policy.ran([str(index)], service_s, 0.0)
        policy.finish(str(index), completed=False)
    assert policy.choose(1, 0.0) == ["0 waits"]
    assert policy.mode == "fcfs"


def prompts_of(policy: Auto, share: float, tokens: int = 100) -> str:
    """The mode after SKEWED, a share of all time being a prompt's, before each answer, while somebody waits."""
    for index, service_s in enumerate(shuffled(SKEWED)):
        key = f"{share} {index}"
        policy.arrive(job(key), 0.0)
        policy.choose(1, 0.0)
        policy.computed(key, service_s * share, 0.0, tokens=tokens)
        if share < 1:
            policy.ran([key], service_s * (1 - share), 0.0)
        policy.finish(key)
    policy.choose(1, 0.0)
    return policy.mode


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(("share", "mode"), [(CROWDED - 0.05, "mlfq"), (CROWDED + 0.05, "fcfs"), (1.0, "mlfq")])
def test_auto_stays_first_come_first_served_where_prompts_leave_rows_little_time(
    share: float, mode: str, tokens: int
) -> None:
    """Where all time is a prompt's nobody decodes, and prompts pass prompts."""
    policy = Auto(Mlfq(step_s=1.0))
    policy.arrive(job("waiting"), 0.0)
    assert prompts_of(policy, share, tokens) == mode


def test_auto_does_not_waver_where_prompts_take_about_as_much_as_it_minds() -> None:
    """It turned every few seconds, and what it had begun in one schedule lay about in the other: worse than both."""
    policy = Auto(Mlfq(step_s=1.0))
    policy.arrive(job("waiting"), 0.0)
    between = (CROWDED + ROOMY) / 2
    assert [prompts_of(policy, share) for share in (between, CROWDED + 0.05, between - 0.001, ROOMY / 2)] == [
        "mlfq",
        "fcfs",
        "fcfs",
        "mlfq",
    ]


def simulated_delays(times: list[float], quantum_s: float, seed: int) -> float:
    """The gain itself: an M/G/1 queue at the load that is assumed, both ways, by a loop over quanta of one second."""
    numbers = random.Random(seed)
    mean_s = sum(times) / len(times)
    arrivals, at_s = [], 0.0
    for _ in range(6000):
        at_s += numbers.expovariate(0.9 / mean_s)
        arrivals.append((at_s, numbers.choice(times)))
    free_s = served_s = 0.0
    for at_s, time_s in arrivals:
        free_s = max(free_s, at_s)
        served_s += free_s - at_s
        free_s += time_s
    queues: list[list[tuple[float, float, float]]] = [[] for _ in range(20)]
    delay_s, now_s, index = 0.0, 0.0, 0
    while index < len(arrivals) or any(queues):
        if not any(queues):
            now_s = max(now_s, arrivals[index][0])
        while index < len(arrivals) and arrivals[index][0] <= now_s:
            queues[0].append((arrivals[index][0], arrivals[index][1], arrivals[index][1]))
            index += 1
        level = next(level for level, queue in enumerate(queues) if queue)
        at_s, time_s, left_s = queues[level].pop(0)
        ran_s = min(left_s, quantum_s * 2**level)
        now_s += ran_s
        if left_s > ran_s:
            queues[level + 1].append((at_s, time_s, left_s - ran_s))
        else:
            delay_s += now_s - at_s - time_s
    return served_s / delay_s


@pytest.mark.parametrize("times", [SKEWED, [10.0, 100.0]], ids=["skewed", "two lengths"])
def test_the_gain_of_steady_traffic_is_that_of_a_simulated_queue(times: list[float]) -> None:
    """Quanta of the simulated queue are not preempted: 4 runs of 6,000 requests agree to a quarter."""
    seen = sum(simulated_delays(times, 1.0, seed) for seed in range(4)) / 4
    assert steady_gain(times, 1.0) == pytest.approx(seen, rel=0.25)


@pytest.mark.parametrize("times", [SKEWED, EVEN[:100], [50.0]], ids=["skewed", "even", "one length"])
def test_the_gain_of_a_burst_is_that_of_one_that_takes_turns(times: list[float]) -> None:
    """Two hundred at once; a turn takes a second. Delays are compared in one run of each."""
    left = [time for time in times for _ in range(max(1, 200 // len(times)))]
    random.Random(0).shuffle(left)
    served_s = sum(sum(left[:place]) for place in range(len(left)))
    turns_s = now_s = 0.0
    waiting = [(time, time) for time in left]
    while waiting:
        going = []
        for time, rest in waiting:
            now_s += 1.0
            if rest > 1.0:
                going.append((time, rest - 1.0))
            else:
                turns_s += now_s - time
        waiting = going
    assert burst_gain(times) == pytest.approx(served_s / turns_s, rel=0.1)


def test_the_predicted_gain_of_exponential_times_is_one_and_of_equal_ones_less() -> None:
    numbers = random.Random(0)
    assert predicted_gain([numbers.expovariate(0.01) for _ in range(20_000)], 1.0) == pytest.approx(1.0, abs=0.05)
    assert steady_gain([100.0] * 50, 1.0) < burst_gain([100.0] * 50) == pytest.approx(0.5)
    assert predicted_gain([], 1.0) == predicted_gain([0.0], 1.0) == 1.0
