"""Who this worker is, and whether a call means it."""

from __future__ import annotations

import secrets

from diptych.v1 import worker_pb2

from services.errors import WrongState


class Identity:
    """One life of a worker process: name, address, and an incarnation drawn at start. `draining` refuses new work."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.incarnation = secrets.token_hex(8)
        self.draining = False

    def require(self, meant: worker_pb2.WorkerRef) -> None:
        """Raises WrongState when a call means another incarnation than this one."""
        if meant.incarnation != self.incarnation:
            raise WrongState(
                f"{self.name}: incarnation {meant.incarnation or '(none)'} was meant, this is {self.incarnation}"
            )

    def require_work(self, meant: worker_pb2.WorkerRef) -> None:
        """Raises WrongState when new work is not for this incarnation, or it takes no more."""
        self.require(meant)
        if self.draining:
            raise WrongState(f"{self.name} is draining and takes no new work")
