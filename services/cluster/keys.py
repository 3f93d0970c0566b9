"""Every Redis key and channel there is. All begin with `diptych:`; nothing is found by scanning.

Workers write through membership.Registration; schedulers, and decode workers for their peers, read through
membership.MembershipView; schedulers keep the lines through queue.Queue. <i> is an incarnation, <m> a served model
name. Times are milliseconds of the Redis server's clock.

| key                      | type   | TTL  | content                                     | writer    | reader    |
| ------------------------ | ------ | ---- | ------------------------------------------- | --------- | --------- |
| diptych:workers          | hash   | 60 s | address → incarnation that lives there now  | worker    | both      |
| diptych:worker:<i>       | string | 3 s  | WorkerRecord as JSON; gone = worker is dead | worker    | both      |
| diptych:line:<m>         | zset   | none | waiting request → place in line             | scheduler | scheduler |
| diptych:line:<m>:alive   | zset   | none | waiting request → time its waiter is dead   | scheduler | scheduler |
| diptych:line:<m>:owner   | hash   | none | waiting request → the call that waits       | scheduler | scheduler |
| diptych:sequence         | string | none | places in line given out so far             | scheduler | scheduler |
| diptych:placed           | hash   | none | placed request → its placement as JSON      | scheduler | scheduler |
| diptych:placed:expiry    | zset   | none | placed request → time it is forgotten       | scheduler | scheduler |
| diptych:load             | hash   | none | decode incarnation → tokens placed on it    | scheduler | scheduler |
| diptych:recent:tokens    | hash   | 3 s  | "<prefill i> time placed" → prompts' tokens | scheduler | scheduler |

Keys without a TTL are emptied by every use of the queue: waiters that are dead, placements that have expired.

| channel                  | says                                   | publisher | subscriber |
| ------------------------ | -------------------------------------- | --------- | ---------- |
| diptych:workers:changed  | a worker came, went or changed state   | worker    | both       |
| diptych:line:changed     | the head of a line may go now          | scheduler | scheduler  |

A message carries nothing: it only says that reading again is worthwhile.
"""

from __future__ import annotations

WORKERS = "diptych:workers"
WORKERS_CHANGED = "diptych:workers:changed"
WORKER_PREFIX = "diptych:worker:"

LINE_CHANGED = "diptych:line:changed"
SEQUENCE = "diptych:sequence"
PLACED = "diptych:placed"
PLACED_EXPIRY = "diptych:placed:expiry"
LOAD = "diptych:load"
RECENT = "diptych:recent:tokens"


def worker(incarnation: str) -> str:
    """Key of one worker's record."""
    return WORKER_PREFIX + incarnation


def line(model: str) -> str:
    """Key of the line of a model."""
    return f"diptych:line:{model}"


def line_alive(model: str) -> str:
    """Key of the times until which the waiters in a line count as alive."""
    return f"diptych:line:{model}:alive"


def line_owner(model: str) -> str:
    """Key of the calls that wait in a line."""
    return f"diptych:line:{model}:owner"
