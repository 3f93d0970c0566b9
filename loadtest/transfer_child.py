"""The sending process of `loadtest transfer`: what a prefill worker is, without membership and requests.

`python -m loadtest.transfer_child OPTIONS`, a JSON object: `places` and the most tokens of each, `links` (bytes a
second; 0: as fast as it is), `model`, `cores`. Says where it listens, then does what lines on stdin ask for:

    raw      sends messages of the given sizes over a link, as fast as the receiver posts
    offer    offers KV that is there already, or becomes so chunk by chunk at a given pace
    compute  computes a prompt with the engine and offers it, chunk by chunk or (overlap false) when it is done
    end      ends
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

import grpc
import numpy as np

from kvtransfer import Arena, BlockPool, Sender, UcxTransport
from kvtransfer.device import Buffer
from kvtransfer.outgoing import IN_FLIGHT
from kvtransfer.transport.base import Operation, Transport
from kvtransfer.transport.fault import Fault
from kvtransfer.transport.faulty import FaultyTransport
from loadtest.transfer_peer import BLOCK_TOKENS, CHUNK_TOKENS, ENGINE, GRPC_METHOD, SHAPES, Line, Lines
from services.engine.card import ModelCard, read_card
from services.engine.catalog import resolve
from services.engine.pool import layout_of
from services.engine.prefix import PrefixCache
from services.engine.runner import open_runner
from services.engine.sampling_spec import SamplingSpec
from services.prefill.core import PrefillCore
from services.prefill.messages import Event, Progress, Submit
from services.prefill.service import PrefillService
from services.prefill.servicer import KvTransferServicer
from services.prefill.worker import NICE
from services.process import keep_to_cores
from services.rpc.server import RpcServer
from services.schedule.fcfs import fcfs
from services.worker.executor import Executor
from services.worker.identity import Identity
from services.worker.step_thread import StepThread

LIMIT_S = 120.0

BytesContext: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """See the module's text."""

    places: dict[str, int]
    links: list[float]
    model: str
    cores: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Door:
    """KV of one place over one link: a sender behind a gRPC server of its own."""

    sender: Sender
    transport: Transport
    arena: Arena
    server: RpcServer
    identity: Identity
    port: int


class BytesHandler(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """KV as bytes in gRPC messages, which is what the data plane is compared with."""

    def __init__(self) -> None:
        self._content = bytes(16 << 20)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Knows one method."""
        if handler_call_details.method != GRPC_METHOD:
            return None
        return grpc.unary_stream_rpc_method_handler(self._get, request_deserializer=bytes)

    async def _get(self, request: bytes, context: BytesContext) -> AsyncIterator[bytes]:
        ready = {size: self._content[:size] for size in set(json.loads(request))}
        for size in json.loads(request):
            yield ready[size]


@dataclass(kw_only=True)
class Prefiller:
    """A prefill worker's shell. While `overlaps` is false, nobody hears of a prompt before its end."""

    service: PrefillService
    overlaps: bool = True
    tokens: dict[str, int] = field(default_factory=dict)

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes a step's events."""
        kept = [
            event
            for event in events
            if self.overlaps or not isinstance(event, Progress) or event.computed_tokens == self.tokens[event.key]
        ]
        self.service.deliver(kept)

    async def compute(self, transfer_id: str, tokens: int) -> float:
        """Computes a prompt of random tokens; returns the seconds that it took."""
        self.tokens[transfer_id] = tokens
        submit = Submit(
            key=transfer_id,
            token_ids=tuple(random.Random(transfer_id).choices(range(300, 20_000), k=tokens)),
            sampling=SamplingSpec(temperature=0.0),
            max_new_tokens=8,
            stop_token_ids=frozenset(),
        )
        first = await self.service.prefill(submit, LIMIT_S)
        return first.computed_s - first.admitted_s


class Child:
    """All doors, and the prefill behind one of them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._identity = Identity("loadtest", "")
        self._ucx = UcxTransport(self._identity.incarnation)
        self._over: dict[float, Transport] = {
            link: FaultyTransport(self._ucx, Fault(bytes_per_s=link)) if link else self._ucx for link in options.links
        }
        self._doors: dict[str, Door] = {}
        self._prefillers: dict[float, Prefiller] = {}
        self._memory: dict[int, list[Buffer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, lines: Lines) -> None:
        """Works until it is told to end, or the parent is gone."""
        await self._ucx.start()
        for place in self._options.places:
            for link in self._options.links:
                await self._open(place, link)
        if ENGINE in self._options.places:
            await self._equip()
        keep_to_cores(frozenset(self._options.cores))
        ports = {name: door.port for name, door in self._doors.items()}
        incarnations = {name: door.identity.incarnation for name, door in self._doors.items()}
        lines.say({"ports": ports, "incarnations": json.dumps(incarnations), "address": self._ucx.address.hex()})
        while (line := await lines.hear()) is not None and line["do"] != "end":
            task = asyncio.create_task(self._do(line, lines))
            self._tasks.add(task)
            task.add_done_callback(self._done)
        for door in self._doors.values():
            await door.sender.aclose()
            await door.server.stop(0.0)
        await self._ucx.aclose()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            raise SystemExit(f"the sending process failed: {error!r}") from error

    async def _open(self, place: str, link: float) -> None:
        # A sender draws its tags from its incarnation, so each has one of its own.
        identity = Identity(f"{place}/{link:g}", "")
        blocks = -(-self._options.places[place] // BLOCK_TOKENS) + 1
        layout = layout_of(self._card(), "bf16", BLOCK_TOKENS) if place == ENGINE else SHAPES[place]
        known = next((door.arena for name, door in self._doors.items() if name.split("/")[0] == place), None)
        arena = known or Arena(layout, blocks)
        arena.array[...] = 1  # memory that was never written costs nothing to read
        sender = Sender(self._over[link], arena, incarnation=identity.incarnation, checksums=True)
        server = RpcServer("127.0.0.1", 0, [KvTransferServicer.NAME])
        port = server.bind()
        server.server.add_generic_rpc_handlers((BytesHandler(),))
        KvTransferServicer(sender, identity).register(server)
        await server.start()
        transport = self._over[link]
        self._doors[f"{place}/{link:g}"] = Door(
            sender=sender, transport=transport, arena=arena, server=server, identity=identity, port=port
        )

    def _card(self) -> ModelCard:
        files = resolve(self._options.model, progress=lambda text: print(text, file=sys.stderr))
        return read_card(files.path, files.name)

    async def _equip(self) -> None:
        """Loads the model once; each link's sender gets a core and a shell of its own over the same arena."""
        card = self._card()
        arena = next(door.arena for name, door in self._doors.items() if name.startswith(ENGINE))
        runner = await asyncio.to_thread(open_runner, card, dtype="bf16", device="cpu", array=arena.array)
        for link in self._options.links:
            pool = BlockPool(arena.blocks)
            prefix = PrefixCache(pool, block_tokens=BLOCK_TOKENS, fingerprint=arena.layout.fingerprint(), enabled=False)
            core = PrefillCore(
                policy=fcfs(),
                pool=pool,
                prefix=prefix,
                block_tokens=BLOCK_TOKENS,
                chunk_tokens=CHUNK_TOKENS,
                max_batch=1,
            )
            prefiller = Prefiller(service=PrefillService(self._doors[f"{ENGINE}/{link:g}"].sender))
            thread = StepThread(
                core,
                Executor(runner),
                deliver=prefiller.deliver,
                on_crash=_crash,
                cores=self._options.cores,
                nice=NICE,
            )
            prefiller.service.attach(thread)
            self._prefillers[link] = prefiller
            thread.start()

    async def _do(self, line: Line, lines: Lines) -> None:
        link = cast("float", line["link"])
        match line["do"]:
            case "raw":
                await self._raw(link, str(line["receiver"]), cast("list[int]", line["sizes"]), cast("int", line["tag"]))
            case "offer":
                door = self._doors[f"{line['place']}/{link:g}"]
                await self._offer(door, str(line["transfer"]), cast("int", line["tokens"]), cast("float", line["pace"]))
            case "compute":
                prefiller = self._prefillers[link]
                prefiller.overlaps = bool(line["overlap"])
                compute_s = await prefiller.compute(str(line["transfer"]), cast("int", line["tokens"]))
                lines.say({"compute_s": compute_s})

    async def _raw(self, link: float, receiver: str, sizes: list[int], tag: int) -> None:
        """As many messages in flight as a transfer of ours has, out of memory that was allocated before."""
        endpoint = await self._over[link].endpoint_of(receiver, LIMIT_S)
        most = max(sizes)
        if most not in self._memory:
            self._memory[most] = [np.ones(most, np.uint8) for _ in range(IN_FLIGHT)]
        memory = self._memory[most]
        flying: list[Operation] = []
        for index, size in enumerate(sizes):
            if len(flying) == IN_FLIGHT:
                await flying.pop(0).wait(LIMIT_S)
            flying.append(endpoint.send(memory[index % IN_FLIGHT][:size], tag + index))
        for operation in flying:
            await operation.wait(LIMIT_S)

    async def _offer(self, door: Door, transfer_id: str, tokens: int, pace: float) -> None:
        """`pace`: bytes a second at which the KV after the first chunk becomes ready; 0: it is there."""
        released = asyncio.Event()
        blocks = range(-(-tokens // BLOCK_TOKENS))
        offer = door.sender.offer(transfer_id, tokens, blocks, LIMIT_S, lambda _: released.set())
        begin_s, ends = time.monotonic(), [*range(CHUNK_TOKENS, tokens, CHUNK_TOKENS), tokens]
        for end in ends if pace else ends[-1:]:
            if pace:
                due_s = begin_s + (end - ends[0]) * door.arena.layout.token_bytes / pace
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            offer.advance(end)
        offer.finish(1)
        await released.wait()


def _crash(error: BaseException) -> None:
    raise SystemExit(f"the step thread died: {error!r}")


async def _main() -> None:
    gc.freeze()  # as workers do: what was imported is no garbage, and looking through it takes tenths of a second
    options = Options(**json.loads(sys.argv[1]))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), sys.stdin)

    def write(content: bytes) -> None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()

    await Child(options).run(Lines(reader, write))


if __name__ == "__main__":
    asyncio.run(_main())
