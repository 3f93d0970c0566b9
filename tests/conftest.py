"""Fixtures that more than one part needs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests start processes from a process that uses gRPC. Its fork handlers abort some of the children; nothing here uses
# gRPC between fork and exec, so they are not needed. Must be set before gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from services.cluster.embedded import EmbeddedRedis


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests are given the longest limits come first: a worker of pytest-xdist that begins a long file last
    leaves the others idle.
    """
    limits_s: Counter[Path] = Counter()
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits_s[item.path] += mark.args[0] if mark else 0
    items.sort(key=lambda item: -limits_s[item.path])


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    """A private, empty, started Redis that the test may stop."""
    server = EmbeddedRedis()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """URL of a private, empty Redis; each test has its own."""
    return f"unix://{redis_server.folder}/redis.sock"
