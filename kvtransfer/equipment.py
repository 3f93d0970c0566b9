"""What every transfer of one side shares."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.coder import Coder
from kvtransfer.copying import CopyThread
from kvtransfer.device import Arena
from kvtransfer.lease import Clock
from kvtransfer.staging import StagingPool
from kvtransfer.transport.base import Endpoint, Operation, Transport, drain


@dataclass(frozen=True, kw_only=True, slots=True)
class Equipment:
    """The transport, the arena, and what moves bytes between the two. `coder` is used on the copy thread only."""

    transport: Transport
    arena: Arena
    coder: Coder
    staging: StagingPool
    copies: CopyThread
    clock: Clock

    async def drain(self, endpoint: Endpoint, operations: list[Operation]) -> bool:
        """Lets given-up operations resolve; aborts the endpoint when they do not. False: some never did."""
        return await drain(endpoint, operations, self.transport.counters)
