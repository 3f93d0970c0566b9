"""What is simulated: an engine with a latency model, and the traffic that it gets. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.latency import Latency, PrefillFit, StepFit

OPT_13B_A100: Final = Latency(
    prefill=PrefillFit(a_s=18.1e-3, b_s=0.102e-3, c_s=7.1e-9, chunk_tokens=2048, error=0.0, steps=0),
    step=StepFit(a_s=19.9e-3, b_s=6.3e-7, c_s=3.85e-5, error=0.0, steps=0),
)
"""OPT-13B on one A100-80GB, as DistServe fitted it."""
OPT_13B_TOKEN_BYTES: Final = 819_200
"""KV of one token: 40 layers × {K, V} × 5,120 × 2 B."""
OPT_13B_TOKENS: Final = 66_144
"""What fits beside the weights."""
PCIE_BYTES_PER_S: Final = 25e9
"""PCIe 4.0 × 16, as copies between pinned memory and a GPU reach it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """An engine. `aggregated`: it computes prompts too, in chunks beside the decoding rows; else KV is handed over."""

    latency: Latency = field(default=OPT_13B_A100)
    batch: int = 16
    aggregated: bool = False

    def __post_init__(self) -> None:
        """ValueError where it could not run a request."""
        if self.batch < 1:
            raise ValueError(f"batch: {self.batch} is less than 1")
        if self.latency.step is None or self.latency.prefill is None:
            raise ValueError("latency: both fits are needed")

    @property
    def prefill(self) -> PrefillFit:
        """Of steps with prompts."""
        assert self.latency.prefill is not None, "checked at construction"
        return self.latency.prefill

    @property
    def step(self) -> StepFit:
        """Of decode steps."""
        assert self.latency.step is not None, "checked at construction"
        return self.latency.step

    def first_step_s(self, prompt_tokens: int) -> float:
        """What skip-join goes by: the prefill here, else a decode step."""
        if self.aggregated:
            return self.prefill.prompt_s(prompt_tokens)
        return self.step.step_s(context_tokens=prompt_tokens + 1, batch=1)

    def service_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """All the time that a request needs by itself."""
        steps = output_tokens - 1 if self.aggregated else output_tokens
        decode_s = steps * self.step.step_s(context_tokens=prompt_tokens + output_tokens // 2, batch=1)
        return decode_s + self.prefill.prompt_s(prompt_tokens) if self.aggregated else decode_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of the traffic. Its output's length is known to nobody but the oracle."""

    key: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0

    def __post_init__(self) -> None:
        """ValueError for a request without prompt or answer."""
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"{self.key!r}: a prompt of {self.prompt_tokens}, an answer of {self.output_tokens}")


@dataclass(kw_only=True, slots=True)
class Record:
    """What became of a request. Times on the virtual clock."""

    request: Request
    first_token_s: float = -1.0
    end_s: float = -1.0
    longest_wait_s: float = 0.0  # without a step, since it arrived or ran
    preemptions: int = 0
    swapped_bytes: int = 0

    @property
    def completion_s(self) -> float:
        """From arrival to last token."""
        return self.end_s - self.request.arrival_s

    @property
    def latency_per_token_s(self) -> float:
        """Completion time ÷ output tokens: FastServe's and vLLM's normalized latency."""
        return self.completion_s / self.request.output_tokens
