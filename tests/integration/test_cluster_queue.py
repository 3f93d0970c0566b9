"""The shared lines over a real Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from services.cluster import queue as queue_module
from services.cluster.embedded import EmbeddedRedis
from services.cluster.queue import Admission, Gone, LineState, Placed, Queue
from services.cluster.store import CONNECTIONS, Store, StoreUnavailable
from services.errors import NotAdmitted, WrongState

WAIT_S = 10.0
LIMIT = 8


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store(redis_url)
    yield store
    await store.aclose()


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(store)


def admission(
    request_id: str,
    *,
    attempt: int = 1,
    decode: str = "d0",
    tokens: int = 10,
    bound: int = 100,
    prefill: str = "p0",
    live_s: float = 60.0,
    answer: str = "answer",
) -> Admission:
    return Admission(
        request_id=request_id,
        attempt=attempt,
        decode=decode,
        tokens=tokens,
        bound_tokens=bound,
        prefill=prefill,
        prompt_tokens=tokens,
        live_s=live_s,
        answer=answer,
    )


async def join(
    queue: Queue, request_id: str, attempt: int = 1, call: str = "call", limit: int = LIMIT, model: str = "m"
) -> LineState:
    state = await queue.enqueue(model, request_id, attempt, call, limit)
    assert isinstance(state, LineState)
    return state


async def place(queue: Queue, request_id: str, **changes: object) -> None:
    attempt = changes.get("attempt", 1)
    assert isinstance(attempt, int)
    await join(queue, request_id, attempt)
    assert isinstance(await queue.admit("m", admission(request_id, **changes)), Placed)  # type: ignore[arg-type]


async def test_many_operations_at_once_share_few_connections(queue: Queue, store: Store) -> None:
    await asyncio.gather(*(queue.refresh("m", []) for _ in range(200)))
    assert 1 < (await store._client.info("clients"))["connected_clients"] <= CONNECTIONS


async def test_a_redis_that_hangs_ends_operations_that_have_no_connection_yet(
    redis_server: EmbeddedRedis, queue: Queue
) -> None:
    await queue.refresh("m", [])
    assert redis_server.pid is not None
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(WAIT_S):
            ended = await asyncio.gather(*(queue.refresh("m", []) for _ in range(200)), return_exceptions=True)
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    assert all(isinstance(one, StoreUnavailable) for one in ended)
    assert (await queue.refresh("m", []))[0].head == ""


async def test_an_empty_line_has_no_head(queue: Queue) -> None:
    state, gone = await queue.refresh("m", [])
    assert state == LineState(head="", length=0, decode_tokens={}, recent=())
    assert gone == frozenset()


async def test_requests_are_admitted_in_the_order_in_which_they_came(queue: Queue) -> None:
    for name in ("c", "a", "b"):
        await join(queue, name)
    assert isinstance(await queue.admit("m", admission("a")), LineState), "not the head yet"
    for name in ("c", "a", "b"):
        state, _ = await queue.refresh("m", [])
        assert state.head == name
        assert isinstance(await queue.admit("m", admission(name)), Placed)
    state, _ = await queue.refresh("m", [])
    assert (state.length, state.decode_tokens) == (0, {"d0": 30})


async def test_asking_again_keeps_the_place_in_line(queue: Queue) -> None:
    await join(queue, "a")
    await join(queue, "b")
    state = await join(queue, "a", call="another")
    assert (state.head, state.length) == ("a", 2)


async def test_asking_again_after_the_placement_gets_the_same_answer(queue: Queue) -> None:
    await place(queue, "a", answer="first")
    assert await queue.enqueue("m", "a", 1, "call", LIMIT) == Placed(answer="first")
    with pytest.raises(Gone):
        await queue.admit("m", admission("a", answer="second"))
    state, _ = await queue.refresh("m", [])
    assert state.decode_tokens == {"d0": 10}, "counted once"


async def test_a_new_attempt_gives_the_old_placement_back_and_keeps_its_place_before_later_requests(
    queue: Queue,
) -> None:
    await place(queue, "a", tokens=40)
    await join(queue, "b")
    state = await join(queue, "a", attempt=2)
    assert state.head == "a"
    assert state.decode_tokens == {}
    await queue.admit("m", admission("a", attempt=2, decode="d1"))
    with pytest.raises(WrongState, match="later attempt"):
        await queue.enqueue("m", "a", 1, "call", LIMIT)


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_a_full_line_refuses_and_says_when_to_try_again(queue: Queue, limit: int) -> None:
    for index in range(limit):
        await join(queue, f"r{index}", limit=limit)
    with pytest.raises(NotAdmitted, match=f"{limit} requests are waiting") as refusal:
        await queue.enqueue("m", "late", 1, "call", limit)
    assert refusal.value.retry_after_s > 0
    if limit:
        await join(queue, "r0", limit=limit)  # who is in line already is not refused


async def test_lines_of_two_models_do_not_wait_for_each_other(queue: Queue) -> None:
    await join(queue, "a", model="m")
    state = await join(queue, "b", model="n")
    assert state.head == "b"


@pytest.mark.parametrize(
    ("load", "tokens", "admitted"), [(0, 1000, True), (60, 40, True), (60, 41, False), (100, 1, False)]
)
async def test_admission_keeps_to_the_bound_but_a_single_request_always_fits(
    queue: Queue, load: int, tokens: int, admitted: bool
) -> None:
    if load:
        await place(queue, "before", tokens=load)
    await join(queue, "a")
    outcome = await queue.admit("m", admission("a", tokens=tokens, bound=100))
    assert isinstance(outcome, Placed) == admitted


async def test_finish_frees_what_was_counted_and_is_idempotent(queue: Queue) -> None:
    await place(queue, "a", tokens=10)
    await place(queue, "b", tokens=5)
    for _ in range(2):
        await queue.finish("a")
    await queue.finish("unknown")
    state, _ = await queue.refresh("m", [])
    assert state.decode_tokens == {"d0": 5}
    await queue.finish("b")
    state, _ = await queue.refresh("m", [])
    assert state.decode_tokens == {}


async def test_a_placement_can_be_taken_back_by_its_answer_alone(queue: Queue) -> None:
    await place(queue, "a", answer="mine")
    await queue.finish("a", "another's")
    assert await queue.enqueue("m", "a", 1, "call", LIMIT) == Placed(answer="mine")
    await queue.finish("a", "mine")
    assert (await queue.refresh("m", []))[0].decode_tokens == {}


async def test_only_the_call_that_waits_takes_a_request_out_of_the_line(queue: Queue) -> None:
    await join(queue, "a", call="old")
    await join(queue, "a", call="new")
    await queue.leave("m", "a", "old")
    assert (await queue.refresh("m", ["a"]))[1] == frozenset()
    await queue.leave("m", "a", "new")
    state, gone = await queue.refresh("m", ["a"])
    assert (state.length, gone) == (0, frozenset({"a"}))


async def test_a_waiter_that_nobody_refreshes_leaves_the_head_to_the_next(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "WAITER_TTL_S", 0.05)
    await join(queue, "dead")
    monkeypatch.setattr(queue_module, "WAITER_TTL_S", 60.0)
    await join(queue, "alive")
    async with asyncio.timeout(WAIT_S):
        while (await queue.refresh("m", ["alive"]))[0].head != "alive":
            pass
    with pytest.raises(Gone):
        await queue.admit("m", admission("dead"))


async def test_a_placement_that_nobody_finishes_is_forgotten_when_its_time_is_over(queue: Queue) -> None:
    await place(queue, "a", live_s=0.05)
    async with asyncio.timeout(WAIT_S):
        while (await queue.refresh("m", []))[0].decode_tokens:
            pass
    assert isinstance(await queue.enqueue("m", "a", 1, "call", LIMIT), LineState)


async def test_placements_on_a_worker_without_work_can_be_forgotten_unless_they_are_young(queue: Queue) -> None:
    await place(queue, "a", decode="d0")
    await place(queue, "b", decode="d1")
    assert await queue.forget(["d0"], older_than_s=60.0) == 0
    async with asyncio.timeout(WAIT_S):
        while await queue.forget(["d0"], older_than_s=0.001) != 1:
            pass
    state, _ = await queue.refresh("m", [])
    assert state.decode_tokens == {"d1": 10}


async def test_prompts_just_placed_are_told_with_their_age(queue: Queue) -> None:
    await place(queue, "a request with spaces", tokens=7, prefill="p0")
    await place(queue, "local", prefill="")
    state, _ = await queue.refresh("m", [])
    assert [(prompt.prefill, prompt.prompt_tokens) for prompt in state.recent] == [("p0", 7)]
    assert 0 <= state.recent[0].age_s < 3


async def test_what_is_told_of_prompts_does_not_grow_with_their_number(queue: Queue) -> None:
    for index in range(300):
        await place(queue, f"r{index}", tokens=5, bound=10_000, prefill=f"p{index % 2}")
        await queue.finish(f"r{index}")
    state, _ = await queue.refresh("m", [])
    assert len(state.recent) <= 2 * 31  # of each worker one for a tenth of a second, for 3 s
    assert 0 < sum(prompts.prompt_tokens for prompts in state.recent) <= 300 * 5


async def test_prompts_of_one_moment_are_told_together_and_not_for_long(queue: Queue) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:  # until both fell into the same tenth of a second
            for request_id in ("a", "b"):
                await place(queue, request_id, tokens=5, prefill="p0")
                await queue.finish(request_id)
            if 10 in (told := [prompts.prompt_tokens for prompts in (await queue.refresh("m", []))[0].recent]):
                break
        assert sum(told) % 10 == 0
        while (await queue.refresh("m", []))[0].recent:
            pass


async def test_a_listener_hears_when_the_head_may_go(store: Store, queue: Queue) -> None:
    await place(queue, "a")
    changes = queue.changes()
    async with asyncio.timeout(WAIT_S):
        await anext(changes)  # subscribed
        await Queue(store).finish("a")
        await anext(changes)
    await changes.aclose()  # type: ignore[attr-defined]


async def test_an_emptied_redis_forgets_the_line_and_the_waiter_hears_of_it(store: Store, queue: Queue) -> None:
    await join(queue, "a")
    await store._run(["FLUSHALL"])
    assert (await queue.refresh("m", ["a"]))[1] == frozenset({"a"})
    assert (await join(queue, "a")).head == "a"


async def test_nothing_stays_in_redis_when_all_is_over(store: Store, queue: Queue) -> None:
    await place(queue, "a", prefill="")
    await join(queue, "b")
    await queue.leave("m", "b", "call")
    await queue.finish("a")
    assert await store._run(["DBSIZE"]) == 1, "only the sequence"
