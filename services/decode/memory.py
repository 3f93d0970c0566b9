"""Where the KV of every request is: in blocks of the device, on the host, or on the way between the two.

Who leaves and who comes back is the `Swapper`'s choice; here it is carried out, and the blocks are accounted for.
A copy is asked for with a `Copy`; until its `Copied` nobody else gets a block that it reads or writes, whatever becomes
of the request. A block that others share is copied for whoever leaves and stays theirs; who comes back shares again
what is known by then, and only the rest is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvtransfer.blocks import BlockCounts, BlockPool, BlockState
from services.decode.messages import Copied, Copy, Event, Reserved
from services.decode.order import Order
from services.decode.requests import ENDED, RESIDENT, Request, Requests, Stage
from services.decode.residence import OnHost, Resident
from services.engine.prefix import PrefixCache
from services.engine.sequence import blocks_needed
from services.schedule.policy import Change
from services.schedule.swap import SwapMode, Swapper
from services.schedule.swap_view import Plan, View

SIGHT: Final = 32
"""Requests after those of the next step that are looked at for coming back ahead of need."""


@dataclass(kw_only=True)
class Memory:
    """KV memory of one decode worker. `host` accounts for host blocks, if there are any; `prefix` is over `pool`."""

    pool: BlockPool
    host: BlockPool
    prefix: PrefixCache
    swapper: Swapper
    requests: Requests = field(default_factory=Requests)
    events: list[Event] = field(default_factory=list)
    _copies: dict[str, Copy] = field(default_factory=dict, init=False)  # under way

    def __post_init__(self) -> None:
        """Sizes that do not change."""
        self.block_tokens = self.swapper.block_tokens
        self.total = self.pool.counts().total

    def counts(self) -> BlockCounts:
        """Of the device and of what is in host memory."""
        counts, host = self.pool.counts(), self.host.counts()
        swapped = host.total - host.free
        return replace(counts, total=counts.total + swapped, swapped=swapped)

    @property
    def waits(self) -> bool:
        """Steps wait for copies, and some are under way."""
        return bool(self._copies) and self.swapper.mode is not SwapMode.PROACTIVE

    @property
    def copying_bytes(self) -> int:
        """Of all copies under way."""
        return sum(len(copy.blocks) for copy in self._copies.values()) * self.swapper.block_bytes

    def fitting(self, ordered: Sequence[str]) -> int:
        """How many of the first ones have room together, if they share nothing: at least one."""
        left = self.total
        ours = set(ordered)
        left -= sum([len(one.sequence.blocks) for key, one in self.requests.pinned.items() if key not in ours])
        for stage in (Stage.RECEIVING, Stage.DRAINING):
            left -= sum([len(request.sequence.blocks) for request in self.requests.within(stage).values()])
        for place, key in enumerate(ordered):
            request = self.requests[key]
            own = request.stage in RESIDENT
            tokens = len(request.sequence.token_ids) + (0 if own else request.room_tokens)
            left -= max(blocks_needed(tokens, self.block_tokens), len(request.sequence.blocks) if own else 0)
            if left < 0:
                return max(1, place)
        return len(ordered)

    def plan(self, chosen: Sequence[str], order: Order, batch: int, now_s: float) -> Plan:
        """Who of the chosen can run, and who has to leave or come back before."""
        away = self.requests.within(Stage.SWAPPED)
        next_ones = order.ahead(batch + SIGHT, batch, now_s) if away else ()
        view = View(
            batch=len(chosen),
            chosen=chosen,
            upcoming=[one for one in next_ones if self.requests[one.key].stage is not Stage.RECEIVING],
            resident=Resident(self.requests, self.pool),
            host=OnHost(away, self.block_tokens),
            moving=self._copies,
            needs=self._needs,
            enst_s=lambda keys: order.policy.enst_s(keys, batch, now_s),
            free=self.pool.counts().free,
            freeing=sum(self.pool.exclusive(key) for key, copy in self._copies.items() if copy.out),
            filling=any(not copy.out for copy in self._copies.values()),
            host_free=self.host.counts().free,
            step_s=order.step_s(chosen),
        )
        return self.swapper.plan(view)

    def carry_out(self, plan: Plan, now_s: float) -> list[Request]:
        """Does what the plan says; returns those of `plan.run` that have all blocks for their next step.

        They get theirs before somebody comes back ahead of need, who takes room to grow with it where there is some.
        """
        for key in plan.drop:
            self.drop(self.requests[key], now_s)
        for key in plan.out:
            self._send_out(self.requests[key], now_s)
        step = []
        for key in dict.fromkeys((*plan.run, *plan.back)):
            request = self.requests[key]
            if request.stage is Stage.SWAPPED:
                self.bring_back(request, now_s)
            elif self.ready(request, len(plan.run), now_s):
                step.append(request)
        return step

    def ready(self, request: Request, running: int, now_s: float) -> bool:
        """Gives it the blocks that it lacks for its next step, if they are free: with `running` others, each some room
        to grow where there is enough for all, as neighbours; single blocks would scatter. Says whether it can step.
        """
        if request.stage is Stage.WAITING:
            return self.admit(request, now_s) and request.local
        if request.stage not in RESIDENT:
            return False
        sequence = request.sequence
        if not sequence.blocks_missing(self.block_tokens):
            return True
        room = sequence.blocks_missing(self.block_tokens, room_tokens=request.room_tokens)
        blocks = room if self.pool.can_allocate(room * running) else 1
        if not self.pool.can_allocate(blocks):
            return False
        sequence.add_blocks(self.pool.extend(request.key, blocks))
        return True

    def admit(self, request: Request, now_s: float) -> bool:
        """Gives a waiting request its first blocks, if they are free; then it is computed or received."""
        cached_tokens = self.prefix.admit(
            request.key, request.sequence, room_tokens=request.room_tokens, whole=request.whole
        )
        if cached_tokens is None:
            return False
        if request.recomputed == 0:
            request.admitted_s, request.cached_tokens = now_s, cached_tokens
        self.requests.move(request, Stage.COMPUTING if request.local else Stage.RECEIVING)
        if not request.local:
            prompt_blocks = blocks_needed(len(request.sequence.token_ids), self.block_tokens)
            blocks = tuple(request.sequence.blocks[:prompt_blocks])
            self.events.append(Reserved(key=request.key, blocks=blocks, skip_tokens=request.sequence.computed))
        return True

    def register(self, request: Request) -> None:
        """Lets others share what it has in full blocks."""
        if not request.doubted:
            self.prefix.register(request.key, request.sequence)

    def doubt(self) -> None:
        """The engine failed or computed what is no number: nothing that is anywhere now is shared any more."""
        self.prefix.doubt()
        for request in self.requests:
            request.doubted = True

    def drop(self, request: Request, now_s: float) -> None:
        """Takes its blocks back; it waits, with everything it has as tokens to compute again."""
        self.pool.free(request.key)
        if request.sequence.computed:
            request.recomputed += 1
            self._note(request, "dropped", now_s)
        request.sequence = request.sequence.without_blocks()
        request.prompt_logprobs.clear()  # computed again, if they were not reported yet
        request.doubted = False
        self.requests.move(request, Stage.WAITING)

    def bring_back(self, request: Request, now_s: float) -> bool:
        """Copies what is on the host into blocks of the device, if enough are free. Room to grow is not insisted on."""
        for room_tokens in (request.room_tokens, 0):
            cached_tokens = self.prefix.admit(
                request.key, request.sequence, room_tokens=room_tokens, whole=request.whole
            )
            if cached_tokens is not None:
                break
        else:
            return False
        host_blocks = self.host.blocks(request.key)
        known = min(cached_tokens // self.block_tokens, len(host_blocks))
        blocks = tuple(request.sequence.blocks[known : len(host_blocks)])
        self.requests.move(request, Stage.RETURNING)
        self._copy(request, Copy(key=request.key, out=False, blocks=blocks, host_blocks=host_blocks[known:]))
        self._note(request, "swap in", now_s, blocks)
        return True

    def copied(self, request: Request, copied: Copied) -> None:
        """Its copy has ended well."""
        blocks = len(self._copies.pop(request.key).blocks)
        self.swapper.bandwidth.copied(blocks * self.swapper.block_bytes, copied.seconds)
        if request.stage in ENDED:
            self.forget(request)
        elif request.stage is Stage.LEAVING:
            self.pool.drained(request.key)
            request.saved_tokens = request.sequence.computed
            request.sequence = request.sequence.without_blocks()
            self.requests.move(request, Stage.SWAPPED)
        else:
            self.host.free(request.key)
            request.sequence.advance(max(0, request.saved_tokens - request.sequence.computed))
            request.saved_tokens = 0
            self.register(request)
            decodes = request.generated and request.sequence.pending == 1
            self.requests.move(request, Stage.RUNNING if decodes else Stage.COMPUTING)
            self.requests.pin(request)

    def lost(self, request: Request) -> None:
        """Its copy has ended badly."""
        del self._copies[request.key]
        self.forget(request)

    def drain(self, request: Request) -> None:
        """It is over, and somebody may still touch its blocks."""
        if self.pool.state(request.key) is BlockState.HELD:
            self.pool.drain(request.key)
        self.requests.move(request, Stage.DRAINING if request.stage is Stage.RECEIVING else Stage.ENDING)

    def forget(self, request: Request) -> None:
        """It is over, and nobody touches its blocks any more."""
        self.requests.remove(request)
        if self.host.state(request.key) is not None:
            self.host.free(request.key)
        match self.pool.state(request.key):
            case None:
                pass  # it was waiting, or on the host
            case BlockState.DRAINING:
                self.pool.drained(request.key)
            case _:
                self.pool.free(request.key)

    def check(self) -> None:
        """Raises unless the blocks of device and host are accounted for, by those who should have them."""
        self.pool.check()
        self.host.check()
        counts = self.counts()
        assert counts.free + counts.held + counts.leased + counts.swapped == counts.total
        on_host = (Stage.LEAVING, Stage.SWAPPED, Stage.RETURNING)
        for request in self.requests:
            stage, has = request.stage, self.pool.state(request.key)
            assert (has is None) == (stage in (Stage.WAITING, Stage.SWAPPED)), f"{request.key}: {stage} with {has}"
            assert (has is BlockState.DRAINING) == (stage in (Stage.LEAVING, *ENDED)), f"{request.key}: {stage}, {has}"
            if stage is not Stage.ENDING:
                assert (self.host.state(request.key) is not None) == (stage in on_host), f"{request.key}: {stage}"
        assert set(self._copies) == {r.key for r in self.requests if r.stage in (Stage.LEAVING, Stage.RETURNING)} | set(
            self.requests.within(Stage.ENDING)
        )

    def _send_out(self, request: Request, now_s: float) -> None:
        count = blocks_needed(request.sequence.computed, self.block_tokens)
        if not count or not self.host.can_allocate(count):
            self.drop(request, now_s)
            return
        host_blocks = self.host.allocate(count, request.key)
        self.pool.drain(request.key)
        self.requests.move(request, Stage.LEAVING)
        blocks = tuple(request.sequence.blocks[:count])
        self._copy(request, Copy(key=request.key, out=True, blocks=blocks, host_blocks=host_blocks))
        self._note(request, "swap out", now_s, blocks)

    def _copy(self, request: Request, copy: Copy) -> None:
        self._copies[request.key] = copy
        self.events.append(copy)
        request.swapped_bytes += len(copy.blocks) * self.swapper.block_bytes

    def _needs(self, key: str) -> int:
        request = self.requests[key]
        if request.stage in RESIDENT:
            return request.sequence.blocks_missing(self.block_tokens)
        return self.prefix.cost(request.sequence, room_tokens=request.room_tokens, whole=request.whole)

    def _note(self, request: Request, what: str, now_s: float, blocks: Sequence[int] | None = None) -> None:
        """`blocks`: what is copied, none where all of it is still here."""
        detail = "" if blocks is None else f"{len(blocks) * self.swapper.block_bytes} bytes"
        request.note(Change(key=request.key, what=what, at_s=now_s, detail=detail))
