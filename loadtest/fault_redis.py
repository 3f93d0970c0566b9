"""The rows in which Redis is away: whole workers, in one mesh, with an own Redis that ends and comes back empty.

Life of a row here: a request is sent → once prefill computes (row of the sender) or decode decodes (the receiver's)
Redis ends → the answer is read to its end, and Redis stays away for longer than a heartbeat lives → an empty Redis
comes back → the workers are there again and hold nothing → the same question has the same answer, and another one,
whose KV nobody has, is answered.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from loadtest.fault_run import Outcome, RowFailed
from loadtest.fault_table import Row, Side
from services.cli.launch import LaunchedMesh, launched
from services.cluster.embedded import EmbeddedRedis

AWAY_S: Final = 5.0
PROMPT_TOKENS: Final = 400
ANSWER_TOKENS: Final = {Side.SENDER: 8, Side.RECEIVER: 60}
BACK_S: Final = 15.0
"""Within this of Redis's return the workers are known again and hold nothing."""

_PLACED_S: Final = 0.4
_LIMIT_S: Final = 60.0
_MESH: Final = ("--prefill=1", "--decode=1", "--dtype=fp32", "--chunk-tokens=16", "--log-level=error")


def run_redis_rows(rows: Sequence[Row]) -> list[Outcome]:
    """Runs them one after the other. StartError: the mesh does not start."""
    if not rows:
        return []
    with tempfile.TemporaryDirectory(prefix="diptych-faults-") as folder:
        redis = EmbeddedRedis(Path(folder))
        url = redis.start()
        try:
            with launched([f"--redis={url}", *_MESH]) as mesh:
                return [_run_row(row, mesh, redis) for row in rows]
        finally:
            redis.stop()


def _run_row(row: Row, mesh: LaunchedMesh, redis: EmbeddedRedis) -> Outcome:
    begin_s = time.monotonic()
    settled_s: dict[str, float] = {}
    error = ""
    try:
        settled_s[row.victim.value] = _redis_away(row, mesh, redis)
    except (RowFailed, httpx.HTTPError) as failed:
        error = f"{type(failed).__name__}: {failed}"
    return Outcome(
        row=row,
        pull="" if error else "good",
        settled_s=settled_s,
        duration_s=time.monotonic() - begin_s,
        error=error,
    )


def _redis_away(row: Row, mesh: LaunchedMesh, redis: EmbeddedRedis) -> float:
    """One row; returns how long after Redis's return all was well."""
    asked = _Question(seed=random.Random(row.name).getrandbits(30), max_tokens=ANSWER_TOKENS[row.victim])
    ended_s = 0.0

    def end_redis() -> None:
        nonlocal ended_s
        redis.stop()
        ended_s = time.monotonic()

    text, first_s = _ask(mesh, asked, end_redis, while_computing=row.victim is Side.SENDER)
    if not ended_s or (row.victim is Side.SENDER and first_s < ended_s):
        raise RowFailed("the prompt was computed before Redis was away: this shows nothing")
    time.sleep(max(0.0, ended_s + AWAY_S - time.monotonic()))
    redis.start()
    back_s = time.monotonic()
    _await_all_free(mesh, back_s)
    settled_s = time.monotonic() - back_s
    for question, expected in ((asked, text), (_Question(seed=asked.seed + 1, max_tokens=4), None)):
        answer, _ = _ask(mesh, question, lambda: None, while_computing=False)
        if not answer or (expected is not None and answer != expected):
            raise RowFailed(f"afterwards the answer is {answer!r} instead of {expected!r}")
    return settled_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    seed: int
    max_tokens: int

    def body(self) -> dict[str, object]:
        prompt = random.Random(self.seed).choices(range(1000, 40_000), k=PROMPT_TOKENS)
        options = {"stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": self.max_tokens}
        return {"model": "smollm2-135m-instruct", "prompt": prompt, **options}


def _ask(
    mesh: LaunchedMesh, question: _Question, act: Callable[[], None], *, while_computing: bool
) -> tuple[str, float]:
    """Asks, lets `act` happen while the prompt is computed or else after the first tokens, and reads on. Returns the
    whole text, and when the first of it came. RowFailed: there was no whole answer.
    """
    pieces: list[str] = []
    first_s = 0.0
    timer = threading.Timer(_PLACED_S, act)
    if while_computing:
        timer.start()
    url = f"{mesh.http}/v1/completions"
    with (
        httpx.Client(timeout=_LIMIT_S, trust_env=False) as client,
        client.stream("POST", url, json=question.body()) as reply,
    ):
        if reply.status_code != httpx.codes.OK:
            raise RowFailed(f"the request failed with status {reply.status_code}: {reply.read().decode()}")
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RowFailed(f"the request failed: {event['error']}")
            pieces.append(event["choices"][0]["text"])
            first_s = first_s or time.monotonic()
            if not while_computing and len(pieces) == 2:
                act()
    if while_computing:
        timer.join()
    return "".join(pieces), first_s


def _await_all_free(mesh: LaunchedMesh, back_s: float) -> None:
    """RowFailed: BACK_S after Redis's return at `back_s` a worker has not been heard of again, or still holds blocks.

    What the scheduler remembers from before shows by its age.
    """
    command = [sys.executable, "-m", "services.cli", "workers", "--json", f"--scheduler={mesh.scheduler}"]
    shown = ""
    while (since_s := time.monotonic() - back_s) < BACK_S:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False).stdout
        workers = json.loads(shown)["workers"] if shown else []
        idle = [each for each in workers if each["blocks_free"] == each["blocks_total"]]
        if len(idle) == len(workers) == 2 and all(each["heartbeat_age_s"] < since_s for each in workers):
            return
    raise RowFailed(f"{BACK_S:.0f} s after Redis's return the workers are: {shown}")
