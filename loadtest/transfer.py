"""`python -m loadtest transfer`: our KV transfer next to what its parts can do alone, in one run.

Two processes on this machine. The receiving one is what a decode worker is, its step thread with a core to itself; all
other threads of both share the others. Repetitions are interleaved, the first one does not count, medians are reported.

- raw-ucx: tagged messages over the same transport with the same settings, in the sizes of the pieces, as many in
  flight, out of and into memory that was allocated before: no gather, no scatter, no control messages, no checksum.
- ucx: ours, over the real gRPC stream, out of and into blocks, with the checksums that workers use; from the pull's
  first word to its acknowledgement. With overlap the KV becomes ready chunk by chunk: for smollm2 a real prefill
  computes it (GB/s is then the rate while something was on the wire, and prefill sets the pace); for the 8B shape,
  which has no model here, a clock plays a prefill a little faster than the link.
- grpc: the same bytes in gRPC messages. memcpy: the same bytes within one process.

A slower link is a token bucket at the sender. Step times: decode steps (8 × 160) while 1,024-token KVs arrive, one
after the other without pause, against the steps of the windows between them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import click

from kvtransfer import TransferError, UcxTransport
from loadtest.decode_steps import DecodeSteps
from loadtest.report import quantile
from loadtest.transfer_peer import BLOCK_TOKENS, ENGINE, SHAPES
from loadtest.transfer_rows import OURS, RAW, Case, Row, Sample, rows, table
from loadtest.transfer_target import Peer, Target, cases_of, link_bytes_per_s
from services.cli.tables import table_console
from services.engine.card import ModelCard, read_card
from services.engine.catalog import resolve
from services.engine.pool import layout_of
from services.errors import DiptychError
from services.process import keep_to_cores

WITH_ENGINE: Final = "smollm2"
PLAYED_OVER_RAW: Final = 1.25
"""A played prefill is so much faster than the raw loop was."""

LONG_S: Final = 15.0
"""A prompt that computes for longer is computed once, not in every repetition."""

STEP_TOKENS: Final = 1024
STEP_WINDOWS: Final = 10
STEP_PULLS: Final = 10
"""In each loaded window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure. A link of None is not slowed down."""

    shapes: Sequence[str]
    tokens: Sequence[int]
    links_gbps: Sequence[float | None]
    repeat: int
    steps: bool
    model: str
    cores: Sequence[int]

    @property
    def uses_engine(self) -> bool:
        """Whether the model has to be loaded."""
        return WITH_ENGINE in self.shapes

    @property
    def most_tokens(self) -> int:
        """What the memory on both sides must hold."""
        return max(*self.tokens, STEP_TOKENS if self.steps and self.uses_engine else 1)


@dataclass(kw_only=True)
class Bench:
    """One run."""

    plan: Plan
    target: Target
    measured: dict[Case, list[Sample]] = field(default_factory=dict)
    step_p95_ratios: dict[Case, float] = field(default_factory=dict)
    _long_prefills: dict[tuple[int, float, bool], Sample] = field(default_factory=dict)

    async def run(self) -> list[Row]:
        """Measures everything."""
        for repetition in range(self.plan.repeat + 1):
            click.echo(f"repetition {repetition} of {self.plan.repeat}", err=True)
            for shape, tokens in cases_of(self.plan.shapes, self.plan.tokens):
                for link_gbps in self.plan.links_gbps:
                    await self._transfers(shape, tokens, link_gbps, counts=repetition > 0)
                self._note(
                    Case(layout=shape, tokens=tokens, transport="grpc"), await self.target.grpc_bytes(shape, tokens)
                )
                self._note(Case(layout=shape, tokens=tokens, transport="memcpy"), self.target.memcpy(shape, tokens))
            if repetition == 0:
                self.measured.clear()  # connections were made and memory touched for the first time
        return rows(self.measured, self.step_p95_ratios)

    async def _transfers(self, shape: str, tokens: int, link_gbps: float | None, *, counts: bool) -> None:
        link = link_bytes_per_s(link_gbps)
        case = Case(layout=shape, tokens=tokens, transport=RAW, link_gbps=link_gbps)
        raw = await self.target.raw(shape, tokens, link)
        self._note(case, raw)
        ours = Case(layout=shape, tokens=tokens, transport=OURS, link_gbps=link_gbps)
        overlapped = Case(layout=shape, tokens=tokens, transport=OURS, link_gbps=link_gbps, overlap=True)
        alone = await self.target.pull(shape, tokens, link)
        if shape != WITH_ENGINE:
            self._note(ours, alone)
            pace = PLAYED_OVER_RAW * raw.bytes / raw.duration_s
            self._note(overlapped, await self.target.pull(shape, tokens, link, pace))
        elif counts:
            after = await self._prefill(tokens, link, overlap=False)
            self._note(ours, replace(alone, exposed_s=after.exposed_s, compute_s=after.compute_s))
            self._note(overlapped, await self._prefill(tokens, link, overlap=True))

    async def _prefill(self, tokens: int, link: float, *, overlap: bool) -> Sample:
        known = self._long_prefills.get((tokens, link, overlap))
        sample = known or await self.target.prefill(ENGINE, tokens, link, overlap=overlap)
        if (sample.compute_s or 0.0) > LONG_S:
            self._long_prefills[tokens, link, overlap] = sample
        return sample

    async def steps(self, steps: DecodeSteps) -> None:
        """Decode steps while KVs arrive, and while none does, window by window."""
        for _ in range(STEP_WINDOWS):
            steps.enter("loaded")
            begin_s = asyncio.get_running_loop().time()
            for _ in range(STEP_PULLS):
                await self.target.pull(WITH_ENGINE, STEP_TOKENS, 0.0)
            steps.enter("quiet")
            await asyncio.sleep(asyncio.get_running_loop().time() - begin_s)
        steps.enter("")
        found = {window: steps.durations_s(window) for window in ("loaded", "quiet")}
        loaded_s, quiet_s = quantile(found["loaded"], 0.95), quantile(found["quiet"], 0.95)
        if loaded_s and quiet_s:
            counts = f"{len(found['loaded'])} steps loaded, {len(found['quiet'])} quiet"
            click.echo(f"decode p95: {loaded_s * 1e3:.1f} ms loaded, {quiet_s * 1e3:.1f} ms quiet ({counts})", err=True)
            self.step_p95_ratios[Case(layout=WITH_ENGINE, tokens=STEP_TOKENS, transport=OURS)] = loaded_s / quiet_s

    def _note(self, case: Case, sample: Sample) -> None:
        self.measured.setdefault(case, []).append(sample)


async def _run(plan: Plan, card: ModelCard | None) -> list[Row]:
    places = dict.fromkeys((*plan.shapes, *([ENGINE] if plan.uses_engine else [])), plan.most_tokens)
    others = plan.cores[1:] or plan.cores
    links = [link_bytes_per_s(link_gbps) for link_gbps in plan.links_gbps]
    if 0.0 not in links:
        links.append(0.0)
    peer, hello = await Peer.start({"places": places, "links": links, "model": plan.model, "cores": list(others)})
    incarnation = secrets.token_hex(8)
    transport = UcxTransport(incarnation)
    target = Target(transport, incarnation, peer, hello)
    try:
        await transport.start()
        for shape in plan.shapes:
            target.prepare(shape, SHAPES[shape], plan.most_tokens)
        bench = Bench(plan=plan, target=target)
        steps = None
        if card:
            own = DecodeSteps.blocks(BLOCK_TOKENS)
            arena = target.prepare(ENGINE, layout_of(card, "bf16", BLOCK_TOKENS), plan.most_tokens, own)
            steps = DecodeSteps(card, arena, plan.cores[:1]) if plan.steps else None
        keep_to_cores(frozenset(others))
        found = await bench.run()
        if steps:
            steps.start()
            await bench.steps(steps)
            await asyncio.to_thread(steps.stop)
            found = rows(bench.measured, bench.step_p95_ratios)
        return found
    finally:
        await peer.aclose()
        await target.aclose()
        await transport.aclose()


@click.command()
@click.option("--layout", "shapes", multiple=True, type=click.Choice(sorted(SHAPES)), help="Only these; default: all.")
@click.option("--tokens", multiple=True, type=click.IntRange(1, 8192), help="Default: 16, 128, 1024 and 4096.")
@click.option(
    "--link-gbps",
    "links",
    multiple=True,
    type=click.FloatRange(0),
    help="Links of so many 10⁹ bits a second; 0: as fast as it is. Default: 0 and 1.",
)
@click.option("--repeat", default=5, show_default=True, type=click.IntRange(1), help="Repetitions that count.")
@click.option("--steps/--no-steps", default=True, show_default=True, help="Decode steps while KVs arrive.")
@click.option("--model", default="smollm2", show_default=True, help="Of the prefill and the decode steps.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
def transfer(
    shapes: tuple[str, ...],
    tokens: tuple[int, ...],
    links: tuple[float, ...],
    repeat: int,
    steps: bool,
    model: str,
    as_json: bool,
) -> None:
    """Our KV transfer beside a raw UCX loop, gRPC bytes and memcpy; and what it does to decode steps."""
    plan = Plan(
        shapes=shapes or tuple(SHAPES),
        tokens=tokens or (16, 128, 1024, 4096),
        links_gbps=[link or None for link in links or (0.0, 1.0)],
        repeat=repeat,
        steps=steps,
        model=model,
        cores=sorted(os.sched_getaffinity(0)),
    )
    try:
        card = None
        if plan.uses_engine:
            files = resolve(model, progress=lambda text: click.echo(text, err=True))
            card = read_card(files.path, files.name)
        gc.freeze()  # as workers do
        found = asyncio.run(_run(plan, card))
    except (DiptychError, TransferError, RuntimeError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps({"rows": [row.as_dict() for row in found]}))
    else:
        table_console().print(table(found))
