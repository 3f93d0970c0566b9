"""Configuration: one frozen dataclass per service, read once from flags and DIPTYCH_* variables.

A field declared with `setting(...)` becomes the flag `--field-name` and the variable `DIPTYCH_FIELD_NAME`; the flag
wins. A value of the wrong type or out of range refuses to start and names itself, the variable included.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Sequence
from typing import TypeVar

import click

ConfigT = TypeVar("ConfigT")
Scalar = str | int | float | bool


def setting(
    default: Scalar,
    help: str,  # noqa: A002 - the word click and argparse use
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> typing.Any:
    """A config field with its default, help text and limits (like `dataclasses.field`, hence the loose type)."""
    meta = {"help": help, "choices": tuple(choices), "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=meta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """What every service is told."""

    host: str = setting("127.0.0.1", "Address to listen on, and by which the other services reach this one.")
    port: int = setting(0, "gRPC port; 0 takes a free one.", minimum=0, maximum=65535)
    redis: str = setting("redis://127.0.0.1:6379/0", "Redis or Valkey URL (redis://, rediss:// or unix://).")
    otlp: str = setting("", "OTLP gRPC endpoint for traces, for example http://127.0.0.1:4317; empty means off.")
    log_level: str = setting("info", "Least severe log line shown.", choices=("debug", "info", "warning", "error"))
    other_cores: str = setting(
        "", "CPU cores of all threads but a worker's step thread; empty leaves it to the system."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """What prefill and decode workers are told."""

    name: str = setting("", "Name people see; empty means ROLE-PORT.")
    model: str = setting("smollm2", "Folder or Hugging Face id of the model; smollm2 is the embedded one.")
    dtype: str = setting("bf16", "Precision of weights and KV.", choices=("bf16", "fp32"))
    device: str = setting("cpu", "Where to compute: cpu, or cuda:N.")
    kv_mib: int = setting(512, "Memory for KV blocks, in MiB.", minimum=1)
    block_tokens: int = setting(16, "Tokens per KV block.", minimum=1, maximum=1024)
    prefix_cache: str = setting("on", "Whether KV of prompts that begin alike is computed once.", choices=("on", "off"))
    chunk_tokens: int = setting(256, "Most prompt tokens computed in one step.", minimum=1)
    max_batch: int = setting(64, "Most requests in one step.", minimum=1)
    schedule: str = setting(
        "auto",
        "Whose turn it is: fcfs, feedback queues (mlfq, mlfq-naive), strict priorities, or auto, which is fcfs until"
        " queues and the spread of answers' lengths make feedback queues better; on prefill workers, shortest first,"
        " but no prompt is passed by what comes later than eight times its own time after it.",
        choices=("auto", "fcfs", "mlfq", "mlfq-naive", "priority"),
    )
    tenant_weight: str = setting(
        "",
        "Shares of tenants under feedback queues, a list of NAME=WEIGHT: twice the weight is twice the share of what is"
        " computed while both have requests. Tenants that are not named have 1.",
    )
    wire_compression: str = setting(
        "off",
        "KV on its way from prefill to decode in one byte a value, if both workers say so: int8 (the more precise) or"
        " fp8 always, auto only over a connection that is slower than the prefill worker.",
        choices=("off", "int8", "fp8", "auto"),
    )
    step_cores: str = setting("", "CPU cores of the step thread, for example 0 or 0,1; empty leaves it to the system.")
    fault: str = setting(
        "",
        "What goes wrong with the KV that this worker sends and with its acknowledgements, to see what happens then: a "
        "list of rate=1Gbit, delay=5ms, reorder=2ms, cut-after=3MB, cut-in=1MB, drop-ack=1, seed=7. Empty: nothing.",
    )


def load(config: type[ConfigT], service: str, about: str, argv: Sequence[str] | None = None) -> ConfigT:
    """Reads `config` from `argv` (default: the process's) and the environment.

    Exits like any click program: 0 after --help, 2 with one line on stderr for a bad value.
    """
    loaded: list[ConfigT] = []
    command = click.Command(
        service,
        params=[_option(field, typing.get_type_hints(config)[field.name]) for field in dataclasses.fields(config)],  # type: ignore[arg-type]  # a dataclass by contract
        callback=lambda **values: loaded.append(config(**values)),
        help=about,
        context_settings={"max_content_width": 110},
    )
    _run(command, service, argv)
    return loaded[0]


def _run(command: click.Command, service: str, argv: Sequence[str] | None) -> None:
    prog = f"python -m services.{service}"
    try:
        exit_code = command.main(args=None if argv is None else list(argv), prog_name=prog, standalone_mode=False)
    except click.ClickException as error:
        print(f"{service}: {error.format_message()}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if isinstance(exit_code, int):  # --help
        raise SystemExit(exit_code)


def _option(field: dataclasses.Field[typing.Any], kind: type) -> click.Option:
    meta = field.metadata
    name = field.name.replace("_", "-")
    value_type: click.ParamType[typing.Any]
    if meta["choices"]:
        value_type = click.Choice(meta["choices"])
    elif kind is int:
        value_type = click.IntRange(meta["minimum"], meta["maximum"])
    elif kind is float:
        value_type = click.FloatRange(meta["minimum"], meta["maximum"])
    elif kind is bool:
        value_type = click.BOOL
    else:
        value_type = click.STRING
    return click.Option(
        [f"--{name}"],
        type=value_type,
        default=field.default,
        help=meta["help"],
        envvar=f"DIPTYCH_{field.name.upper()}",
        show_envvar=True,
        show_default=True,
    )
