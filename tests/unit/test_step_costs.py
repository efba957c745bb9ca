"""Step costs: found again in steps that they made, read and written, and refused where they are none."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.simulation.step_costs import MeasuredModel, StepCosts, StepSample, StepShape, fit_steps, solve

KNOWN = StepCosts(
    fixed_s=2e-3,
    decode_s=2e-4,
    few_decode_s=1e-4,
    context_token_s=3e-7,
    chunk_s=4e-4,
    prompt_token_s=1e-4,
    few_prompt_token_s=2e-5,
    prompt_pair_s=5e-9,
)


def shapes(seed: int, count: int) -> list[StepShape]:
    """Steps of many sizes."""
    source = random.Random(seed)
    steps = []
    for _ in range(count):
        decodes = [(source.randrange(4, 2000), 1) for _ in range(source.choice((0, 1, 3, 8, 20, 32)))]
        prompts = [(source.randrange(0, 1500), source.randrange(2, 300)) for _ in range(source.choice((0, 0, 1, 2)))]
        steps.append(StepShape.of([*decodes, *prompts]))
    return [shape for shape in steps if shape.decodes or shape.chunks]


def measured(seed: int, count: int, noise: float = 0.0) -> list[StepSample]:
    source = random.Random(seed + 1)
    return [
        StepSample(shape=shape, seconds=KNOWN.seconds(shape) * source.uniform(1 - noise, 1 + noise))
        for shape in shapes(seed, count)
    ]


def test_a_shape_tells_decodes_from_prompts() -> None:
    shape = StepShape.of([(9, 1), (99, 1), (10, 4)])
    assert (shape.decodes, shape.context_tokens) == (2, 110)
    assert (shape.chunks, shape.prompt_tokens, shape.prompt_pairs) == (1, 4, 11 + 12 + 13 + 14)


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_finds_costs_again_that_made_the_steps(seed: int) -> None:
    fit = fit_steps(measured(seed, 300))
    for shape in shapes(seed + 100, 50):
        assert fit.costs.seconds(shape) == pytest.approx(KNOWN.seconds(shape), rel=1e-3)
    assert fit.explained > 0.9999 and fit.outliers == 0


def test_the_fit_is_not_led_astray_by_steps_that_others_held_up() -> None:
    samples = measured(5, 400, noise=0.03)
    for index in range(0, len(samples), 8):
        samples[index] = msgspec.structs.replace(samples[index], seconds=5 * samples[index].seconds)
    fit = fit_steps(samples)
    errors = [abs(fit.costs.seconds(shape) / KNOWN.seconds(shape) - 1) for shape in shapes(77, 100)]
    assert max(errors) < 0.05
    assert fit.outliers >= len(samples) // 8


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=3, max_size=12), st.data())
def test_no_number_is_negative_and_none_can_get_better_alone(rows: list[list[float]], data: st.DataObject) -> None:
    targets = data.draw(st.lists(st.floats(-5, 5), min_size=len(rows), max_size=len(rows)))
    found = solve(rows, targets, [1.0] * len(rows))

    def error(values: list[float]) -> float:
        return sum(
            (sum(a * b for a, b in zip(row, values, strict=True)) - target) ** 2
            for row, target in zip(rows, targets, strict=True)
        )

    best = error(found)
    assert min(found) >= 0
    for index in range(3):
        for step in (-1e-2, 1e-2):
            moved = [max(0.0, value + step * (place == index)) for place, value in enumerate(found)]
            assert best <= error(moved) + 1e-6


def test_too_few_steps_are_refused_with_their_number() -> None:
    with pytest.raises(InvalidRequest, match="3 measured steps are too few"):
        fit_steps(measured(0, 10)[:3])


def test_a_step_that_took_no_time_is_refused() -> None:
    samples = measured(0, 60)
    with pytest.raises(InvalidRequest, match="took 0"):
        fit_steps([*samples, msgspec.structs.replace(samples[0], seconds=0.0)])


def model() -> MeasuredModel:
    return MeasuredModel(
        model="demo",
        device="cpu",
        machine="a machine",
        threads=2,
        max_model_len=2048,
        kv_tokens=4096,
        page_tokens=16,
        step_tokens=512,
        fit=fit_steps(measured(1, 100)),
    )


def test_a_file_of_costs_reads_as_it_was_written(tmp_path: Path) -> None:
    model().write(tmp_path / "costs.json")
    assert MeasuredModel.read(tmp_path / "costs.json") == model()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "could not be read"),
        ("{", "holds no step costs"),
        ('{"model": "demo"}', "holds no step costs"),
    ],
)
def test_a_file_that_holds_no_costs_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        MeasuredModel.read(path)


def test_a_negative_price_in_a_file_is_refused_by_its_name(tmp_path: Path) -> None:
    broken = model()
    costs = msgspec.structs.replace(broken.costs, decode_s=-1.0)
    msgspec.structs.replace(broken, fit=msgspec.structs.replace(broken.fit, costs=costs)).write(tmp_path / "c.json")
    with pytest.raises(InvalidRequest, match="decode_s is -1"):
        MeasuredModel.read(tmp_path / "c.json")
