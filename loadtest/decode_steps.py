"""Decode steps of the real engine, one after the other on a thread with a core to itself, as a decode worker's are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvtransfer.device import Arena
from services.engine.card import ModelCard
from services.engine.plan import Slice
from services.engine.runner import open_runner

BATCH: Final = 8
CONTEXT: Final = 160
_WARM_UP_STEPS: Final = 5


class DecodeSteps:
    """Steps of BATCH sequences whose new token is the CONTEXT-th, in the last blocks of an arena."""

    def __init__(self, card: ModelCard, arena: Arena, cores: Sequence[int]) -> None:
        each = self.blocks(arena.layout.block_tokens) // BATCH
        first = arena.blocks - BATCH * each
        self._runner = open_runner(card, dtype="bf16", device="cpu", array=arena.array)
        self._slices = [
            Slice(
                token_ids=[300 + row],
                start=CONTEXT - 1,
                blocks=range(first + row * each, first + (row + 1) * each),
                wants_logits=True,
            )
            for row in range(BATCH)
        ]
        self._cores = tuple(cores)
        self._window = ""
        self._ended = threading.Event()
        self._durations_s: dict[str, list[float]] = {}
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    @staticmethod
    def blocks(block_tokens: int) -> int:
        """Blocks that they occupy."""
        return BATCH * -(-CONTEXT // block_tokens)

    def start(self) -> None:
        """Begins to step."""
        self._thread.start()

    def enter(self, window: str) -> None:
        """From now on steps belong to this window; "" is none. One that is in two is in none."""
        self._window = window

    def durations_s(self, window: str) -> list[float]:
        """Seconds of each step of a window so far."""
        return list(self._durations_s.get(window, ()))

    def stop(self) -> None:
        """Ends the thread after its step."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        if self._cores:
            os.sched_setaffinity(threading.get_native_id(), self._cores)
        for _ in range(_WARM_UP_STEPS):
            self._step()
        while not self._ended.is_set():
            window, begin_s = self._window, time.perf_counter()
            self._step()
            if window and window == self._window:
                self._durations_s.setdefault(window, []).append(time.perf_counter() - begin_s)

    def _step(self) -> None:
        self._runner.run(self._slices)[0, 0].item()
