"""A gateway with both doors before scripted peers: real gRPC and HTTP servers whose answers a test writes down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from diptych.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    request_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
)
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from services.gateway.closing import Closing
from services.gateway.door import Gateway
from services.gateway.http import application
from services.gateway.http_server import HttpServer
from services.gateway.mesh import Mesh, Served
from services.gateway.metrics import Metrics
from services.gateway.peers import SchedulerClient, WorkerClient
from services.gateway.servicer import GatewayServicer
from services.gateway.text import Tokenizer
from services.rpc.channels import Channels
from services.rpc.convert import to_duration
from services.rpc.server import RpcServer

CONTEXT_TOKENS = 64
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
STOP, LENGTH = request_pb2.FINISH_REASON_STOP, request_pb2.FINISH_REASON_LENGTH

PrefillScript = Callable[[prefill_pb2.PrefillRequest, grpc.aio.ServicerContext], Awaitable[prefill_pb2.PrefillResponse]]
DecodeScript = Callable[[decode_pb2.DecodeRequest, grpc.aio.ServicerContext], AsyncIterator[decode_pb2.DecodeResponse]]


def byte_tokenizer() -> FastTokenizer:
    """One token a byte, then an end token."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a"], trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_to_id("<|end|>")
VOCAB = TOKENIZER.get_vocab_size()


def ids(text: str) -> list[int]:
    """Tokens of a text."""
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def tokens(offset: int, token_ids: Sequence[int], reason: int = 0) -> decode_pb2.DecodeResponse:
    """One message of a decode leg; with a reason it is the last."""
    message = decode_pb2.DecodeResponse(offset=offset, token_ids=token_ids, finish_reason=reason)
    if offset == 0:
        report = request_pb2.TransferReport(bytes=1000, pieces=2, transport="ucx", gigabytes_per_second=1.5)
        message.begin.CopyFrom(decode_pb2.DecodeBegin(transfer=report, cached_tokens=2, prefill_chunks=4))
    return message


@dataclass(kw_only=True)
class ScriptedWorker(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """A worker: prefill and decode in one server, each call played by the next script."""

    name: str
    prefills: list[PrefillScript] = field(default_factory=list)
    decodes: list[DecodeScript] = field(default_factory=list)
    prefill_requests: list[prefill_pb2.PrefillRequest] = field(default_factory=list)
    decode_requests: list[decode_pb2.DecodeRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # a call is there
    ended: asyncio.Queue[str] = field(default_factory=asyncio.Queue)  # "prefill" or "decode", once its call is over
    ref: worker_pb2.WorkerRef = field(default_factory=worker_pb2.WorkerRef)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext) -> object:  # noqa: N802
        self.prefill_requests.append(request)
        self.begun.set()
        try:
            return await self.prefills.pop(0)(request, context)
        finally:
            self.ended.put_nowait("prefill")

    async def Decode(  # noqa: N802
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[object]:
        self.decode_requests.append(request)
        self.begun.set()
        try:
            async for message in self.decodes.pop(0)(request, context):
                yield message
        finally:
            self.ended.put_nowait("decode")

    async def Pull(self, request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not scripted")
        yield

    async def Release(self, request: kv_transfer_pb2.ReleaseRequest, context: object) -> object:  # noqa: N802
        self.released.append(request.transfer_id)
        return kv_transfer_pb2.ReleaseResponse()


@dataclass(kw_only=True)
class ScriptedScheduler:
    """Places requests on (prefill, decode) pairs in order; the last pair serves all further ones."""

    pairs: list[tuple[ScriptedWorker | None, ScriptedWorker]] = field(default_factory=list)
    placed: list[scheduler_pb2.PlaceRequest] = field(default_factory=list)
    finished: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    in_line: asyncio.Event = field(default_factory=asyncio.Event)
    left_line: asyncio.Event = field(default_factory=asyncio.Event)
    failures: list[tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]] = field(default_factory=list)
    hold: asyncio.Event | None = None
    views: list[worker_pb2.WorkerView] = field(default_factory=list)

    async def Place(self, request: scheduler_pb2.PlaceRequest, context: grpc.aio.ServicerContext) -> object:  # noqa: N802
        self.placed.append(request)
        if self.hold is not None:
            self.in_line.set()
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.left_line.set()
                raise
        if self.failures:
            await context.abort(*self.failures.pop(0))
        prefill, decode = self.pairs.pop(0) if len(self.pairs) > 1 else self.pairs[0]
        response = scheduler_pb2.PlaceResponse(
            decode=decode.ref, transfer_id=f"transfer-{len(self.placed)}", hand_off_limit=to_duration(30.0)
        )
        response.queue.CopyFrom(to_duration(0.25))
        if prefill is None:
            response.local_prefill_reason = "no prefill worker"
        else:
            response.prefill.CopyFrom(prefill.ref)
        return response

    async def Finish(self, request: scheduler_pb2.FinishRequest, context: object) -> object:  # noqa: N802
        self.finished.put_nowait(request.request_id)
        return scheduler_pb2.FinishResponse()

    async def ListWorkers(self, request: object, context: object) -> object:  # noqa: N802
        return scheduler_pb2.ListWorkersResponse(workers=self.views)


@dataclass(kw_only=True)
class Scene:
    """The gateway under test and its peers."""

    scheduler: ScriptedScheduler
    prefill: ScriptedWorker
    decode: ScriptedWorker
    spare: ScriptedWorker
    gateway: Gateway
    stub: gateway_pb2_grpc.GatewayServiceStub
    grpc: str
    http: str
    scheduler_port: int
    servers: dict[str, RpcServer]

    def add_views(self, *, state: int = worker_pb2.WORKER_STATE_READY, model: str = "tiny") -> None:
        """Lists one decode and one prefill worker."""
        for worker, role in ((self.prefill, worker_pb2.ROLE_PREFILL), (self.decode, worker_pb2.ROLE_DECODE)):
            self.scheduler.views.append(
                worker_pb2.WorkerView(ref=worker.ref, role=role, state=state, model=model, context_tokens=50)
            )


async def _serve_worker(worker: ScriptedWorker, server: RpcServer) -> None:
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server.server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server.server)
    kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(worker, server.server)
    address = f"127.0.0.1:{server.bind()}"
    worker.ref.CopyFrom(worker_pb2.WorkerRef(name=worker.name, address=address, incarnation=worker.name.ljust(16, "0")))
    await server.start()


@asynccontextmanager
async def scene(*, expect_prefill: int = 0, request_limit_s: float = 30.0) -> AsyncIterator[Scene]:
    """A running gateway of the model "tiny" (one token a byte); without a script the first pair is prefill, decode."""
    prefill, decode, spare = (ScriptedWorker(name=name) for name in ("prefill-0", "decode-0", "decode-1"))
    scheduler = ScriptedScheduler(pairs=[(prefill, decode)])
    servers = {name: RpcServer("127.0.0.1", 0, []) for name in ("prefill", "decode", "spare", "scheduler", "gateway")}
    for worker, name in ((prefill, "prefill"), (decode, "decode"), (spare, "spare")):
        await _serve_worker(worker, servers[name])
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, servers["scheduler"].server)
    scheduler_port = servers["scheduler"].bind()
    scheduler_address = f"127.0.0.1:{scheduler_port}"
    await servers["scheduler"].start()

    channels = Channels()
    clients = SchedulerClient(channels, scheduler_address), WorkerClient(channels)
    closing = Closing(*clients)
    mesh = Mesh(
        model=Served(name="tiny", vocab=VOCAB, context_tokens=CONTEXT_TOKENS, eos_token_ids=(END,)),
        tokenizer=Tokenizer(byte_tokenizer(), TEMPLATE, {}),
        scheduler=clients[0],
        workers=clients[1],
        metrics=Metrics(),
        closing=closing,
        draw_seed=lambda: 4711,
    )
    numbers = iter(range(1, 1000))
    gateway = Gateway(
        mesh,
        request_limit_s=request_limit_s,
        expect_prefill=expect_prefill,
        expect_decode=1,
        new_id=lambda: f"request{next(numbers)}",
    )
    door, http = servers["gateway"], HttpServer("127.0.0.1", 0)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(GatewayServicer(gateway), door.server)
    address, http_address = f"127.0.0.1:{door.bind()}", f"http://127.0.0.1:{http.bind()}"
    await door.start()
    await http.start(application(gateway))
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Scene(
                scheduler=scheduler,
                prefill=prefill,
                decode=decode,
                spare=spare,
                gateway=gateway,
                stub=gateway_pb2_grpc.GatewayServiceStub(channel),
                grpc=address,
                http=http_address,
                scheduler_port=scheduler_port,
                servers=servers,
            )
    finally:
        await gateway.drain(0.0)
        await http.stop(0.0)
        await closing.aclose()
        await channels.aclose()
        for server in servers.values():
            await server.stop(0.0)


def prefilling(token_id: int, reason: int = 0, after: asyncio.Event | None = None) -> PrefillScript:
    """A prefill leg that answers with a token, once `after` is set."""

    async def script(request: object, context: object) -> prefill_pb2.PrefillResponse:
        if after is not None:
            await after.wait()
        return prefill_pb2.PrefillResponse(
            token_id=token_id, finish_reason=reason, cached_tokens=1, chunks=1, compute=to_duration(0.5)
        )

    return script


def decoding(*messages: decode_pb2.DecodeResponse, after: asyncio.Event | None = None) -> DecodeScript:
    """A decode leg that sends these messages and ends, once `after` is set."""

    async def script(request: object, context: object) -> AsyncIterator[decode_pb2.DecodeResponse]:
        if after is not None:
            await after.wait()
        for message in messages:
            yield message

    return script


def failing_decode(
    code: grpc.StatusCode, *messages: decode_pb2.DecodeResponse, after: asyncio.Event | None = None
) -> DecodeScript:
    """A decode leg that sends these messages and fails, once `after` is set."""

    async def script(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[decode_pb2.DecodeResponse]:
        for message in messages:
            yield message
        if after is not None:
            await after.wait()
        await context.abort(code, "scripted")

    return script


def failing_prefill(code: grpc.StatusCode, after: asyncio.Event | None = None) -> PrefillScript:
    """A prefill leg that fails, once `after` is set."""

    async def script(request: object, context: grpc.aio.ServicerContext) -> prefill_pb2.PrefillResponse:
        if after is not None:
            await after.wait()
        await context.abort(code, "scripted")
        raise AssertionError

    return script


def endless_decode(*messages: decode_pb2.DecodeResponse) -> DecodeScript:
    """A decode leg that sends these messages and then nothing until it is cancelled."""

    async def script(request: object, context: object) -> AsyncIterator[decode_pb2.DecodeResponse]:
        for message in messages:
            yield message
        await asyncio.Event().wait()

    return script


async def endless_prefill(request: object, context: object) -> prefill_pb2.PrefillResponse:
    """A prefill leg that computes until it is cancelled."""
    await asyncio.Event().wait()
    raise AssertionError
