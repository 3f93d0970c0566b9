"""What `loadtest transfer` reports: measured cases, and the rows made of them. Pure but for the table's types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Literal

from rich.table import Table

Transport = Literal["raw-ucx", "ucx", "grpc", "memcpy"]

RAW: Transport = "raw-ucx"
OURS: Transport = "ucx"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is moved, by what, over a link of `link_gbps` · 10⁹ bits a second (None: as fast as it is).

    `overlap`: the KV becomes ready chunk by chunk while it is pulled, and not all at once before.
    """

    layout: str
    tokens: int
    transport: Transport
    link_gbps: float | None = None
    overlap: bool = False

    @property
    def raw(self) -> Case:
        """The raw loop that it is compared with."""
        return replace(self, transport=RAW, overlap=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One repetition: `bytes` in `duration_s`. With a real prefill: how long it computed, and how much of the transfer
    it did not hide. `paced`: the prefill, not the link, decided how long it took.
    """

    bytes: int
    duration_s: float
    exposed_s: float | None = None
    compute_s: float | None = None
    paced: bool = False

    @property
    def gbs(self) -> float:
        """10⁹ bytes a second."""
        return self.bytes / self.duration_s / 1e9 if self.duration_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Medians of one case.

    `goodput_over_raw`: of the repetitions' ratios to the raw loop's rate in the same repetition; None where a prefill
    set the pace. `exposed_over_prefill`: time from the end of the prompt's computation until everything was in place
    and acknowledged, over the computation; None without one. `step_p95_ratio`: 95th percentile of decode steps while
    such transfers arrive over that of the steps between them; None where it was not measured.
    """

    layout: str
    tokens: int
    transport: Transport
    link_gbps: float | None
    overlap: bool
    gbs: float
    goodput_over_raw: float | None
    exposed_over_prefill: float | None
    step_p95_ratio: float | None

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


Measured = Mapping[Case, Sequence[Sample]]


def rows(measured: Measured, step_p95_ratios: Mapping[Case, float]) -> list[Row]:
    """One row for each case, as they were measured. The i-th samples of all cases belong together."""
    return [
        _row(case, samples, measured.get(case.raw, ()), step_p95_ratios.get(case)) for case, samples in measured.items()
    ]


def _row(case: Case, samples: Sequence[Sample], raw: Sequence[Sample], step_p95_ratio: float | None) -> Row:
    paced = any(sample.paced for sample in samples)
    ratios = [] if paced else [ours.gbs / theirs.gbs for ours, theirs in zip(samples, raw, strict=False) if theirs.gbs]
    exposed = [
        sample.exposed_s / sample.compute_s for sample in samples if sample.compute_s and sample.exposed_s is not None
    ]
    return Row(
        layout=case.layout,
        tokens=case.tokens,
        transport=case.transport,
        link_gbps=case.link_gbps,
        overlap=case.overlap,
        gbs=median(sample.gbs for sample in samples),
        goodput_over_raw=median(ratios) if ratios else None,
        exposed_over_prefill=median(exposed) if exposed else None,
        step_p95_ratio=step_p95_ratio,
    )


def table(found: Sequence[Row]) -> Table:
    """For people."""
    made = Table(title="KV transfers between two processes of this machine", title_justify="left")
    for name in ("layout", "tokens", "transport", "link", "overlap", "GB/s", "÷ raw", "exposed", "step p95"):
        made.add_column(name, justify="left" if name in ("layout", "transport") else "right")
    for row in found:
        made.add_row(
            row.layout,
            f"{row.tokens:,}",
            row.transport,
            "–" if row.link_gbps is None else f"{row.link_gbps:g} Gb/s",
            "yes" if row.overlap else "no",
            f"{row.gbs:.3f}",
            "–" if row.goodput_over_raw is None else f"{row.goodput_over_raw:.2f}",
            "–" if row.exposed_over_prefill is None else f"{row.exposed_over_prefill:.1%}",
            "–" if row.step_p95_ratio is None else f"× {row.step_p95_ratio:.2f}",
        )
    return made
