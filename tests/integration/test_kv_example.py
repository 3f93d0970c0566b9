"""The example that engineers begin with runs as it is, and is short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_moves_blocks_between_two_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtransfer.example"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # 4 layers × {K, V} × 1,000 tokens × 2 heads × 64 × fp32; the first block holds 7, the last one 8
    assert "4096000 bytes in 8 pieces, first token 42 [7. 8.]" in done.stdout
    assert "the receiver exits with 0, 63 of 63 blocks are free" in done.stdout


def test_the_example_has_forty_lines() -> None:
    lines = (ROOT / "kvtransfer/example.py").read_text().splitlines()
    assert 20 < sum(bool(line.strip()) for line in lines) <= 40
