"""`python -m loadtest engine`: the engine's steps on one core, next to what the machine could do at best."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import median

import click
import httpx
import psutil
from rich.table import Table

from kvtransfer.device import Arena
from loadtest.fits import prefill_residuals, step_residuals
from loadtest.peers import Pairs, Server, compare, server_at, table
from services.cli.launch import launched
from services.cli.tables import table_console
from services.engine.card import ModelCard, read_card
from services.engine.catalog import resolve
from services.engine.limits import gemm_flops_per_s, read_bytes_per_s
from services.engine.pool import layout_of
from services.engine.runner import Dtype, Path, Runner, Slice, open_runner
from services.errors import DiptychError, StartError

DECODE = (
    (1, 160),
    (4, 160),
    (8, 160),
    (16, 160),
    (32, 160),
    (64, 160),
    (128, 160),
    (256, 160),
    (1, 1024),
    (8, 1024),
    (16, 1024),
)
"""(batch, context) of the decode steps."""
PREFILL = (128, 512, 1024, 2048, 4096, 8000)
"""Prompt tokens."""
BLOCK_TOKENS = 16
LIMIT_S = 3.0
"""How long one shape is repeated, after a first run that is not counted. What takes longer is timed once."""

PATHS: tuple[Path, ...] = ("fast", "generic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the machine does at best. `read_gbs` in 10⁹ bytes a second, `gemm_gflops` in 10⁹ operations a second."""

    read_gbs: float
    gemm_gflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    """One decode step. `floor_ratio`: its time over that of reading weights and KV once. `gemm_ratio`: share of the
    machine's matrix product rate that its products alone would reach in its time.
    """

    path: Path
    batch: int
    context: int
    ms: float
    floor_ratio: float
    gemm_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRow:
    """One prompt. `gemm_ratio`: the time its layers' matrix products would take at the machine's rate, over its own."""

    path: Path
    tokens: int
    tok_s: float
    gemm_ratio: float


@dataclass(kw_only=True)
class Report:
    """A run. `rss_mib`: memory of the process behind each path, its KV left out."""

    limits: Limits
    chunk_tokens: int
    decode: list[DecodeRow] = field(default_factory=list)
    prefill: list[PrefillRow] = field(default_factory=list)
    rss_mib: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        fields = asdict(self)
        residuals = {"decode_residuals": self.decode_residuals(), "prefill_residuals": self.prefill_residuals()}
        return {**fields.pop("limits"), **fields, **residuals}

    def decode_residuals(self) -> list[float | None]:
        """How far the fitted latency model is from each decode row; each path has a fit of its own."""
        found: dict[str, Iterator[float | None]] = {}
        for path in PATHS:
            rows = [(row.batch, row.context, row.ms) for row in self.decode if row.path == path]
            found[path] = iter(step_residuals(rows))
        return [next(found[row.path]) for row in self.decode]

    def prefill_residuals(self) -> list[float | None]:
        """Likewise of each prefill row."""
        found: dict[str, Iterator[float | None]] = {}
        for path in PATHS:
            rows = [(row.tokens, row.tokens / row.tok_s) for row in self.prefill if row.path == path]
            found[path] = iter(prefill_residuals(rows, self.chunk_tokens))
        return [next(found[row.path]) for row in self.prefill]

    def tables(self, title: str) -> tuple[Table, Table]:
        """For people."""
        steps = Table(title=f"{title}: decode step (floor: weights and KV at {self.limits.read_gbs:.1f} GB/s)")
        for name in ("path", "batch", "context", "ms", "× floor", "of GEMM rate", "fitted"):
            steps.add_column(name, justify="right")
        for row, residual in zip(self.decode, self.decode_residuals(), strict=True):
            ratios = (f"{row.floor_ratio:.2f}", f"{row.gemm_ratio:.2f}", "" if residual is None else f"{residual:+.0%}")
            steps.add_row(row.path, str(row.batch), f"{row.context:,}", f"{row.ms:.1f}", *ratios)
        memory = ", ".join(f"{path} {mib:.0f} MiB" for path, mib in self.rss_mib.items())
        rate = f"{self.limits.gemm_gflops:.0f} GFLOP/s"
        prompts = Table(title=f"{title}: prefill (GEMM rate {rate})", caption=f"resident without KV: {memory}")
        for name in ("path", "tokens", "tokens/s", "of GEMM rate", "fitted"):
            prompts.add_column(name, justify="right")
        for prompt, residual in zip(self.prefill, self.prefill_residuals(), strict=True):
            ratios = (f"{prompt.tok_s:.0f}", f"{prompt.gemm_ratio:.2f}", "" if residual is None else f"{residual:+.0%}")
            prompts.add_row(prompt.path, f"{prompt.tokens:,}", *ratios)
        return steps, prompts


class Bench:
    """One runner over an arena that holds the largest shape."""

    def __init__(self, card: ModelCard, path: Path, dtype: Dtype, limits: Limits, tokens: int, device: str) -> None:
        layout = layout_of(card, dtype, BLOCK_TOKENS)
        self._blocks = -(-tokens // BLOCK_TOKENS) + 1
        arena = Arena(layout, self._blocks, device)
        self._limits, self._card, self._path = limits, card, path
        self._runner: Runner = open_runner(card, dtype=dtype, device=device, array=arena.array, path=path)
        self.arena_bytes = arena.array.nbytes
        # What is in the blocks does not matter for time, but it must be there: memory never written is not read either.
        arena.array[...] = 1
        self._kv_bytes = layout.token_bytes
        self._head_bytes = card.vocab * self._hidden() * (2 if dtype == "bf16" else 4)
        self._width = 2 if dtype == "bf16" else 4

    def _hidden(self) -> int:
        fields = json.loads((self._card.path / "config.json").read_text(encoding="utf-8"))
        return int(fields.get("hidden_size") or fields["n_embd"])

    def decode(self, batch: int, context: int) -> DecodeRow:
        """Times one step of `batch` sequences whose new token is the `context`-th."""
        each = -(-context // BLOCK_TOKENS)
        slices = [
            Slice(token_ids=[300 + i], start=context - 1, blocks=range(i * each, (i + 1) * each), wants_logits=True)
            for i in range(batch)
        ]
        took_s = _median_s(lambda: self._runner.run(slices)[0, 0].item())
        floor_s = (self._runner.weight_bytes + batch * context * self._kv_bytes) / (self._limits.read_gbs * 1e9)
        flops = 2 * batch * self._runner.weight_bytes / self._width
        return DecodeRow(
            path=self._path,
            batch=batch,
            context=context,
            ms=took_s * 1e3,
            floor_ratio=took_s / floor_s,
            gemm_ratio=flops / (self._limits.gemm_gflops * 1e9) / took_s,
        )

    def prefill(self, tokens: int, chunk_tokens: int) -> PrefillRow:
        """Times one prompt, in chunks."""
        ids = random.Random(tokens).choices(range(self._card.vocab), k=tokens)
        blocks = range(-(-tokens // BLOCK_TOKENS))

        def run() -> None:
            for begin in range(0, tokens, chunk_tokens):
                end = min(tokens, begin + chunk_tokens)
                part = Slice(token_ids=ids[begin:end], start=begin, blocks=blocks, wants_logits=end == tokens)
                logits = self._runner.run([part])
            logits[0, 0].item()

        took_s = _median_s(run)
        flops = 2 * tokens * (self._runner.weight_bytes - self._head_bytes) / self._width
        return PrefillRow(
            path=self._path,
            tokens=tokens,
            tok_s=tokens / took_s,
            gemm_ratio=flops / (self._limits.gemm_gflops * 1e9) / took_s,
        )


def _median_s(work: Callable[[], object]) -> float:
    first_s = time.perf_counter()
    work()
    begin_s = time.perf_counter()
    times: list[float] = []
    fewest = 3 if begin_s - first_s < LIMIT_S else 1
    while len(times) < fewest or (len(times) < 31 and time.perf_counter() - begin_s < LIMIT_S):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return median(times)


def _progress(word: str) -> None:
    click.echo(word, err=True)


def _against(url: str, model: str, dtype: Dtype, chunk_tokens: int, pairs: int, as_json: bool) -> None:
    """The comparison with a peer."""

    async def run(ours_url: str) -> tuple[Server, list[Pairs]]:
        ours, theirs = await server_at(ours_url), await server_at(url, cache_prompt=False)
        return theirs, await compare(ours, theirs, pairs, progress=_progress)

    try:
        flags = [f"--model={model}", f"--dtype={dtype}", f"--chunk-tokens={chunk_tokens}", "--prefill=0"]
        with launched([*flags, "--log-level=warning"]) as mesh:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cores[1:] or cores)  # the first one is for the engines
            server, results = asyncio.run(run(mesh.http))
    except (StartError, httpx.HTTPError) as error:
        raise click.ClickException(str(error) or type(error).__name__) from None
    if as_json:
        click.echo(json.dumps({"peer": asdict(server), "rows": [asdict(each) for each in results]}))
    else:
        table_console().print(table(results, server))


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Folder or id of the model.")
@click.option(
    "--dtype", default="bf16", show_default=True, type=click.Choice(["bf16", "fp32"]), help="Of weights and KV."
)
@click.option("--path", "only", type=click.Choice(["fast", "generic"]), help="Only this path; default: both.")
@click.option(
    "--chunk-tokens", default=256, show_default=True, type=click.IntRange(1), help="Prompt tokens in one step."
)
@click.option("--core", default=-1, help="CPU core to run on; default: the last one.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda:N (the generic path alone).")
@click.option("--most-batch", default=256, show_default=True, type=click.IntRange(1), help="Leave larger batches out.")
@click.option(
    "--most-tokens", default=8000, show_default=True, type=click.IntRange(1), help="Leave longer prompts out."
)
@click.option(
    "--peer", default="", help="Instead: compare with this OpenAI-compatible server, http://HOST:PORT, over HTTP."
)
@click.option("--pairs", default=5, show_default=True, type=click.IntRange(1), help="With --peer: runs of each side.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of tables.")
def engine(
    model: str,
    dtype: Dtype,
    only: Path | None,
    chunk_tokens: int,
    core: int,
    device: str,
    most_batch: int,
    most_tokens: int,
    peer: str,
    pairs: int,
    as_json: bool,
) -> None:
    """Time per decode step and prefill tokens/s on one core, with their ratio to the machine's floor.

    With --peer: the same shapes over HTTP, an aggregated mesh of ours against the peer, in interleaved pairs.
    """
    if peer:
        _against(peer, model, dtype, chunk_tokens, pairs, as_json)
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1] if core < 0 else core})
    try:
        files = resolve(model, progress=_progress)
        card = read_card(files.path, files.name)
    except DiptychError as error:
        raise click.ClickException(str(error)) from None
    shapes = [shape for shape in DECODE if shape[0] <= most_batch]
    prompts = [tokens for tokens in PREFILL if tokens <= min(most_tokens, card.context_tokens)]
    _progress("measuring what the machine can do")
    limits = Limits(read_gbs=read_bytes_per_s(device) / 1e9, gemm_gflops=gemm_flops_per_s(device) / 1e9)
    report = Report(limits=limits, chunk_tokens=chunk_tokens)
    for path in (only,) if only else PATHS if device == "cpu" else ("generic",):
        try:
            bench = Bench(card, path, dtype, limits, max([b * c for b, c in shapes] + prompts), device)
        except DiptychError as error:
            raise click.ClickException(str(error)) from None
        for batch, context in shapes:
            row = bench.decode(batch, context)
            _progress(f"{path}: decode {batch} × {context}: {row.ms:.1f} ms, {row.floor_ratio:.2f} × floor")
            report.decode.append(row)
        for tokens in prompts:
            prompt = bench.prefill(tokens, chunk_tokens)
            _progress(
                f"{path}: prefill {tokens}: {prompt.tok_s:.0f} tokens/s, {prompt.gemm_ratio:.2f} of the GEMM rate"
            )
            report.prefill.append(prompt)
        report.rss_mib[path] = psutil.Process().memory_info().rss / 2**20 - bench.arena_bytes / 2**20
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        for table in report.tables(f"{card.name}, {dtype}, {'one core' if device == 'cpu' else device}"):
            table_console().print(table)
