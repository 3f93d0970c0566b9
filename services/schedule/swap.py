"""Which requests' KV leaves the device, and which comes back (FastServe, section 5).

proactive   copies run beside the steps. Out goes the largest estimated next scheduled time (ENST) first, in comes the
            smallest first, ahead of need; never both for one step. Room is made for what the next step lacks, for
            `Reserve`, and for a request that is needed earlier than one that is here: by at least the time that the
            exchange takes. Each step's copies stay within `Bandwidth`. Who is chosen and not here is passed over, but
            the first of them keeps its claim to room: new ones behind it get only what it will leave.
reactive    what is chosen and not here is fetched before the step, victims are swapped out for it, and the step waits.
recompute   victims lose their KV; who is chosen again computes it again.

How long does a request that was promoted wait for its KV, when that is on the host (proactive)? Let L be the requests
of the top level then, itself included, as in `mlfq`. Who is chosen has room together, and the first of the chosen who
is away has its room before anybody behind it. So those ahead of it and itself come back in order, by an exchange each:
others go until there is room, the last of them maybe for less than it has; then it comes back. That is three copies of
the largest request's KV at most, each up to the end of a step. One exchange more may be under way. With x for an
exchange, 3 × (copy + step), and s for a step

    wait  ≤  α + ⌈L ÷ B⌉·s + (L + 1)·x,    B being how many have room together:

the last term is what waiting grows by under pressure, with the requests that starve at one time. It takes victims whose
own turn is later than an exchange takes. Who came lately has an earlier one, but runs, and so sinks within about 2·B
exchanges; as long as older ones are there to go, nobody waits for that.

In both other modes, too, the victim is the largest ENST. What goes is dropped instead of copied where computing it
again is predicted to be faster than copying it out and in, or where the host has no room.

Pure: `plan` sees what there is before a step and says what to do; the caller keeps the blocks. Whoever is in `run`
has the blocks it needs, so a step's working set never exceeds what is resident, and as long as one request is
resident that can go on, or has room to begin, `run` is not empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from services.latency import PrefillFit
from services.schedule.budget import Bandwidth, Reserve
from services.schedule.swap_view import Plan, View


class SwapMode(Enum):
    """See the module's text."""

    PROACTIVE = "proactive"
    REACTIVE = "reactive"
    RECOMPUTE = "recompute"


@dataclass(kw_only=True)
class Swapper:
    """Plans swaps in one mode. `prefill`: what computing again costs."""

    mode: SwapMode
    block_bytes: int
    block_tokens: int
    bandwidth: Bandwidth
    reserve: Reserve
    prefill: PrefillFit | None = None

    def plan(self, view: View) -> Plan:
        """What to do before the next step."""
        if self.mode is SwapMode.PROACTIVE:
            return self._beside(view)
        return self._before(view)

    def copy_s(self, blocks: int) -> float:
        """Predicted time of one copy."""
        return blocks * self.block_bytes / self.bandwidth.bytes_per_s

    def recomputes(self, blocks: int) -> bool:
        """Whether computing that much KV again is predicted to be faster than copying it out and in."""
        if self.prefill is None:
            return False
        return self.prefill.prompt_s(blocks * self.block_tokens) < 2 * self.copy_s(blocks)

    def _beside(self, view: View) -> Plan:
        plan = Plan()
        left, lacking, promised, asked = view.free, 0, 0, 0
        chosen = set(view.chosen)
        for key in chain(view.chosen, self._others(view, chosen)):
            if len(plan.run) == view.batch:
                break
            if key in view.host or key in view.moving:
                promised = promised or (view.host.get(key, 0) if key in chosen else 0)
                continue
            new = key not in view.resident
            if new and lacking:
                continue  # it passes nobody who lacks room
            need = view.needs(key)
            asked += need
            room = left - max(0, promised - view.freeing) if new else left
            if need <= room:
                plan.run.append(key)
                left -= need
            elif not promised:
                lacking += need
        self.reserve.asked(asked)
        self._exchange(view, plan, chosen, left, lacking)
        return plan

    def _others(self, view: View, chosen: Collection[str]) -> Iterator[str]:
        """Who was not chosen and is here, in order of ENST, then who is new; looked for only when there is a place."""
        others = [key for key in view.resident if key not in chosen]
        times = dict(zip(others, view.enst_s(others), strict=True))
        yield from sorted(others, key=times.__getitem__)
        yield from (one.key for one in view.upcoming if one.key not in chosen and one.key not in view.resident)

    def _exchange(self, view: View, plan: Plan, chosen: Collection[str], left: int, lacking: int) -> None:
        """In, or out, or neither."""
        budget_bytes = self.bandwidth.allowed_bytes(view.step_s)
        away = [one for one in view.upcoming if one.key in view.host]
        pressing = not plan.run and not view.moving  # else nothing would ever happen again
        reserve = 0 if pressing else self.reserve.blocks  # whose turn it is may use it, too
        if away and not lacking and not view.freeing:
            for one in away:
                blocks = view.host[one.key]
                fits = blocks + (0 if one.key in chosen else reserve) <= left
                if not fits or ((plan.back or view.moving) and budget_bytes < blocks * self.block_bytes):
                    break
                plan.back.append(one.key)
                left -= blocks
                budget_bytes -= blocks * self.block_bytes
        if plan.back or view.filling:
            return
        if away and away[0].key in chosen:
            reserve = 0
        room = left + view.freeing - lacking - reserve
        stay = {key for key in plan.run if key in chosen}
        if room < 0:
            after_s = -1.0 if lacking else view.step_s
            self._evict(view, plan, -room, budget_bytes, after_s=after_s, stay=stay)
        elif away and not view.freeing and (short := view.host[away[0].key] - room) > 0:
            exchange_s = self.copy_s(view.host[away[0].key]) * 2
            after_s = -1.0 if pressing else away[0].enst_s + exchange_s
            self._evict(view, plan, short, budget_bytes, after_s=after_s, stay=stay)

    def _before(self, view: View) -> Plan:
        plan = Plan()
        left, asked, lacking = view.free, 0, False
        for key in view.chosen:
            if key in plan.out or key in plan.drop or (lacking and key not in view.resident):
                continue  # it gave way to those before it, or would pass one that lacks room
            need = view.needs(key)
            asked += need
            if need > left:
                left += self._make_way(view, plan, key, need - left)
            lacking = lacking or need > left
            if need <= left:
                left -= need
                plan.run.append(key)
                if key in view.host:
                    plan.back.append(key)
        self.reserve.asked(asked)
        return plan

    def _make_way(self, view: View, plan: Plan, key: str, blocks: int) -> int:
        """Evicts for a request that is chosen, if enough can be; says how many blocks that frees."""
        victims = Plan()
        stay = {*plan.run, key, *plan.out, *plan.drop, *(view.chosen if plan.run else ())}
        self._evict(view, victims, blocks, float("inf"), after_s=-1.0, stay=stay)
        freed = sum(view.resident[one] for one in (*victims.out, *victims.drop))
        if freed < blocks:
            return 0
        plan.out += victims.out
        plan.drop += victims.drop
        return freed

    def _evict(
        self, view: View, plan: Plan, blocks: int, budget_bytes: float, *, after_s: float, stay: Collection[str]
    ) -> None:
        """Adds victims to the plan, of those whose ENST is later: largest first, until so many blocks come free."""
        idle = [key for key in view.resident if key not in stay]
        times = dict(zip(idle, view.enst_s(idle), strict=True))
        places = {key: place for place, key in enumerate(view.chosen)}  # of equal ones, the last chosen goes first
        host_free = view.host_free - sum(view.resident[key] for key in plan.out)
        for key in sorted(idle, key=lambda one: (times[one], places.get(one, -1)), reverse=True):
            size = view.resident[key]
            if blocks <= 0 or times[key] <= after_s:
                break
            if self.mode is SwapMode.RECOMPUTE or size > host_free or self.recomputes(size):
                plan.drop.append(key)
            elif (plan.out or view.moving) and budget_bytes < size * self.block_bytes:
                break
            else:
                plan.out.append(key)
                host_free -= size
                budget_bytes -= size * self.block_bytes
            blocks -= size
            if key in plan.run:  # it only filled a place
                plan.run.remove(key)
