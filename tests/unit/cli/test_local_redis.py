from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from services.cli.local_redis import STALE_AFTER_S, LocalRedis, remove_stale_folders
from services.errors import StartError


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def kill(redis: LocalRedis) -> None:
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGKILL)
    os.waitid(os.P_PID, redis.pid, os.WEXITED | os.WNOWAIT)  # it is for revive() to reap it


def test_a_server_that_died_comes_back_at_the_same_url_and_leaves_nothing() -> None:
    clock = Clock()
    redis = LocalRedis(clock=clock)
    path = Path(redis.start().removeprefix("unix://"))
    try:
        first = redis.pid
        redis.revive()
        assert redis.pid == first
        kill(redis)
        redis.revive()  # notices; the pause begins
        assert redis.pid is None
        clock.now_s += 5
        redis.revive()
        assert redis.pid not in (None, first)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            assert connection.recv(16) == b"+PONG\r\n"
    finally:
        redis.stop()
    assert redis.pid is None
    assert not path.parent.exists()


def test_a_server_that_dies_again_and_again_is_given_up() -> None:
    clock = Clock()
    redis = LocalRedis(clock=clock)
    redis.start()
    try:
        with pytest.raises(StartError, match="redis died too often"):
            for _ in range(5):
                kill(redis)
                redis.revive()
                clock.now_s += 5
                redis.revive()
    finally:
        redis.stop()


def test_without_an_embedded_server_there_is_nothing_to_revive() -> None:
    redis = LocalRedis()
    redis.revive()
    redis.stop()
    assert redis.pid is None


def test_only_old_folders_in_which_nobody_answers_are_removed(tmp_path: Path) -> None:
    old_s = time.time() - STALE_AFTER_S - 10
    folders = {name: tmp_path / name for name in ("diptych-redis-dead", "diptych-redis-alive", "other-old")}
    for folder in folders.values():
        folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folders["diptych-redis-alive"] / "redis.sock"))
        server.listen(1)
        for folder in folders.values():
            os.utime(folder, (old_s, old_s))
        (tmp_path / "diptych-redis-young").mkdir()
        remove_stale_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "diptych-redis-alive",
        "diptych-redis-young",
        "other-old",
    ]
