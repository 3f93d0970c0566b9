"""The worker record as text, and URLs as people see them."""

from __future__ import annotations

import json

import pytest

from services.cluster.record import MAX_LINKS, BlockCounts, Link, WorkerRecord, from_json
from services.cluster.store import Store, hide_password, strings
from services.errors import StartError
from services.latency import Latency, PrefillFit, StepFit

RECORD = WorkerRecord(
    name="decode-0",
    address="127.0.0.1:7000",
    incarnation="0123456789abcdef",
    role="decode",
    state="ready",
    model="größe/模型",
    fingerprint="f",
    context_tokens=2048,
    block_tokens=16,
    blocks=BlockCounts(total=10, free=4, held=3, leased=2, swapped=1, cached=3, host=5),
    queued_tokens=7,
    running=2,
    waiting=1,
    swapped=1,
    levels=(2, 0, 1),
    schedule="auto (mlfq)",
    latency=Latency(
        prefill=PrefillFit(a_s=0.01, b_s=1e-3, c_s=0.0, chunk_tokens=256, error=0.1, steps=12),
        step=StepFit(a_s=0.02, b_s=1e-6, c_s=1e-3, error=0.05, steps=300),
    ),
    links=(
        Link(
            peer="prefill-0",
            peer_incarnation="fedcba9876543210",
            transport="ucx",
            lanes="tcp/lo",
            bytes_per_s=1.5e9,
            round_trip_s=3e-4,
            warning="plain TCP",
        ),
        Link(peer="prefill-1", peer_incarnation="0", error="nobody there"),
    ),
)


def test_a_record_survives_being_text() -> None:
    assert from_json(RECORD.to_json()) == RECORD


def test_a_worker_holds_what_its_pool_holds_and_may_be_given_what_gives_way_to_the_host() -> None:
    assert RECORD.capacity_tokens == (10 - 1) * 16
    assert RECORD.placed_tokens == (10 - 1 + 5) * 16


def test_fields_of_a_later_version_are_passed_over() -> None:
    fields = json.loads(RECORD.to_json())
    fields["mood"] = "cheerful"
    assert from_json(json.dumps(fields)) == RECORD


def test_a_worker_that_says_nothing_about_its_speed_is_one_that_does_not_know_it() -> None:
    fields = json.loads(RECORD.to_json())
    del fields["latency"]
    assert from_json(json.dumps(fields)).latency == Latency()


def test_a_worker_that_names_no_links_has_none_and_more_than_enough_are_cut() -> None:
    fields = json.loads(RECORD.to_json())
    fields["links"] = fields["links"][:1] * (MAX_LINKS + 1)
    assert len(from_json(json.dumps(fields)).links) == MAX_LINKS
    del fields["links"]
    assert from_json(json.dumps(fields)).links == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, True, "fast", None])
def test_a_link_without_a_finite_bandwidth_is_refused(value: object) -> None:
    fields = json.loads(RECORD.to_json())
    fields["links"][0]["bytes_per_s"] = value
    with pytest.raises(ValueError, match="bytes_per_s"):
        from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("role", "conductor"),
        ("state", None),
        ("name", 3),
        ("blocks", []),
        ("blocks", {"total": 1}),
        ("running", -1),
        ("levels", [1, "two"]),
        ("schedule", None),
        ("running", True),
        ("context_tokens", "many"),
        ("latency", "fast"),
        ("links", "many"),
        ("links", [1]),
        ("links", [{"peer": "prefill-0"}]),
        ("latency", {"step": {"a_s": 1.0}}),
    ],
)
def test_a_record_that_is_none_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError):
        from_json(json.dumps(json.loads(RECORD.to_json()) | {field: value}))


@pytest.mark.parametrize("text", ["", "[]", "null", "{"])
def test_text_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_json(text)


@pytest.mark.parametrize(("running", "waiting", "idle"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_a_worker_with_any_request_is_not_idle(running: int, waiting: int, idle: bool) -> None:
    fields = json.loads(RECORD.to_json()) | {"running": running, "waiting": waiting}
    assert from_json(json.dumps(fields)).idle == idle


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:secret@h:1/0", "redis://:***@h:1/0"),
        ("rediss://me:se@cret@h:1", "rediss://me:***@h:1"),
        ("unix:///tmp/x.sock", "unix:///tmp/x.sock"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown


@pytest.mark.parametrize("url", ["", "localhost", "http://h:1", "redis://h:port"])
def test_a_url_of_another_kind_refuses_to_start(url: str) -> None:
    with pytest.raises(StartError, match="redis: "):
        Store(url)


def test_a_reply_that_is_no_list_is_a_defect() -> None:
    assert strings([1, "a"]) == ["1", "a"]
    with pytest.raises(TypeError):
        strings("OK")
