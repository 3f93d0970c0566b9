"""Shares of tenants: inside a level, over levels, and how many may pass a request."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.schedule.mlfq import Mlfq
from services.schedule.policy import Job
from services.schedule.shares import SLACK_TOKENS, Level, Shares


def level(*entries: tuple[str, str, float]) -> Level:
    """Requests as (key, tenant, weight), in order of entry."""
    made = Level()
    for key, tenant, weight in entries:
        made.enter(key, tenant=tenant, weight=weight, priority=0)
    return made


def test_one_tenant_is_served_first_in_first_out() -> None:
    assert level(*((str(i), "a", 1.0) for i in range(5))).serve(5) == ["0", "1", "2", "3", "4"]


def test_a_light_tenant_passes_the_backlog_of_another() -> None:
    made = level(*((f"a{i}", "a", 1.0) for i in range(5)), ("b0", "b", 1.0), ("b1", "b", 1.0))
    assert made.first(7) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


def test_twice_the_weight_is_twice_the_share() -> None:
    made = level(*((f"a{i}", "a", 1.0) for i in range(30)), *((f"b{i}", "b", 2.0) for i in range(30)))
    assert Counter(key[0] for key in made.first(30)) == {"a": 10, "b": 20}


def test_who_was_away_gets_no_more_than_who_was_not() -> None:
    made = level(*((f"a{i}", "a", 1.0) for i in range(100)))
    for key in made.serve(50):
        made.remove(key)
    for i in range(20):
        made.enter(f"b{i}", tenant="b", weight=1.0, priority=0)
    assert Counter(key[0] for key in made.first(20)) == {"a": 10, "b": 10}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=60),
    st.fixed_dictionaries({tenant: st.sampled_from([1.0, 2.0, 3.0]) for tenant in "abc"}),
)
def test_no_more_requests_of_others_pass_one_than_is_promised(
    moves: list[tuple[str, int]], weights: dict[str, float]
) -> None:
    """`ahead`: how many of its tenant, itself included, had a place when it entered."""
    made, waiting, passed = Level(), dict[str, str](), dict[str, Counter[str]]()
    ahead: dict[str, int] = {}
    for index, (tenant, served) in enumerate(moves):
        key = str(index)
        made.enter(key, tenant=tenant, weight=weights[tenant], priority=0)
        waiting[key], passed[key] = tenant, Counter()
        ahead[key] = sum(other == tenant for other in waiting.values())
        for done in made.serve(served):
            made.remove(done)
            whose = waiting.pop(done)
            for other in waiting:
                passed[other][whose] += 1
            for rival, count in passed.pop(done).items():
                if rival != whose:
                    bound = weights[rival] * ahead[done] / weights[whose] + 1
                    assert count <= math.floor(bound)


def test_a_tenant_is_behind_when_it_got_less_than_its_share_while_it_was_here() -> None:
    shares = Shares()
    shares.join("busy", 1.0)
    shares.serve("busy", 1000)
    assert not shares.behind("busy")  # alone
    shares.join("light", 1.0)
    assert not shares.behind("light")  # it saved nothing up
    for _ in range(int(4 * SLACK_TOKENS)):
        shares.serve("busy", 1)
    assert shares.behind("light")
    assert not shares.behind("busy")


def test_leaving_and_coming_back_does_not_forgive_what_was_had_in_advance() -> None:
    shares = Shares()
    for tenant in ("busy", "other"):
        shares.join(tenant, 1.0)
    shares.serve("busy", 100)
    shares.leave("busy")
    shares.join("busy", 1.0)
    shares.serve("other", 20)
    assert not shares.behind("busy")
    shares.serve("other", 60)
    assert not shares.behind("busy")  # 100 against 80


def test_tenants_that_left_are_forgotten() -> None:
    shares = Shares()
    for index in range(10_000):
        shares.join(str(index), 1.0)
        shares.serve(str(index), 5)
        shares.leave(str(index))
    assert len(shares._ahead) < 100
    assert shares._weights == pytest.approx(0.0)


def test_a_tenant_behind_its_share_keeps_the_top_whatever_the_others_send() -> None:
    """Without that its long request would run once for each time that it starves, 20 times in all."""
    policy = Mlfq(step_s=1.0, starvation_s=20.0)
    policy.arrive(Job(key="light", first_step_s=1.0, tenant="light"), 0.0)
    ran = Counter[str]()
    for at in range(400):
        for index in range(2):
            policy.arrive(Job(key=f"{at} {index}", first_step_s=1.0, tenant="flood"), float(at))
        chosen = policy.choose(2, float(at))
        policy.ran(chosen, 1.0, at + 1.0)
        ran.update("light" if key == "light" else "flood" for key in chosen)
        for key in chosen:
            if key != "light":
                policy.finish(key)
    assert ran["light"] > 300
