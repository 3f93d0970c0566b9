"""SchedulerService: translates between protos and the placer."""

from __future__ import annotations

import time
from collections.abc import Callable

from diptych.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from opentelemetry.trace import Span

from services.cluster.membership import LiveWorker, MembershipView
from services.errors import InvalidArgument
from services.rpc.convert import to_duration, to_link, to_prefill_fit, to_step_fit
from services.rpc.interceptor import Context
from services.rpc.server import RpcServer
from services.scheduler.answer import Answer, Worker
from services.scheduler.placement import Wanted
from services.scheduler.placer import PlaceCall, Placer
from services.telemetry import spans, tracing

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
# For callers without a deadline.
DEFAULT_LIMIT_S = 600.0

_ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}
_STATES = {
    "starting": worker_pb2.WORKER_STATE_STARTING,
    "ready": worker_pb2.WORKER_STATE_READY,
    "draining": worker_pb2.WORKER_STATE_DRAINING,
}


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Place, Finish, ListWorkers."""

    def __init__(
        self,
        placer: Placer,
        view: MembershipView,
        hand_off_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hand_off_limit_s`: most time that an answer gives for prefill and hand-off; `clock`: monotonic seconds."""
        self._placer, self._view = placer, view
        self._hand_off_limit_s, self._clock = hand_off_limit_s, clock

    def register(self, server: RpcServer) -> None:
        """Adds itself to a server."""
        server.add(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, self)

    async def Place(  # noqa: N802 - the rpc's name
        self, request: scheduler_pb2.PlaceRequest, context: Context
    ) -> scheduler_pb2.PlaceResponse:
        """See the proto."""
        begin_s = self._clock()
        remaining_s = context.time_remaining()
        limit_s = DEFAULT_LIMIT_S if remaining_s is None else remaining_s
        with tracing.tracer().start_as_current_span(spans.SCHEDULER_PLACE) as span:
            answer = await self._placer.place(_call(request, limit_s))
            queue_s = self._clock() - begin_s
            _describe(span, answer, queue_s)
        return scheduler_pb2.PlaceResponse(
            prefill=None if answer.prefill is None else _ref(answer.prefill),
            decode=_ref(answer.decode),
            transfer_id=answer.transfer_id,
            queue=to_duration(queue_s),
            local_prefill_reason=answer.local_reason,
            hand_off_limit=to_duration(min(self._hand_off_limit_s, limit_s - queue_s)),
        )

    async def Finish(  # noqa: N802
        self, request: scheduler_pb2.FinishRequest, context: Context
    ) -> scheduler_pb2.FinishResponse:
        """See the proto."""
        await self._placer.finish(request.request_id)
        return scheduler_pb2.FinishResponse()

    async def ListWorkers(  # noqa: N802
        self, request: scheduler_pb2.ListWorkersRequest, context: Context
    ) -> scheduler_pb2.ListWorkersResponse:
        """See the proto."""
        return scheduler_pb2.ListWorkersResponse(
            workers=[_view(worker) for worker in self._view.workers()],
            queued_requests=await self._placer.queued_requests(),
        )


def _call(request: scheduler_pb2.PlaceRequest, limit_s: float) -> PlaceCall:
    if not request.request_id:
        raise InvalidArgument("request_id", "must not be empty")
    if request.attempt < 1:
        raise InvalidArgument("attempt", "must be at least 1")
    if request.prompt_tokens < 1:
        raise InvalidArgument("prompt_tokens", "must be at least 1")
    if request.max_new_tokens < 1:
        raise InvalidArgument("max_new_tokens", "must be at least 1")
    wanted = Wanted(
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        max_new_tokens=request.max_new_tokens,
        avoid=frozenset(worker.incarnation for worker in request.avoid),
        answers=request.answers or 1,
    )
    return PlaceCall(request_id=request.request_id, attempt=request.attempt, wanted=wanted, limit_s=limit_s)


def _describe(span: Span, answer: Answer, queue_s: float) -> None:
    span.set_attribute("diptych.queue_s", queue_s)
    span.set_attribute("diptych.decode_worker", answer.decode.name)
    span.set_attribute("diptych.prefill_worker", answer.decode.name if answer.prefill is None else answer.prefill.name)
    span.set_attribute("diptych.local_prefill_reason", answer.local_reason)


def _ref(worker: Worker) -> worker_pb2.WorkerRef:
    return worker_pb2.WorkerRef(name=worker.name, address=worker.address, incarnation=worker.incarnation)


def _view(worker: LiveWorker) -> worker_pb2.WorkerView:
    record, blocks = worker.record, worker.record.blocks
    return worker_pb2.WorkerView(
        ref=worker_pb2.WorkerRef(name=record.name, address=record.address, incarnation=record.incarnation),
        role=_ROLES[record.role],
        state=_STATES[record.state],
        model=record.model,
        context_tokens=record.context_tokens,
        blocks=worker_pb2.BlockCounts(
            total=blocks.total,
            free=blocks.free,
            held=blocks.held,
            leased=blocks.leased,
            swapped=blocks.swapped,
            cached=blocks.cached,
            host=blocks.host,
        ),
        block_tokens=record.block_tokens,
        queued_tokens=record.queued_tokens,
        running=record.running,
        waiting=record.waiting,
        swapped_requests=record.swapped,
        level_requests=record.levels,
        schedule=record.schedule,
        heartbeat_age=to_duration(worker.heartbeat_age_s),
        prefill_fit=to_prefill_fit(record.latency.prefill),
        step_fit=to_step_fit(record.latency.step),
        links=map(to_link, record.links),
    )
