"""The commands of README.md, run as they stand there: on the default ports, one after the other."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.decode.config import DecodeConfig
from services.gateway.config import GatewayConfig
from services.prefill.config import PrefillConfig
from services.scheduler.config import SchedulerConfig

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- test(?P<kind>: background)? -->\n```(?P<language>bash|python)\n(?P<code>.*?)```", re.DOTALL)
BF16_TOKEN_BYTES = 23_040  # of the embedded model: 30 layers × {K, V} × 3 heads × 64 × 2 B
BLOCK_LIMIT_S = 100.0


@dataclass(frozen=True, kw_only=True)
class Block:
    code: str
    language: str
    background: bool


def blocks() -> list[Block]:
    return [
        Block(code=match["code"], language=match["language"], background=match["kind"] is not None)
        for match in BLOCK.finditer((ROOT / "README.md").read_text())
    ]


def command(block: Block) -> list[str]:
    return (
        ["bash", "-euo", "pipefail", "-c", block.code]
        if block.language == "bash"
        else [sys.executable, "-c", block.code]
    )


FOREGROUND = [block for block in blocks() if not block.background]


@pytest.fixture(scope="module")
def running_mesh() -> Iterator[None]:
    """What the README tells to leave running in another shell."""
    (block,) = (block for block in blocks() if block.background)
    process = subprocess.Popen(command(block), cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], BLOCK_LIMIT_S)[0], "not ready in time"
        assert re.fullmatch(r"ready grpc=127.0.0.1:50051 http=http://127.0.0.1:8000\n", process.stdout.readline())
        yield
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def test_the_readme_has_commands_of_every_kind() -> None:
    code = "\n".join(block.code for block in blocks())
    for word in (
        "make demo",
        "diptych up",
        "diptych generate",
        "diptych workers",
        "curl",
        "buf curl",
        "loadtest smoke",
        "openai",
    ):
        assert word in code


def test_the_first_screen_says_it_all() -> None:
    first = (ROOT / "README.md").read_text().partition("## Install")[0]
    assert len(first.splitlines()) <= 75
    assert all(word in first for word in ("══ KV blocks over UCX ══", "8. ", "make demo", "diptych up"))
    listed = set(re.findall(r"^([a-z]\S*/) ", first, re.MULTILINE))
    there = {
        f"{path.parent.relative_to(ROOT)}/"
        for package in ("services", "kvtransfer", "loadtest")
        for path in [ROOT / package / "__init__.py", *(ROOT / package).glob("*/__init__.py")]
    }
    assert there - {"services/", "kvtransfer/transport/"} <= listed
    assert all((ROOT / folder).is_dir() for folder in listed)


def test_the_table_of_flags_names_every_flag_of_every_service_and_no_other() -> None:
    table = (ROOT / "README.md").read_text().partition("| flag | of |")[2].partition("\n\n")[0]
    named = re.findall(r"`--([a-z-]+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:]))
    configs = (GatewayConfig, SchedulerConfig, PrefillConfig, DecodeConfig)
    there = {field.name.replace("_", "-") for config in configs for field in dataclasses.fields(config)}
    assert sorted(named) == sorted(there)


@pytest.mark.slow
def test_the_demo_answers_paris_and_shows_its_phases() -> None:
    (block,) = (block for block in FOREGROUND if "make demo" in block.code)
    begin_s = time.monotonic()
    done = subprocess.run(command(block), cwd=ROOT, capture_output=True, text=True, timeout=BLOCK_LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout
    for word in ("queue", "prefill", "transfer", "first token", "time per token", "GB/s", "ucx", "stopped cleanly"):
        assert word in done.stderr, f"{word} missing after {time.monotonic() - begin_s:.0f} s"
    tokens, moved = re.search(r"(\d+) prompt tokens", done.stderr), re.search(r"([\d,]+) B in", done.stderr)
    assert tokens and moved
    assert int(moved[1].replace(",", "")) == int(tokens[1]) * BF16_TOKEN_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [block for block in FOREGROUND if "make demo" not in block.code],
    ids=lambda block: block.code.split("\n")[0][:40],
)
def test_a_block_of_the_readme_runs(running_mesh: None, block: Block) -> None:
    done = subprocess.run(command(block), cwd=ROOT, capture_output=True, text=True, timeout=BLOCK_LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"error"' not in done.stdout
    if "capital of France" in block.code:
        assert "Paris" in re.sub(r'"\s*\}\s*\{\s*"text":\s*"', "", done.stdout)
