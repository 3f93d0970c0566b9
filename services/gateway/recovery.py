"""Whether a request whose leg was lost is placed again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.placement import LegFailed, Worker

MAX_PLACEMENTS = 3
MAX_PLACEMENTS_BEFORE_FIRST_TOKEN = 2


@dataclass(kw_only=True)
class Recovery:
    """The lost placements of one request."""

    avoid: list[Worker] = field(default_factory=list)

    def again(self, failed: LegFailed, *, started: bool) -> bool:
        """Notes the loss; says whether another placement is tried. `started`: the client has tokens already.

        Before the first token one retry at most: a request that kills its workers must not go round the mesh.
        """
        self.avoid.append(failed.blamed)
        limit = MAX_PLACEMENTS if started else MAX_PLACEMENTS_BEFORE_FIRST_TOKEN
        return failed.error.retryable and len(self.avoid) < limit
