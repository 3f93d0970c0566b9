"""What a worker says of its own speed: which steps teach it what, what it predicts, and the fits as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from services.engine.plan import Slice
from services.engine.sampling import SamplingSpec
from services.latency import Latency, PrefillFit, StepFit, latency_from
from services.worker.latency import LatencyModel
from services.worker.work import Work

PREFILL = PrefillFit(a_s=0.02, b_s=1e-3, c_s=1e-7, chunk_tokens=256, error=0.05, steps=40)
STEP = StepFit(a_s=0.03, b_s=1e-6, c_s=2e-3, error=0.04, steps=99)


def work(*ranges: tuple[int, int]) -> Sequence[Work]:
    """A step over slices [start, end)."""
    pieces = [Slice(token_ids=(1,) * (end - start), start=start, blocks=(), wants_logits=True) for start, end in ranges]
    return [Work(key=str(i), slice=piece, sampling=SamplingSpec()) for i, piece in enumerate(pieces)]


def prefill_step(model: LatencyModel, *ranges: tuple[int, int]) -> None:
    tokens = sum(end - start for start, end in ranges)
    squares = sum(end**2 - start**2 for start, end in ranges)
    model.observe(work(*ranges), PREFILL.step_s(tokens=tokens, squares=squares))


def decode_step(model: LatencyModel, *contexts: int) -> None:
    duration_s = STEP.step_s(context_tokens=sum(contexts), batch=len(contexts))
    model.observe(work(*((context - 1, context) for context in contexts)), duration_s)


def taught() -> LatencyModel:
    model = LatencyModel(chunk_tokens=256)
    for i in range(40):
        for start in range(0, 1_024, 256):
            prefill_step(model, (start, start + 256))
        prefill_step(model, (0, 100 + i), (0, 2 + i))
        decode_step(model, *(160 + 20 * i + 7 * row for row in range(1 + 5 * i % 16)))
    return model


def test_chunks_of_a_prompt_add_up_to_its_length_and_its_square() -> None:
    fit = taught().latency.prefill
    assert fit is not None
    assert fit.prompt_s(1_000) == pytest.approx(4 * 0.02 + 1_000 * 1e-3 + 1_000**2 * 1e-7, rel=0.02)
    assert fit.chunk_tokens == 256
    assert fit.error < 0.01


def test_decode_steps_are_learned_apart_from_prefill_steps() -> None:
    fit = taught().latency.step
    assert fit is not None
    for contexts in ((1,), (160,) * 8, (1_024,) * 8):
        predicted_s = fit.step_s(context_tokens=sum(contexts), batch=len(contexts))
        assert predicted_s == pytest.approx(STEP.step_s(context_tokens=sum(contexts), batch=len(contexts)), rel=0.02)


def test_a_worker_that_has_computed_too_little_says_nothing() -> None:
    model = LatencyModel(chunk_tokens=256)
    assert model.latency == Latency()
    for steps in range(1, 13):
        decode_step(model, 100 + steps)
        assert (model.latency.step is None) == (steps < 12)
    assert model.latency.prefill is None


def test_a_mixed_step_teaches_neither() -> None:
    model = taught()
    before = model.latency
    for _ in range(50):
        model.observe(work((0, 200), (99, 100)), 1e3)
    assert model.latency == before


def test_a_mixed_step_is_both_kinds_with_one_constant() -> None:
    mixed = {"tokens": 200, "squares": 40_000, "context_tokens": 900, "batch": 3}
    both_s = PREFILL.step_s(tokens=200, squares=40_000) + STEP.step_s(context_tokens=900, batch=3)
    assert Latency(prefill=PREFILL, step=STEP).mixed_step_s(**mixed) == pytest.approx(both_s - 0.02)
    assert Latency(prefill=PREFILL).mixed_step_s(**mixed) is None
    assert Latency(step=STEP).mixed_step_s(**mixed) is None


def test_a_value_that_was_read_never_changes() -> None:
    model = taught()
    read, copy = model.latency, latency_from(json.loads(json.dumps(asdict(model.latency))))
    decode_step(model, 5)
    assert read == copy
    assert read is not model.latency


@pytest.mark.parametrize(
    ("tokens", "cached_tokens", "steps"),
    [(0, 0, 0), (1, 0, 1), (255, 0, 1), (256, 0, 1), (257, 0, 2), (1_000, 0, 4), (1_000, 999, 1), (1_000, 488, 2)],
)
def test_a_prompt_costs_its_steps_its_tokens_and_their_squares(tokens: int, cached_tokens: int, steps: int) -> None:
    starts = range(cached_tokens, tokens, 256)
    chunks = [(start, min(start + 256, tokens)) for start in starts]
    assert len(chunks) == steps
    by_steps_s = sum(PREFILL.step_s(tokens=end - start, squares=end**2 - start**2) for start, end in chunks)
    assert PREFILL.prompt_s(tokens, cached_tokens=cached_tokens) == pytest.approx(by_steps_s)


@pytest.mark.parametrize("latency", [Latency(), Latency(prefill=PREFILL), Latency(prefill=PREFILL, step=STEP)])
def test_a_latency_survives_being_text(latency: Latency) -> None:
    assert latency_from(json.loads(json.dumps(asdict(latency)))) == latency


def test_no_latency_is_an_empty_one() -> None:
    assert latency_from(None) == Latency()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("a_s", value) for value in (-1e-9, float("nan"), float("inf"), "fast", None, True)),
        *(("steps", value) for value in (-1, 1.5, False, None)),
        ("chunk_tokens", 0),
        ("error", -0.1),
    ],
)
def test_a_fit_that_is_none_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        latency_from({"prefill": asdict(PREFILL) | {field: value}})


@pytest.mark.parametrize("fields", [[], "fast", {"prefill": 3}, {"step": []}])
def test_what_is_no_record_is_refused(fields: object) -> None:
    with pytest.raises(ValueError, match="latency"):
        latency_from(fields)


def test_coefficients_that_no_worker_has_are_refused_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="c_s"):
        replace(STEP, c_s=-1.0)
