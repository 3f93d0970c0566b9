"""`python -m loadtest compression`: what an encoding of KV on the wire costs in precision, and what it saves.

A text is computed once. For each prefix of it, its KV goes through the messages of a transfer, plain and encoded, into
blocks of its own, and the next tokens are decoded from there: those that plain KV gives, for all alike. So what differs
is the KV alone, and each step compares two distributions of the same token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
import numpy as np
import numpy.typing as npt
from rich.table import Table

from kvtransfer.codec import Encoding
from kvtransfer.coder import Coder
from kvtransfer.device import Arena, Buffer
from kvtransfer.manifest import PIECE_BYTES, Piece, plan
from loadtest.texts import TEXTS
from services.cli.tables import table_console
from services.engine.card import ModelCard, read_card
from services.engine.catalog import resolve
from services.engine.pool import layout_of
from services.engine.runner import Slice, open_runner
from services.errors import DiptychError
from services.gateway.request import TextPrompt
from services.gateway.text import Tokenizer

ENCODINGS: Final[tuple[Encoding, ...]] = ("plain", "int8", "fp8")
LANES: Final = 8
"""Prefixes that are decoded together."""
TOKENS: Final = 16
"""Decoded after each prefix."""
BLOCK_TOKENS: Final = 16
LEAST_PREFIX: Final = 16

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One encoding. `bytes_ratio`: of its messages to those of plain KV. Errors: see `relative_errors`, of each step.
    `agreement`: share of steps that choose the token that plain KV gives; `texts`: share of prefixes
    of which all steps do. Speeds in 10⁹ bytes of plain KV a second, gather and scatter included.
    """

    encoding: Encoding
    bytes_ratio: float
    error_median: float
    error_p95: float
    error_max: float
    agreement: float
    texts: float
    encode_gbs: float
    decode_gbs: float


@dataclass(kw_only=True, slots=True)
class _Moved:
    """Bytes and seconds of one encoding's messages."""

    plain: int = 0
    wire: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


class Bench:
    """A model in bf16 whose arena holds one text's blocks, and those of LANES prefixes of it."""

    def __init__(self, card: ModelCard, tokens: int) -> None:
        self._blocks = -(-(tokens + TOKENS) // BLOCK_TOKENS)
        self._arena = Arena(layout_of(card, "bf16", BLOCK_TOKENS), (1 + LANES) * self._blocks)
        self._coder = Coder(self._arena)
        self._runner = open_runner(card, dtype="bf16", device="cpu", array=self._arena.array)
        self._message = self._arena.staging(2 * PIECE_BYTES)
        self.moved = {encoding: _Moved() for encoding in ENCODINGS}

    def compute(self, token_ids: Sequence[int]) -> list[int]:
        """Computes the text; returns the token that follows each of its prefixes."""
        whole = Slice(token_ids=token_ids, start=0, blocks=self._lane(0), wants_logits=True, wants_all_logits=True)
        return [int(each) for each in self._runner.run([whole]).argmax(-1)]

    def decode(self, prefixes: Sequence[int], given: Rows, encoding: Encoding) -> Rows:
        """Logits (prefixes, steps, vocab) of decoding `given` (prefixes, steps or only the first one) after prefixes
        whose KV was encoded. Where only the first token is given, each step takes the likeliest of the one before.
        """
        for lane, tokens in enumerate(prefixes):
            self._move(tokens, self._lane(1 + lane), encoding)
        steps: list[Rows] = []
        following = given[:, 0]
        for step in range(TOKENS):
            slices = [
                Slice(
                    token_ids=[int(following[lane])],
                    start=tokens + step,
                    blocks=self._lane(1 + lane),
                    wants_logits=True,
                )
                for lane, tokens in enumerate(prefixes)
            ]
            steps.append(np.asarray(self._runner.run(slices).double().numpy()))
            following = given[:, step + 1] if given.shape[1] > step + 1 else steps[-1].argmax(-1)
        return np.stack(steps, axis=1)

    def _lane(self, lane: int) -> range:
        return range(lane * self._blocks, (lane + 1) * self._blocks)

    def _move(self, tokens: int, blocks: range, encoding: Encoding) -> None:
        moved, layout = self.moved[encoding], self._arena.layout
        for piece in plan(layout, layout, tokens, 0, encoding).pieces:
            message = self._message[: piece.wire_bytes]
            moved.encode_s += _timed(self._coder.gather, piece, self._lane(0), message, encoding)
            moved.decode_s += _timed(self._coder.scatter, piece, blocks, message, encoding)
            moved.plain += piece.bytes
            moved.wire += piece.wire_bytes


Copy = Callable[[Piece, Sequence[int], Buffer, Encoding], None]


def _timed(copy: Copy, piece: Piece, blocks: range, message: Buffer, encoding: Encoding) -> float:
    began_s = time.perf_counter()
    copy(piece, blocks, message, encoding)
    return time.perf_counter() - began_s


def tokenized(folder: Path) -> list[list[int]]:
    """The texts as tokens of the model in `folder`."""
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.encode(TextPrompt(text=text, field="text")) for text in TEXTS]


def measure(card: ModelCard, texts: Sequence[Sequence[int]], prefixes: int) -> list[Row]:
    """One row for each encoding, over `prefixes` prefixes, spread evenly over the texts (token ids)."""
    bench = Bench(card, max(map(len, texts)))
    errors: dict[Encoding, list[Rows]] = {encoding: [] for encoding in ENCODINGS}
    agreed: dict[Encoding, list[npt.NDArray[np.bool_]]] = {encoding: [] for encoding in ENCODINGS}
    each = -(-prefixes // len(texts))
    for text in texts:
        following = bench.compute(text)
        lengths = np.linspace(LEAST_PREFIX, len(text), each).astype(int).tolist()
        for part in _parts(lengths):
            first = np.array([[following[tokens - 1]] for tokens in part])
            plain = bench.decode(part, first, "plain")
            chosen = plain.argmax(-1)
            given = np.concatenate([first, chosen], axis=1)
            for encoding in ENCODINGS:
                logits = plain if encoding == "plain" else bench.decode(part, given, encoding)
                errors[encoding].append(relative_errors(logits, plain))
                agreed[encoding].append(logits.argmax(-1) == chosen)
    return [
        _row(encoding, np.concatenate(errors[encoding]), np.concatenate(agreed[encoding]), bench.moved[encoding])
        for encoding in ENCODINGS
    ]


def _parts(lengths: list[int]) -> Iterator[list[int]]:
    for begin in range(0, len(lengths), LANES):
        yield lengths[begin : begin + LANES]


def relative_errors(logits: Rows, exact: Rows) -> Rows:
    """‖logits − exact‖ ÷ ‖exact‖ over the last axis, each row without its mean, which no probability depends on."""
    centred, reference = (rows - rows.mean(axis=-1, keepdims=True) for rows in (logits, exact))
    norms = np.linalg.norm(centred - reference, axis=-1), np.linalg.norm(reference, axis=-1)
    return np.asarray(norms[0] / norms[1])


def _row(encoding: Encoding, errors: Rows, agreed: npt.NDArray[np.bool_], moved: _Moved) -> Row:
    return Row(
        encoding=encoding,
        bytes_ratio=moved.wire / moved.plain,
        error_median=float(np.median(errors)),
        error_p95=float(np.quantile(errors, 0.95)),
        error_max=float(errors.max()),
        agreement=float(agreed.mean()),
        texts=float(agreed.all(axis=-1).mean()),
        encode_gbs=moved.plain / moved.encode_s / 1e9,
        decode_gbs=moved.plain / moved.decode_s / 1e9,
    )


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title)
    names = ("bytes", "error median", "p95", "max", "same token", "same text", "encode GB/s", "decode GB/s")
    for name in ("encoding", *names):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(row.encoding, f"{row.bytes_ratio:.3f}"),
            *(f"{error:.4f}" for error in (row.error_median, row.error_p95, row.error_max)),
            *(f"{row.agreement:.2%}", f"{row.texts:.1%}", f"{row.encode_gbs:.2f}", f"{row.decode_gbs:.2f}"),
        )
    return table


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Folder or id of the model.")
@click.option(
    "--prefixes", default=200, show_default=True, type=click.IntRange(1), help="Beginnings of texts to go on from."
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of a table.")
def compression(model: str, prefixes: int, as_json: bool) -> None:
    """What KV in one byte a value costs: logit errors and greedy agreement on real text, bytes, and speed."""
    try:
        files = resolve(model, progress=lambda line: click.echo(line, err=True))
        card = read_card(files.path, files.name)
        rows = measure(card, tokenized(files.path), prefixes)
    except DiptychError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps({"model": card.name, "prefixes": prefixes, "rows": [asdict(row) for row in rows]}))
    else:
        table_console().print(_table(rows, f"{card.name}, bf16, {prefixes} prefixes × {TOKENS} tokens"))
