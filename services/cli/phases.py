"""Where the time of a request went, as plain values and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from diptych.v1 import request_pb2
from google.protobuf.duration_pb2 import Duration
from rich.table import Table

from services.rpc.convert import to_seconds

FINISH_WORDS: Mapping[request_pb2.FinishReason.ValueType, str] = {
    request_pb2.FINISH_REASON_STOP: "stop",
    request_pb2.FINISH_REASON_LENGTH: "length",
}


class TransferValues(TypedDict):
    """A hand-off. Seconds, bytes, GB/s (1e9)."""

    bytes: int
    pieces: int
    transport: str
    duration_s: float
    exposed_s: float
    gigabytes_per_second: float
    encoding: str


class TurnValues(TypedDict):
    """What scheduling did with a request. Seconds, bytes."""

    preemptions: int
    recomputed: int
    swapped_bytes: int
    waiting_s: float
    lowest_level: int


class PhaseValues(TypedDict):
    """Phases of a request, in seconds; None for what did not happen."""

    tokenize_s: float | None
    queue_s: float | None
    prefill_queue_s: float | None
    prefill_compute_s: float | None
    prefill_chunks: int
    transfer: TransferValues | None
    first_token_s: float | None
    time_per_token_s: float | None
    total_s: float | None
    prefill_worker: str
    decode_worker: str
    local_prefill_reason: str
    placements: int
    turns: TurnValues | None


def phase_values(phases: request_pb2.Phases) -> PhaseValues:
    """Plain values of the proto, for JSON and for the table."""

    def seconds(name: str, duration: Duration) -> float | None:
        return to_seconds(duration) if phases.HasField(name) else None  # type: ignore[arg-type]  # a field of Phases

    return PhaseValues(
        tokenize_s=seconds("tokenize", phases.tokenize),
        queue_s=seconds("queue", phases.queue),
        prefill_queue_s=seconds("prefill_queue", phases.prefill_queue),
        prefill_compute_s=seconds("prefill_compute", phases.prefill_compute),
        prefill_chunks=phases.prefill_chunks,
        transfer=_transfer_values(phases.transfer) if phases.HasField("transfer") else None,
        first_token_s=seconds("first_token", phases.first_token),
        time_per_token_s=seconds("time_per_token", phases.time_per_token),
        total_s=seconds("total", phases.total),
        prefill_worker=phases.prefill_worker,
        decode_worker=phases.decode_worker,
        local_prefill_reason=phases.local_prefill_reason,
        placements=phases.placements,
        turns=_turn_values(phases.turns) if phases.HasField("turns") else None,
    )


def _transfer_values(report: request_pb2.TransferReport) -> TransferValues:
    return TransferValues(
        bytes=report.bytes,
        pieces=report.pieces,
        transport=report.transport,
        duration_s=to_seconds(report.duration),
        exposed_s=to_seconds(report.exposed),
        gigabytes_per_second=report.gigabytes_per_second,
        encoding=report.encoding,
    )


def _turn_values(turns: request_pb2.Turns) -> TurnValues:
    return TurnValues(
        preemptions=turns.preemptions,
        recomputed=turns.recomputed,
        swapped_bytes=turns.swapped_bytes,
        waiting_s=to_seconds(turns.waiting),
        lowest_level=turns.lowest_level,
    )


def phase_table(usage: request_pb2.Usage, phases: PhaseValues) -> Table:
    """The table that `diptych generate` and the demo show."""
    table = Table(title="phases", title_justify="left")
    table.add_column("phase")
    table.add_column("time", justify="right")
    table.add_column("detail")
    table.add_row("tokenize", _ms(phases["tokenize_s"]), f"{usage.prompt_tokens} prompt tokens")
    table.add_row("queue", _ms(phases["queue_s"]), f"placements: {phases['placements']}")
    table.add_row("prefill queue", _ms(phases["prefill_queue_s"]), "")
    table.add_row("prefill", _ms(phases["prefill_compute_s"]), _prefill_detail(usage, phases))
    if (transfer := phases["transfer"]) is not None:
        table.add_row("transfer", _ms(transfer["duration_s"]), _transfer_detail(transfer))
    table.add_row("first token", _ms(phases["first_token_s"]), "from arrival at the gateway")
    detail = f"{usage.completion_tokens} tokens on {phases['decode_worker']}"
    table.add_row("time per token", _ms(phases["time_per_token_s"]), detail)
    if (turns := phases["turns"]) is not None and turns["waiting_s"]:
        table.add_row("waiting", _ms(turns["waiting_s"]), _turns_detail(turns))
    table.add_row("total", _ms(phases["total_s"]), "")
    return table


def _prefill_detail(usage: request_pb2.Usage, phases: PhaseValues) -> str:
    chunks = phases["prefill_chunks"]
    words = f"{_count(chunks, 'chunk')} on {phases['prefill_worker']}"
    if usage.cached_tokens:
        words += f", {usage.cached_tokens} tokens cached"
    if phases["local_prefill_reason"]:
        words += f" ({phases['local_prefill_reason']})"
    return words


def _transfer_detail(transfer: TransferValues) -> str:
    encoded = "" if transfer["encoding"] in ("", "plain") else f" as {transfer['encoding']}"
    return (
        f"{transfer['bytes']:,} B in {_count(transfer['pieces'], 'piece')} over {transfer['transport']}{encoded}, "
        f"{transfer['gigabytes_per_second']:.3f} GB/s, {_ms(transfer['exposed_s'])} exposed"
    )


def _turns_detail(turns: TurnValues) -> str:
    words = f"between steps: {_count(turns['preemptions'], 'preemption')}, lowest level {turns['lowest_level']}"
    if turns["swapped_bytes"]:
        words += f", {turns['swapped_bytes']:,} B swapped"
    if turns["recomputed"]:
        words += f", computed again {_count(turns['recomputed'], 'time')}"
    return words


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:,.1f} ms"
