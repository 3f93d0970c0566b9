"""Registration and view over a real Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from services.cluster import membership
from services.cluster.embedded import EmbeddedRedis
from services.cluster.membership import BlockCounts, MembershipView, Registration, WorkerRecord
from services.cluster.store import Store

WAIT_S = 10.0


def worker(name: str = "decode-0", **changes: object) -> WorkerRecord:
    fields: dict[str, object] = {
        "name": name,
        "address": f"127.0.0.1:{7000 + sum(name.encode())}",
        "incarnation": f"{sum(name.encode()):016x}",
        "role": "decode",
        "state": "ready",
        "model": "tiny",
        "fingerprint": "tiny-fp32",
        "context_tokens": 128,
        "block_tokens": 16,
        "blocks": BlockCounts(total=32, free=32),
    }
    return WorkerRecord(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store(redis_url)
    yield store
    await store.aclose()


@pytest.fixture
async def view(store: Store) -> AsyncIterator[MembershipView]:
    view = MembershipView(store)
    await view.start()
    async with asyncio.timeout(WAIT_S):
        await view.synced()
    yield view
    await view.aclose()


async def until(view: MembershipView, holds: Callable[[list[WorkerRecord]], bool]) -> list[WorkerRecord]:
    async with asyncio.timeout(WAIT_S):
        while True:
            records = [seen.record for seen in view.workers()]
            if holds(records):
                return records
            await view.changed(0.2)


async def test_a_registered_worker_is_seen_with_every_field_and_gone_after_it_leaves(
    store: Store, view: MembershipView
) -> None:
    record = worker(queued_tokens=5, running=2, waiting=1)
    registration = Registration(store, lambda: record)
    await registration.start()
    assert await until(view, lambda records: len(records) == 1) == [record]
    assert 0 <= view.workers()[0].heartbeat_age_s < membership.TTL_S
    await registration.aclose()
    await until(view, lambda records: not records)


async def test_a_change_of_state_is_seen_long_before_the_next_refresh(
    store: Store, view: MembershipView, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = "starting"
    registration = Registration(store, lambda: worker(state=state))
    await registration.start()
    await until(view, lambda records: [record.state for record in records] == ["starting"])
    monkeypatch.setattr(membership, "REFRESH_S", 3600.0)  # only the announcement can bring the news now
    await until(view, lambda records: True)
    state = "ready"
    await registration.announce()
    await until(view, lambda records: [record.state for record in records] == ["ready"])
    await registration.aclose()


async def test_heartbeats_carry_fresh_numbers(store: Store, view: MembershipView) -> None:
    counts = iter(range(100))
    registration = Registration(store, lambda: worker(running=next(counts)))
    await registration.start()
    await until(view, lambda records: bool(records) and records[0].running >= 2)
    await registration.aclose()


async def test_a_worker_that_stops_beating_expires(
    store: Store, view: MembershipView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(membership, "TTL_S", 0.3)
    registration = Registration(store, worker)
    await registration.start()
    await until(view, lambda records: len(records) == 1)
    await until(view, lambda records: not records)
    await registration.aclose()


async def test_a_new_incarnation_at_the_same_address_replaces_the_old_one_which_stays_away(
    store: Store, view: MembershipView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2."""
    monkeypatch.setattr(membership, "HEARTBEAT_S", 0.02)
    old, new = worker(incarnation="a" * 16), worker(incarnation="b" * 16)
    beats = 0

    def count() -> WorkerRecord:
        nonlocal beats
        beats += 1
        return old

    old_registration, new_registration = Registration(store, count), Registration(store, lambda: new)
    await old_registration.start()
    await new_registration.start()
    replaced_at = beats
    async with asyncio.timeout(WAIT_S):
        while beats < replaced_at + 3:
            await view.changed(0.02)
    assert await until(view, lambda records: len(records) == 1) == [new]
    await old_registration.aclose()  # leaving takes only itself away
    async with asyncio.timeout(WAIT_S):
        await view.changed(1.5)
    assert [seen.record for seen in view.workers()] == [new]
    await new_registration.aclose()


async def test_workers_come_back_by_themselves_after_redis_was_emptied(store: Store, view: MembershipView) -> None:
    registration = Registration(store, worker)
    await registration.start()
    await until(view, lambda records: len(records) == 1)
    await store._run(["FLUSHALL"])
    async with asyncio.timeout(WAIT_S):
        while await store._run(["EXISTS", f"diptych:worker:{worker().incarnation}"]) != 1:
            await view.changed(0.05)
    await until(view, lambda records: len(records) == 1)
    await registration.aclose()


async def test_the_last_known_view_stands_while_redis_is_away_and_everything_comes_back_with_it(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    store = Store(server.start())
    view, registration = MembershipView(store), Registration(store, worker)
    await view.start()
    await registration.start()
    await until(view, lambda records: len(records) == 1)
    server.stop()
    async with asyncio.timeout(WAIT_S):
        while view.connected:
            await view.changed(0.05)
    await registration.announce()
    await registration.announce()
    assert [seen.record for seen in view.workers()] == [worker()]
    outages = [line for line in caplog.messages if line.startswith("heartbeat") and "trying on" in line]
    assert len(outages) == 1, "one line per outage"
    server.start()
    async with asyncio.timeout(WAIT_S):
        while not view.connected:
            await view.changed(0.05)
    await until(view, lambda records: len(records) == 1)
    # The subscription is back too: an announcement is heard without waiting for a refresh.
    await registration.aclose()
    await until(view, lambda records: not records)
    await view.aclose()
    await store.aclose()
    server.stop()


async def test_a_record_of_another_version_is_passed_over_with_a_warning(
    store: Store, view: MembershipView, caplog: pytest.LogCaptureFixture
) -> None:
    good = Registration(store, worker)
    await good.start()
    # In this order: a worker without a record is over, and whoever looks strikes it off.
    await store._run(["SET", f"diptych:worker:{'f' * 16}", '{"role": "conductor"}', "PX", 60000])
    await store._run(["HSET", "diptych:workers", "127.0.0.1:1", "f" * 16])
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(WAIT_S):
            while not any("another version" in line for line in caplog.messages):
                await view.changed(0.05)
    assert [seen.record for seen in view.workers()] == [worker()]
    await good.aclose()
