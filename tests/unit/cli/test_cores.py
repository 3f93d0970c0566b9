from __future__ import annotations

import pytest

from services.cli.cores import core_list, plan_cores


def test_two_cores_give_decode_one_alone_and_everything_else_the_other() -> None:
    plan = plan_cores([0, 1], decode=1, prefill=1)
    assert plan.decode_steps == ((0,),)
    assert plan.prefill_steps == ((1,),)
    assert plan.others == (1,)


def test_prefill_steps_take_the_cores_after_decode() -> None:
    plan = plan_cores(range(8), decode=2, prefill=2)
    assert plan.decode_steps == ((0,), (1,))
    assert plan.prefill_steps == ((2,), (3,))
    assert plan.others == (2, 3, 4, 5, 6, 7)


def test_prefill_steps_without_a_core_of_their_own_share_what_is_left() -> None:
    plan = plan_cores([0, 1, 2], decode=1, prefill=3)
    assert plan.prefill_steps == ((1,), (2,), (1, 2))


@pytest.mark.parametrize(("cores", "decode"), [([0], 1), ([0, 1], 2), ([0, 1], 3), ([], 1)])
def test_too_few_cores_leave_the_choice_to_the_system(cores: list[int], decode: int) -> None:
    plan = plan_cores(cores, decode=decode, prefill=1)
    assert plan.decode_steps == ((),) * decode
    assert plan.prefill_steps == ((),)
    assert plan.others == ()


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("decode", [1, 2, 5])
@pytest.mark.parametrize("prefill", [0, 1, 4])
def test_nothing_ever_shares_the_core_of_a_pinned_decode_step(cores: int, decode: int, prefill: int) -> None:
    plan = plan_cores(range(cores), decode=decode, prefill=prefill)
    assert (len(plan.decode_steps), len(plan.prefill_steps)) == (decode, prefill)
    pinned = [core for step in plan.decode_steps for core in step]
    assert len(set(pinned)) == len(pinned)
    assert not set(pinned) & {core for step in (*plan.prefill_steps, plan.others) for core in step}


def test_only_cores_that_are_available_are_given_away() -> None:
    plan = plan_cores([7, 3, 5], decode=1, prefill=1)
    assert (plan.decode_steps, plan.prefill_steps, plan.others) == (((3,),), ((5,),), (5, 7))


def test_a_core_list_is_what_the_flags_take() -> None:
    assert core_list(()) == ""
    assert core_list((0, 2)) == "0,2"
