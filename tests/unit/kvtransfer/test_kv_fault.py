"""Faults as text, and the time that bytes take on a link."""

from __future__ import annotations

import random

import pytest

from kvtransfer.token_bucket import LATENESS_S, TokenBucket
from kvtransfer.transport.fault import Fault, parse_fault

GIGABIT = 125_000_000.0  # bytes a second


def test_nothing_said_is_no_fault():
    assert parse_fault("") == Fault()


def test_every_part_is_read_with_its_unit():
    fault = parse_fault("rate=1.5Gbit,delay=5ms,reorder=200us,cut-after=3MB,cut-in=2MiB,drop-ack=2,seed=9")
    assert fault == Fault(
        bytes_per_s=187_500_000,
        delay_s=0.005,
        reorder_s=pytest.approx(0.0002),
        cut_after_bytes=3_000_000,
        cut_in_bytes=2 << 20,
        dropped_acknowledgements=2,
        seed=9,
    )


@pytest.mark.parametrize(("text", "expected"), [("100Mbit", 12.5e6), ("8kbit", 1e3), ("8bit", 1.0)])
def test_rates_are_in_bits_a_second(text, expected):
    assert parse_fault(f"rate={text}").bytes_per_s == expected


def test_a_cut_may_come_before_the_first_byte():
    assert parse_fault("cut-after=0B").cut_after_bytes == 0


@pytest.mark.parametrize(
    "text",
    [
        *("rate", "rate=", "rate=1", "rate=Gbit", "rate=1GB", "rate=0Gbit", "rate=1e9bit"),
        *("delay=-5ms", "delay=5", "delay=1.2.3s", "delay=²s", "delay=1s,delay=2s", "cut-after=3Mbit"),
        *("drop-ack=1.5", "drop-ack=yes", "drop-ack=", "seed=1s", "loss=1"),
    ],
)
def test_what_cannot_be_understood_is_named(text):
    with pytest.raises(ValueError, match=text.partition("=")[0]):
        parse_fault(text)


def test_a_message_is_through_when_its_last_byte_is():
    assert TokenBucket(GIGABIT).reserve(3_000_000, 10.0) == pytest.approx(10.024)


def test_messages_at_once_follow_one_another():
    bucket = TokenBucket(1000.0)
    assert [bucket.reserve(100, 5.0) for _ in range(3)] == pytest.approx([5.1, 5.2, 5.3])


def test_an_idle_link_saves_nothing_up():
    bucket = TokenBucket(1000.0)
    bucket.reserve(100, 0.0)
    assert bucket.reserve(100, 50.0) == pytest.approx(50.1)


def test_a_sender_that_a_timer_held_up_loses_no_link_time():
    """A sender of one message at a time, woken late each time: without the allowance it would get 1/(1 + lateness)."""
    bucket, chance, now_s = TokenBucket(GIGABIT), random.Random(1), 0.0
    for _ in range(1000):
        now_s = bucket.reserve(3_000_000, now_s) + chance.uniform(0.0, LATENESS_S * 0.99)
    assert now_s == pytest.approx(1000 * 0.024, rel=0.001)


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_link_without_a_rate_is_refused(rate):
    with pytest.raises(ValueError, match="bytes_per_s"):
        TokenBucket(rate)
