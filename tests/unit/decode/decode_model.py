"""A decode core for tests, a model that computes its steps and carries out its copies like a worker does, and what all
random tests of the core have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.blocks import BlockPool
from services.decode.core import DecodeCore
from services.decode.memory import Memory
from services.decode.messages import (
    Cancel,
    Copied,
    Copy,
    Drained,
    Event,
    Failed,
    Finished,
    Received,
    Reserved,
    Submit,
    Tokens,
    TransferFailed,
)
from services.engine.prefix import PrefixCache
from services.engine.sampling_spec import SamplingSpec
from services.errors import DiptychError, HandOffLost
from services.schedule.budget import Bandwidth, Reserve
from services.schedule.fcfs import fcfs
from services.schedule.policy import Policy
from services.schedule.swap import SwapMode, Swapper
from services.schedule.weights import Weights
from services.worker.work import Computed

BLOCK = 4
STEP_S = 0.01


def core(
    blocks: int = 64,
    chunk_tokens: int = 6,
    max_batch: int = 8,
    *,
    prefix_cache: bool = True,
    policy: Policy | None = None,
    mode: SwapMode = SwapMode.RECOMPUTE,
    host_blocks: int = 0,
    weights: Weights | None = None,
) -> DecodeCore:
    """First come, first served, unless told otherwise; who gives way is computed again."""
    pool = BlockPool(blocks)
    memory = Memory(
        pool=pool,
        host=BlockPool(host_blocks),
        prefix=PrefixCache(pool, block_tokens=BLOCK, fingerprint="f", enabled=prefix_cache),
        swapper=Swapper(
            mode=mode,
            block_bytes=1,
            block_tokens=BLOCK,
            bandwidth=Bandwidth(bytes_per_s=1e9),
            reserve=Reserve(total_blocks=blocks),
        ),
    )
    return DecodeCore(
        memory=memory,
        policy=policy or fcfs(),
        chunk_tokens=chunk_tokens,
        max_batch=max_batch,
        weights=weights or Weights(),
    )


def request(
    key: str,
    tokens: int = 5,
    *,
    max_new_tokens: int = 4,
    stop: frozenset[int] = frozenset(),
    local: bool = True,
    ids: Sequence[int] = (),
    tenant: str = "",
    priority: int = 0,
) -> Submit:
    ids = tuple(ids) or tuple(range(1, tokens + 1))
    return Submit(
        key=key,
        token_ids=ids,
        sampling=SamplingSpec(),
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop,
        local=local,
        tenant=tenant,
        priority=priority,
    )


def next_token(token_ids: tuple[int, ...]) -> int:
    """A model: the next token depends on the whole sequence, so a wrong or lost token shows."""
    return (sum(i * t for i, t in enumerate(token_ids, 1)) % 97) + 100


class Model:
    """Executes work like the engine: remembers what was written where, and samples from what it reads back.

    Nobody writes to a block that somebody else may read. Copies read when they end, and spoil what they write to when
    they begin: a block that was given to somebody else meanwhile shows.
    """

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.copies: list[Copy] = []  # under way

    def begin(self, copy: Copy) -> None:
        """Begins a copy."""
        self.copies.append(copy)
        for block in copy.host_blocks if copy.out else copy.blocks:
            for offset in range(BLOCK):
                (self.host if copy.out else self.slots)[block, offset] = -1

    def end(self, c: DecodeCore, copy: Copy, now_s: float = 0.0, error: DiptychError | None = None) -> None:
        """Ends it."""
        self.copies.remove(copy)
        for block, host_block in zip(copy.blocks, copy.host_blocks, strict=True):
            for offset in range(BLOCK):
                if copy.out:
                    self.host[host_block, offset] = self.slots.get((block, offset), -1)
                else:
                    self.slots[block, offset] = self.host[host_block, offset]
        c.apply(Copied(key=copy.key, seconds=0.001, error=error), now_s)
        c.check()

    def write(self, c: DecodeCore, key: str, block: int, offset: int, token: int) -> None:
        assert [owner for owner in c.memory.pool.owners() if block in c.memory.pool.blocks(owner)] == [key]
        self.slots[block, offset] = token

    def step(self, c: DecodeCore, now_s: float = 0.0) -> list[tuple[str, int, int]]:
        work = c.plan(now_s)
        results: list[Computed] = []
        for item in work:
            s = item.slice
            for position, token in enumerate(s.token_ids, s.start):
                self.write(c, item.key, s.blocks[position // BLOCK], position % BLOCK, token)
            history = tuple(self.slots[s.blocks[p // BLOCK], p % BLOCK] for p in range(s.end))
            results.append(Computed(token_id=next_token(history) if s.wants_logits else None))
        if work:
            c.complete(work, results, now_s + STEP_S)
        c.check()
        return [(item.key, item.slice.start, len(item.slice.token_ids)) for item in work]

    def receive(self, c: DecodeCore, reserved: Reserved, token_ids: tuple[int, ...], *, damaged: bool = False) -> int:
        """Puts a prompt's KV into blocks, as a hand-off does; returns the first token. `damaged`: it goes wrong."""
        for position, token in list(enumerate(token_ids))[reserved.skip_tokens :]:
            block = reserved.blocks[position // BLOCK]
            self.write(c, reserved.key, block, position % BLOCK, -1 if damaged else token)
        return next_token(token_ids)


def expected(submit: Submit) -> list[int]:
    """The undisturbed answer."""
    ids = submit.token_ids
    answer: list[int] = []
    while len(answer) < submit.max_new_tokens:
        answer.append(next_token(ids + tuple(answer)))
        if answer[-1] in submit.stop_token_ids:
            break
    return answer


def answers(events: list[Event]) -> dict[str, list[int]]:
    """Token streams by key; checks that offsets have no gap and no repeat."""
    streams: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, Tokens):
            stream = streams.setdefault(event.key, [])
            assert event.offset == len(stream)
            stream.extend(event.token_ids)
    return streams


def run(c: DecodeCore, model: Model, steps: int = 200) -> list[Event]:
    """Steps until nothing is left to do; copies end after the step beside which they began."""
    events: list[Event] = []
    for step in range(steps):
        worked = model.step(c, step * STEP_S)
        taken = c.take_events()
        events += taken
        for event in taken:
            if isinstance(event, Copy):
                model.begin(event)
        if not worked and not model.copies:
            break
        for copy in list(model.copies):
            model.end(c, copy, (step + 1) * STEP_S)
    return events


class CoreMachine(RuleBasedStateMachine):
    """Random hand-offs, cancels and whatever rules a test adds: blocks add up, no stream has a gap, every answer is the
    undisturbed one. `self.core` is the test's.
    """

    core: DecodeCore

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.now_s = 0.0
        self.submits: dict[str, Submit] = {}
        self.reserved: dict[str, Reserved] = {}  # that nothing came of yet
        self.cancelled: set[str] = set()
        self.events: list[Event] = []

    def ask(self, ids: Sequence[int], new: int, *, local: bool, priority: int = 0) -> None:
        submit = request(f"r{len(self.submits)}", ids=ids, max_new_tokens=new, local=local, priority=priority)
        self.submits[submit.key] = submit
        self.core.apply(submit, self.now_s)

    def unlike(self, alike: int, tokens: int) -> list[int]:
        """A prompt of which so many tokens are those of others."""
        return [n + 1 if n < alike else 1000 * len(self.submits) + n for n in range(tokens)]

    def collect(self) -> None:
        for event in self.core.take_events():
            self.events.append(event)
            if isinstance(event, Reserved):
                self.reserved[event.key] = event
            elif isinstance(event, Copy):
                self.model.begin(event)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), arrives=st.booleans())
    def transfer_ends(self, data: st.DataObject, arrives: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        reserved, token_ids = self.reserved.pop(key), self.submits[key].token_ids
        draining = key in self.cancelled
        first = self.model.receive(self.core, reserved, token_ids, damaged=draining or not arrives)
        if arrives:
            finish = "length" if self.submits[key].max_new_tokens == 1 else None
            self.core.apply(Received(key=key, first_token_id=first, finish=finish), self.now_s)
        else:
            self.core.apply(TransferFailed(key, HandOffLost("lost")), self.now_s)
        self.core.apply(Drained(key), self.now_s)
        self.collect()

    @precondition(lambda self: self.submits)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.submits)))
        self.cancelled.add(key)
        self.core.apply(Cancel(key), self.now_s)
        self.collect()

    @invariant()
    def accounting_and_streams_are_exact(self) -> None:
        self.core.check()
        for key, stream in answers(self.events).items():
            assert stream == expected(self.submits[key])[: len(stream)]

    def lose_transfers(self) -> None:
        """Every hand-off under way fails."""
        while self.reserved:
            key, _ = self.reserved.popitem()
            self.core.apply(TransferFailed(key, HandOffLost("lost")), self.now_s)
            self.core.apply(Drained(key), self.now_s)

    def all_over(self, total_blocks: int) -> None:
        """Everybody was told how it ended, and everything is free."""
        self.collect()
        ended = {event.key for event in self.events if isinstance(event, Finished | Failed)}
        assert set(self.submits) - self.cancelled <= ended
        blocks = self.core.load().blocks
        assert (blocks.free, blocks.swapped) == (total_blocks, 0)
        for event in self.events:
            if isinstance(event, Finished):
                assert len(answers(self.events)[event.key]) == len(expected(self.submits[event.key]))
