"""The mesh that `diptych up` runs: which processes, with which flags. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.cli.cores import Cores, core_list, plan_cores
from services.cli.supervisor import ChildSpec

Flags = Mapping[str, str | int]

HOST = "127.0.0.1"

# One compute thread for each process (the step thread); the others would only fight for its core.
CHILD_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "UCX_WARN_UNUSED_ENV_VARS": "n"}

GATEWAY_STAGE, REST_STAGE = 0, 1  # stopped in this order: nobody loses an answer that can still be given
GATEWAY_DRAIN_S, REST_DRAIN_S = 15.0, 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshOptions:
    """What a mesh on one machine is made of. Ports are real ports here, never 0."""

    model: str = "smollm2"
    prefill: int = 1
    decode: int = 1
    grpc_port: int
    http_port: int
    scheduler_port: int
    redis: str
    dtype: str = "bf16"
    chunk_tokens: int = 256
    kv_mib: int = 512
    otlp: str = ""
    log_level: str = "info"
    cores: Cores = field(default=())


def mesh_children(options: MeshOptions) -> tuple[ChildSpec, ...]:
    """Every process of the mesh, Redis excepted, in the order they are started."""
    plan = plan_cores(options.cores, decode=options.decode, prefill=options.prefill)
    others = core_list(plan.others)
    steps = [("prefill", index, cores) for index, cores in enumerate(plan.prefill_steps)]
    steps += [("decode", index, cores) for index, cores in enumerate(plan.decode_steps)]
    workers = [_worker(options, role, index, cores, others) for role, index, cores in steps]
    return (*workers, _scheduler(options, others), _gateway(options, others))


def _worker(options: MeshOptions, role: str, index: int, step_cores: Cores, others: str) -> ChildSpec:
    name = f"{role}-{index}"
    flags: Flags = {
        "name": name,
        "port": 0,
        "model": options.model,
        "dtype": options.dtype,
        "kv-mib": options.kv_mib,
        "chunk-tokens": options.chunk_tokens,
        "step-cores": core_list(step_cores),
    }
    return _service(options, name, role, flags, others)


def _scheduler(options: MeshOptions, others: str) -> ChildSpec:
    return _service(options, "scheduler", "scheduler", {"port": options.scheduler_port}, others)


def _gateway(options: MeshOptions, others: str) -> ChildSpec:
    flags: Flags = {
        "port": options.grpc_port,
        "http-port": options.http_port,
        "scheduler": f"{HOST}:{options.scheduler_port}",
        "model": options.model,
        "expect": f"{options.prefill}:{options.decode}",
    }
    return _service(options, "gateway", "gateway", flags, others)


def _service(options: MeshOptions, name: str, service: str, flags: Flags, others: str) -> ChildSpec:
    shared = {
        "host": HOST,
        "other-cores": others,
        "redis": options.redis,
        "otlp": options.otlp,
        "log-level": options.log_level,
    }
    gateway = service == "gateway"
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-m", f"services.{service}", *_as_flags({**flags, **shared})),
        env=CHILD_ENV,
        stop_stage=GATEWAY_STAGE if gateway else REST_STAGE,
        drain_s=GATEWAY_DRAIN_S if gateway else REST_DRAIN_S,
    )


def _as_flags(values: Flags) -> Sequence[str]:
    return [f"--{name}={value}" for name, value in values.items()]
