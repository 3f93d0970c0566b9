"""What is flat and what is not."""

from __future__ import annotations

import os

import psutil
import pytest

from loadtest.flatness import Sample, growth, take


def samples(count: int = 50, *, fds=lambda i: 10, rss=lambda i: 100_000_000) -> list[Sample]:
    return [
        Sample(transfers=100 * i, descriptors=fds(i), sockets=3, threads=7, rss_bytes=int(rss(i))) for i in range(count)
    ]


def test_a_process_that_stays_as_it_is_has_grown_by_nothing() -> None:
    grown = growth(samples())
    assert (grown.descriptors, grown.sockets, grown.threads, grown.rss_bytes_per_transfer) == (0, 0, 0, 0.0)
    assert grown.problems(0.0) == []


def test_what_comes_during_the_warm_up_does_not_count() -> None:
    grown = growth(samples(fds=lambda i: min(10, i), rss=lambda i: 1e6 * min(10, i)))
    assert grown.problems(0.0) == []


def test_a_peak_in_between_is_no_growth() -> None:
    assert growth(samples(fds=lambda i: 10 + 5 * (i == 30), rss=lambda i: 1e8 + 1e7 * (i % 10 == 0))).problems(1) == []


def test_a_little_more_for_each_transfer_is_seen() -> None:
    grown = growth(samples(rss=lambda i: 1e8 + 300 * 100 * i + 1e5 * (i % 3)))
    assert grown.rss_bytes_per_transfer == pytest.approx(300, rel=0.01)
    assert grown.problems(299) == ["300 B more for each transfer"]
    assert grown.problems(310) == []


def test_one_descriptor_that_stays_is_seen() -> None:
    assert growth(samples(fds=lambda i: 10 + (i > 30))).problems(0.0) == ["1 descriptors more"]


@pytest.mark.parametrize(("count", "enough"), [(0, False), (8, False), (9, True)])
def test_too_few_samples_say_nothing(count: int, enough: bool) -> None:
    if enough:
        growth(samples(count))
        return
    with pytest.raises(ValueError, match="too few"):
        growth(samples(count))


def test_a_sample_sees_a_descriptor_that_is_opened() -> None:
    process = psutil.Process()
    before = take(process, 1)
    reading, writing = os.pipe()
    try:
        after = take(process, 2)
    finally:
        os.close(reading)
        os.close(writing)
    assert after.descriptors == before.descriptors + 2
    assert after.rss_bytes > 1_000_000
