"""KV memory of a simulated engine: the real block accounting, a host pool, and one link that copies between them.

Life of a request's blocks here: none → HELD (resident) → DRAINING while they are copied out → none, on the host → HELD
but not yet resident while they are copied in → resident → none at its end. A drop goes from resident to none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtransfer.blocks import BlockPool
from services.schedule.budget import Bandwidth, Reserve
from services.schedule.policy import Policy
from services.schedule.swap import SwapMode, Swapper
from services.schedule.swap_view import Plan, View
from services.simulation.machine import OPT_13B_TOKEN_BYTES, OPT_13B_TOKENS, PCIE_BYTES_PER_S, Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """KV memory and the link to the host. `contention`: by which part of their time copies delay the steps beside them
    (PCIe's 25 GB/s of the 2,039 GB/s of an A100's memory, which bounds decode steps).
    """

    swap: SwapMode = SwapMode.PROACTIVE
    tokens: int = OPT_13B_TOKENS
    block_tokens: int = 16
    token_bytes: int = OPT_13B_TOKEN_BYTES
    link_bytes_per_s: float = PCIE_BYTES_PER_S
    host_tokens: int = 1 << 40
    contention: float = 25 / 2039


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    key: str
    blocks: int
    out: bool
    begin_s: float
    end_s: float


@dataclass(kw_only=True)
class Memory:
    """Blocks of one engine; `needed_tokens` says how many tokens of a request must have a place for its next step.

    `swapped_bytes` counts both directions.
    """

    limit: MemoryLimit
    machine: Machine
    policy: Policy
    needed_tokens: Callable[[str], int]
    swapped_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """An empty pool, an idle link."""
        limit = self.limit
        blocks = limit.tokens // limit.block_tokens
        self.pool = BlockPool(blocks)
        self._free = blocks
        self._resident: dict[str, int] = {}
        self._host: dict[str, int] = {}
        self._host_free = limit.host_tokens // limit.block_tokens
        self._copies: list[_Copy] = []  # in the order of their ends
        self._block_bytes = limit.block_tokens * limit.token_bytes
        self._bandwidth = Bandwidth(bytes_per_s=limit.link_bytes_per_s)
        self._swapper = Swapper(
            mode=limit.swap,
            block_bytes=self._block_bytes,
            block_tokens=limit.block_tokens,
            bandwidth=self._bandwidth,
            reserve=Reserve(total_blocks=blocks),
            prefill=self.machine.prefill,
        )

    def arrived(self, now_s: float) -> float:
        """Takes in which copies have ended by now; says when the next one ends, or infinity."""
        while self._copies and self._copies[0].end_s <= now_s:
            copy = self._copies.pop(0)
            if copy.out:
                self.pool.drained(copy.key)
                self._free += copy.blocks
                self._host[copy.key] = copy.blocks
            else:
                self._resident[copy.key] = copy.blocks
            self._bandwidth.copied(copy.blocks * self._block_bytes, copy.end_s - copy.begin_s)
        return self._copies[0].end_s if self._copies else float("inf")

    def fitting(self, ordered: Sequence[str]) -> int:
        """How many of the first ones have room together: at least one. A decode worker chooses in the same way."""
        left = self.limit.tokens // self.limit.block_tokens
        for place, key in enumerate(ordered):
            left -= -(-self.needed_tokens(key) // self.limit.block_tokens)
            if left < 0:
                return max(1, place)
        return len(ordered)

    def plan(self, chosen: Sequence[str], step_s: float, now_s: float) -> Plan:
        """What the planner of the services says about the next step, which takes about `step_s`."""
        batch = len(chosen)
        view = View(
            batch=self.machine.batch,
            chosen=chosen,
            upcoming=self.policy.upcoming(3 * batch, batch, now_s),
            resident=self._resident,
            host=self._host,
            moving={copy.key for copy in self._copies},
            needs=self._needs,
            enst_s=lambda keys: self.policy.enst_s(keys, batch, now_s),
            free=self._free,
            freeing=sum(copy.blocks for copy in self._copies if copy.out),
            filling=any(not copy.out for copy in self._copies),
            host_free=self._host_free,
            step_s=step_s,
        )
        return self._swapper.plan(view)

    def carry_out(self, plan: Plan, now_s: float) -> float:
        """Does it; says how long the next step has to wait for that. The caller forgets the KV of `plan.drop`."""
        for key in plan.drop:
            self.end(key)
        end_s = self._copies[-1].end_s if self._copies else now_s
        for key in plan.out:
            self.pool.drain(key)
            blocks = self._resident.pop(key)
            self._host_free -= blocks
            end_s = self._copy(key, blocks, out=True, begin_s=end_s)
        waits = self.limit.swap is not SwapMode.PROACTIVE
        if waits:
            self.arrived(end_s)
        for key in plan.back:
            blocks = self._host.pop(key)
            self.pool.allocate(blocks, key)
            self._free -= blocks
            self._host_free += blocks
            end_s = self._copy(key, blocks, out=False, begin_s=end_s)
        if waits:
            self.arrived(end_s)
        for key in plan.run:
            self._give(key, self._needs(key))
        return end_s - now_s if waits else 0.0

    def delay_s(self, begin_s: float, step_s: float) -> float:
        """By how much the copies under way delay a step, or several, that would take `step_s` without them."""
        if not self._copies:
            return 0.0
        beside_s = min(step_s, self._copies[-1].end_s - begin_s)
        delay_s = self.limit.contention * beside_s
        self._bandwidth.delayed(beside_s * self.limit.link_bytes_per_s, delay_s)
        return delay_s

    def room_tokens(self, key: str) -> int:
        """How many tokens a resident request has blocks for."""
        return self._resident[key] * self.limit.block_tokens

    def end(self, key: str) -> None:
        """Frees what a resident request has, if anything."""
        blocks = self._resident.pop(key, None)
        if blocks is not None:
            self.pool.free(key)
            self._free += blocks

    def _needs(self, key: str) -> int:
        return max(0, -(-self.needed_tokens(key) // self.limit.block_tokens) - self._resident.get(key, 0))

    def _give(self, key: str, blocks: int) -> None:
        if key not in self._resident:
            self.pool.allocate(blocks, key)
        elif blocks:
            self.pool.extend(key, blocks)
        self._resident[key] = self._resident.get(key, 0) + blocks
        self._free -= blocks

    def _copy(self, key: str, blocks: int, *, out: bool, begin_s: float) -> float:
        size = blocks * self._block_bytes
        self.swapped_bytes += size
        end_s = begin_s + size / self.limit.link_bytes_per_s
        self._copies.append(_Copy(key=key, blocks=blocks, out=out, begin_s=begin_s, end_s=end_s))
        return end_s
