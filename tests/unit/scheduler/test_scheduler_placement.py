"""Which workers serve a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from services.cluster.record import BlockCounts, WorkerRecord
from services.errors import InvalidArgument, NotFound, Unavailable
from services.scheduler.placement import Loads, Placement, Refusal, Wanted, choose, least_tokens, resolve_model

BLOCK = 16


def worker(name: str, **changes: object) -> WorkerRecord:
    fields: dict[str, object] = {
        "name": name,
        "address": f"{name}:1",
        "incarnation": f"life-of-{name}",
        "role": name.partition("-")[0],
        "state": "ready",
        "model": "m",
        "fingerprint": "f",
        "context_tokens": 128,
        "block_tokens": BLOCK,
        "blocks": BlockCounts(total=16, free=16),
    }
    return WorkerRecord(**(fields | changes))  # type: ignore[arg-type]


D0, D1, P0, P1 = worker("decode-0"), worker("decode-1"), worker("prefill-0"), worker("prefill-1")


def wanted(prompt: int = 10, new: int = 10, model: str = "", avoid: Sequence[WorkerRecord] = ()) -> Wanted:
    return Wanted(model=model, prompt_tokens=prompt, max_new_tokens=new, avoid=frozenset(w.incarnation for w in avoid))


def placed(
    workers: Sequence[WorkerRecord], request: Wanted, loads: Loads | None = None, *, local: bool = True
) -> Placement:
    choice = choose(workers, request, loads or Loads(), local_prefill=local)
    assert isinstance(choice, Placement), choice
    return choice


def refused(workers: Sequence[WorkerRecord], request: Wanted, *, local: bool = True) -> Refusal:
    choice = choose(workers, request, Loads(), local_prefill=local)
    assert isinstance(choice, Refusal), choice
    return choice


def test_one_of_each_serves_the_request() -> None:
    assert placed([D0, P0], wanted()) == Placement(decode=D0, prefill=P0)


def test_a_worker_needs_room_for_all_answers_of_a_prompt_but_need_not_hold_them_at_once() -> None:
    """decode-0 has 64 tokens left of 256, decode-1 has 32 but less queued."""
    loads = Loads(decode={D0.incarnation: 192, D1.incarnation: 224})
    busy = replace(D0, queued_tokens=100)
    assert placed([busy, D1], wanted(8, 8), loads).decode == D1
    assert placed([busy, D1], replace(wanted(8, 8), answers=4), loads).decode == busy
    assert placed([D0], replace(wanted(64, 64), answers=16)).decode == D0


def test_without_any_worker_waiting_may_help() -> None:
    refusal = refused([], wanted())
    assert isinstance(refusal.error, Unavailable)
    assert refusal.passing


def test_prefill_workers_alone_serve_nothing() -> None:
    assert isinstance(refused([P0], wanted()).error, Unavailable)


def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt_and_says_why() -> None:
    assert placed([D0], wanted()) == Placement(decode=D0, prefill=None, local_reason="no prefill worker")


def test_local_prefill_that_is_not_allowed_is_refused_instead() -> None:
    refusal = refused([D0], wanted(), local=False)
    assert isinstance(refusal.error, Unavailable)
    assert refusal.passing


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_only_ready_workers_are_chosen(state: str) -> None:
    sleepy_d, sleepy_p = replace(D0, state=state), replace(P0, state=state)  # type: ignore[arg-type]
    assert placed([sleepy_d, D1, sleepy_p, P1], wanted()) == Placement(decode=D1, prefill=P1)
    assert placed([D1, sleepy_p], wanted()).local_reason == "no prefill worker"
    refusal = refused([sleepy_d], wanted())
    assert isinstance(refusal.error, Unavailable)
    assert state in str(refusal.error)


def test_workers_that_failed_the_request_are_not_chosen_again() -> None:
    assert placed([D0, D1, P0, P1], wanted(avoid=[D0, P0])) == Placement(decode=D1, prefill=P1)
    assert placed([D0, P0], wanted(avoid=[P0])).local_reason == "every prefill worker has failed this request"
    assert refused([D0, P0], wanted(avoid=[D0])).passing
    reborn = replace(D0, incarnation="another-life")
    assert placed([reborn, P0], wanted(avoid=[D0])).decode == reborn


def test_the_worker_with_the_fewest_tokens_ahead_is_chosen_whoever_counted_them() -> None:
    busy = replace(D0, queued_tokens=5)
    assert placed([busy, D1], wanted()).decode == D1
    loads = Loads(decode={D1.incarnation: 6}, prefill={P0.incarnation: 1})
    choice = placed([busy, D1, P0, P1], wanted(), loads)
    assert (choice.decode, choice.prefill) == (busy, P1)


def test_a_tie_goes_to_the_one_with_fewer_requests_then_by_name() -> None:
    assert least_tokens([D1, D0], {}) == D0
    assert least_tokens([replace(D0, running=1), D1], {}) == D1


def test_a_decode_worker_with_room_goes_before_a_smaller_load_without() -> None:
    small = replace(D0, blocks=BlockCounts(total=2, free=2))
    loads = Loads(decode={small.incarnation: 16, D1.incarnation: 100})
    assert placed([small, D1], wanted(prompt=10, new=10), loads).decode == D1


@pytest.mark.parametrize(("prompt", "new", "fits"), [(1, 1, True), (64, 64, True), (64, 65, False), (128, 1, False)])
def test_a_request_longer_than_every_context_is_bad_input(prompt: int, new: int, fits: bool) -> None:
    choice = choose([D0, P0], wanted(prompt, new), Loads(), local_prefill=True)
    assert isinstance(choice, Placement) == fits
    if isinstance(choice, Refusal):
        assert isinstance(choice.error, InvalidArgument)
        assert not choice.passing
        assert f"{prompt} + {new}" in str(choice.error)
        assert "128" in str(choice.error)


@pytest.mark.parametrize(("tokens", "fits"), [(2 * BLOCK - 1, True), (2 * BLOCK, True), (2 * BLOCK + 1, False)])
def test_a_request_larger_than_every_memory_is_bad_input(tokens: int, fits: bool) -> None:
    small = replace(D0, blocks=BlockCounts(total=2))
    choice = choose([small], wanted(tokens - 1, 1), Loads(), local_prefill=True)
    assert isinstance(choice, Placement) == fits
    assert isinstance(choose([small, D1], wanted(tokens - 1, 1), Loads(), local_prefill=True), Placement)


def test_a_worker_that_still_loads_does_not_make_a_request_too_large() -> None:
    loading = replace(D0, state="starting", blocks=BlockCounts())
    assert refused([loading], wanted()).passing


def test_a_prompt_that_fits_no_prefill_worker_is_computed_locally() -> None:
    small = replace(P0, blocks=BlockCounts(total=1))
    assert placed([D0, small], wanted(BLOCK)).prefill == small
    assert placed([D0, small], wanted(BLOCK + 1)).local_reason == "the prompt fits into no prefill worker"


def test_kv_of_other_weights_or_precision_is_never_combined() -> None:
    other = replace(P0, fingerprint="g")
    assert placed([D0, other, P1], wanted()).prefill == P1
    assert placed([D0, other], wanted()).local_reason == "no prefill worker has the same weights and precision"


def test_a_model_is_found_by_name_and_nothing_else_is_offered() -> None:
    other = replace(D1, model="n")
    assert placed([D0, other], wanted(model="n")).decode == other
    assert placed([D0, replace(P0, model="n")], wanted(model="m")).local_reason == "no prefill worker"
    refusal = refused([D0, other], wanted(model="x"))
    assert isinstance(refusal.error, NotFound)
    assert not refusal.passing


def test_an_empty_name_means_the_only_model() -> None:
    assert resolve_model([D0, D1], "") == "m"
    refusal = resolve_model([D0, replace(D1, model="n")], "")
    assert isinstance(refusal, Refusal)
    assert isinstance(refusal.error, InvalidArgument)
    assert "m, n" in str(refusal.error)


def test_policies_are_exchangeable() -> None:
    def last(candidates: Sequence[WorkerRecord], placed: Mapping[str, int]) -> WorkerRecord:
        return candidates[-1]

    choice = choose([D0, D1, P0, P1], wanted(), Loads(), local_prefill=True, policy=last)
    assert choice == Placement(decode=D1, prefill=P1)
