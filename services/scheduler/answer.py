"""Where a request runs, as the scheduler answers it and as the queue remembers it for a repeated call."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from services.cluster.record import WorkerRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """Identity of a worker in an answer."""

    name: str
    address: str
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Where a request runs. `prefill` None: on the decode worker, for `local_reason`."""

    transfer_id: str
    decode: Worker
    prefill: Worker | None
    local_reason: str

    def to_json(self) -> str:
        """The answer as the queue keeps it."""
        return json.dumps(asdict(self))


def worker_of(record: WorkerRecord) -> Worker:
    """The identity in a record."""
    return Worker(name=record.name, address=record.address, incarnation=record.incarnation)


def read_answer(text: str) -> Answer:
    """Reads `Answer.to_json`."""
    fields = json.loads(text)
    prefill = fields["prefill"]
    return Answer(
        transfer_id=fields["transfer_id"],
        decode=Worker(**fields["decode"]),
        prefill=None if prefill is None else Worker(**prefill),
        local_reason=fields["local_reason"],
    )
