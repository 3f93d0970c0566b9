"""The events of a request on their way to its client: what waits is joined, and never across answers."""

from __future__ import annotations

import asyncio

import pytest

from services.errors import DiptychError
from services.gateway.door import EventStream
from services.gateway.generate import Event
from services.gateway.placement import Finish, Usage

FINISH = Finish(reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0))


def event(index: int, text: str, finish: Finish | None = None) -> Event:
    return Event(index=index, text=text, token_ids=[ord(char) for char in text], finish=finish)


Seen = tuple[int, str, bool]  # answer, text, whether it was the last of the answer


async def delivered(*events: Event, error: DiptychError | None = None) -> list[Seen]:
    """What a client that was slow gets of these events; raises `error` at the end."""

    async def work() -> None:
        if error is not None:
            raise error

    stream = EventStream("r")
    for one in events:
        stream.emit(one)
    task = asyncio.create_task(work())
    stream.follow(task)
    await asyncio.wait([task])
    await asyncio.sleep(0)  # the end of the task is noted in the loop's next round
    seen = []
    async for one in stream:
        assert list(one.token_ids) == [ord(char) for char in one.text]
        seen.append((one.index, one.text, one.finish is not None))
    return seen


async def test_waiting_events_of_one_answer_come_as_one_with_its_finish() -> None:
    assert await delivered(event(0, "a"), event(0, "b"), event(0, "c", FINISH)) == [(0, "abc", True)]


async def test_events_of_different_answers_stay_apart_and_in_order() -> None:
    sent = [event(0, "a"), event(1, "b"), event(1, "c"), event(0, "d", FINISH), event(2, "e"), event(1, "f", FINISH)]
    assert await delivered(*sent) == [
        (0, "a", False),
        (1, "bc", False),
        (0, "d", True),
        (2, "e", False),
        (1, "f", True),
    ]


async def test_nothing_is_joined_behind_a_finish() -> None:
    sent = [event(0, "a", FINISH), event(1, "b"), event(1, "c", FINISH)]
    assert await delivered(*sent) == [(0, "a", True), (1, "bc", True)]


async def test_an_error_comes_behind_what_was_sent_before_it() -> None:
    stream_error = DiptychError("lost")
    with pytest.raises(DiptychError, match="lost"):
        await delivered(event(0, "a"), event(1, "b"), error=stream_error)


async def test_the_end_stays_the_end() -> None:
    stream = EventStream("r")
    task = asyncio.create_task(asyncio.sleep(0))
    stream.follow(task)
    for _ in range(3):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


def test_the_usage_of_all_answers_is_the_sum() -> None:
    first = Usage(prompt_tokens=7, completion_tokens=2, cached_tokens=3)
    other = Usage(prompt_tokens=0, completion_tokens=5, cached_tokens=0)
    assert Usage.of_all([first, other, other]) == Usage(prompt_tokens=7, completion_tokens=12, cached_tokens=3)
