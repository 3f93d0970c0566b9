"""Shares of tenants: how much each was served, and who is next inside a level.

Two clocks of tokens, each divided by the tenant's weight:

served    per tenant, over all levels, as the virtual token counter of Sheng et al., "Fairness in Serving Large Language
          Models" (OSDI 2024). The fair clock runs with what is served ÷ the weights of all tenants that have requests
          here. Who comes back is lifted to it: idle time saves nothing up. A tenant whose own clock is behind the fair
          one gets less than its share.
tag       per level, the start tag of start-time fair queueing (Goyal et al., SIGCOMM 1996): a request enters a level
          with the tag max(level's clock, tenant's last finish tag), and its tenant's finish tag goes 1 ÷ weight beyond
          that: one quantum. With one tenant, or none waiting, that is first in, first out. A request with the n-th tag
          of its tenant is passed by at most Σₖ(wₖ·n ÷ w + 1) requests of the others, however many they send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.schedule.ranked import RankedQueue

SLACK_TOKENS: Final = 32.0
"""Being behind by less is the granularity of steps."""
LEAD_QUANTA: Final = 8.0
"""How many quanta of its own tenant a request passes for each unit of priority."""


@dataclass(slots=True)
class _Account:
    weight: float
    served: float  # tokens ÷ weight
    requests: int = 0


class Shares:
    """The clocks of what was served."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}  # of tenants that live here
        self._ahead: dict[str, float] = {}  # clocks of tenants that left ahead of the fair one
        self._weights = 0.0
        self._fair = 0.0

    def join(self, tenant: str, weight: float) -> None:
        """One more request of the tenant, with what its weight is now."""
        account = self._accounts.get(tenant)
        if account is None:
            served = max(self._ahead.pop(tenant, 0.0), self._fair)
            account = self._accounts[tenant] = _Account(weight=weight, served=served)
            self._weights += weight
        elif account.weight != weight:
            self._weights += weight - account.weight
            account.weight = weight
        account.requests += 1

    def leave(self, tenant: str) -> None:
        """One less."""
        account = self._accounts[tenant]
        account.requests -= 1
        if account.requests:
            return
        del self._accounts[tenant]
        self._weights = self._weights - account.weight if self._accounts else 0.0
        if account.served > self._fair:
            self._ahead[tenant] = account.served
        if len(self._ahead) > 2 * len(self._accounts) + 64:
            self._ahead = {name: served for name, served in self._ahead.items() if served > self._fair}

    def serve(self, tenant: str, tokens: float) -> None:
        """A request of the tenant got tokens computed."""
        account = self._accounts[tenant]
        account.served += tokens / account.weight
        self._fair += tokens / self._weights

    def largest_lag(self) -> float:
        """Tokens ÷ weight by which the tenant that is most behind is behind its share."""
        return max((self._fair - account.served for account in self._accounts.values()), default=0.0)

    def behind(self, tenant: str) -> bool:
        """It got less than its share while it had requests here. Alone it never is."""
        account = self._accounts[tenant]
        return self._fair - account.served > SLACK_TOKENS / account.weight


class Level(RankedQueue):
    """One level of a feedback queue: its requests in order of their tags."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0
        self._finish: dict[str, float] = {}  # of tenants ahead of the clock

    def enter(self, key: str, *, tenant: str, weight: float, priority: int) -> None:
        """Takes its place behind its tenant's others, or for a priority as many quanta ahead of it."""
        finish = self._finish
        if (tag := finish.get(tenant, 0.0)) < self._clock:
            tag = self._clock
        finish[tenant] = tag + 1.0 / weight
        if priority:
            tag -= LEAD_QUANTA * priority / weight
        self.add(key, tag)
        if len(finish) > 64 and len(finish) > 2 * len(self) + 64:
            self._finish = {name: until for name, until in finish.items() if until > self._clock}

    def serve(self, count: int) -> list[str]:
        """The first `count`, in order, which are served now: the clock moves to the last one's tag."""
        keys = self.first(count)
        if keys:
            self._clock = max(self._clock, self.rank(keys[-1]))
        return keys
