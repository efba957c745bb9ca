"""One step's plan: rows in groups whose padding stays bounded, and any mixture computes what each would alone."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.backends.common.step_memory import SLACK_PAIRS
from engine.backends.paged_attention.interface import PagedAttention, implementation
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.model.lora import LoraAdapter
from engine.backends.torch.model.step_plan import HeadCounts, StepPlan, StepPlanner
from engine.backends.torch.runner import ModelRunner
from tests.fakes.oracle import Driver, load_runner
from tests.fakes.tiny_models import make_tiny_model

PAGE_TOKENS = 16


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A model in which one layer sees all and one a short window."""
    folder = tmp_path_factory.mktemp("mixed")
    windows = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}
    return load_runner(make_tiny_model(folder, "Qwen2ForCausalLM", **windows))


def plan(chunks: list[ChunkInput], window: int | None = None) -> StepPlan:
    planner = StepPlanner(
        frozenset({window}), HeadCounts(2, 1, 16), PAGE_TOKENS, dtype=torch.float32, device=torch.device("cpu")
    )
    return planner.plan(chunks)


def chunk(start: int, length: int, first_page: int = 0) -> ChunkInput:
    count = -(-(start + length) // PAGE_TOKENS)
    return ChunkInput(list(range(length)), start, list(range(first_page, first_page + count)), sample=True)


def test_many_short_sequences_are_not_padded_to_the_one_long_one() -> None:
    chunks = [chunk(20, 1) for _ in range(60)] + [chunk(8000, 1)]
    step = plan(chunks)
    padded = sum(group.sequences * group.width * group.views[None].tokens for group in step.groups)
    real = sum(len(part.token_ids) * part.end for part in chunks)
    assert padded <= 1.5 * real + SLACK_PAIRS * len(step.groups)
    assert len(step.groups) == 2


def test_decodes_of_like_lengths_attend_in_one_call() -> None:
    step = plan([chunk(180 + offset, 1, first_page=20 * offset) for offset in range(32)])
    assert [group.sequences for group in step.groups] == [32]


def test_a_whole_prompt_needs_no_mask_and_reads_no_page() -> None:
    (group,) = plan([chunk(0, 100)]).groups
    view = group.views[None]
    assert view.own_rows and view.causal and view.mask is None


def test_adjacent_pages_of_a_lone_sequence_are_viewed_and_others_gathered() -> None:
    (group,) = plan([chunk(60, 1, first_page=7)]).groups
    assert group.views[None].pages == slice(7, 11)
    scattered = ChunkInput([1], 60, [9, 2, 5, 3], sample=True)
    pages = plan([scattered]).groups[0].views[None].pages
    assert isinstance(pages, torch.Tensor) and pages.tolist() == [9, 2, 5, 3]


def test_a_window_reads_only_the_pages_that_it_reaches() -> None:
    (group,) = plan([chunk(1000, 1)], window=20).groups
    view = group.views[20]
    assert view.pages == slice(61, 63)
    assert (view.tokens, view.mask) == (20, None)


def test_rows_hold_every_token_once_at_its_own_slot() -> None:
    chunks = [chunk(30, 5, first_page=10), chunk(3, 1, first_page=20), chunk(0, 40, first_page=30)]
    step = plan(chunks)
    expected = {
        (token, part.start + i, part.pages[(part.start + i) // PAGE_TOKENS] * PAGE_TOKENS + (part.start + i) % 16)
        for part in chunks
        for i, token in enumerate(part.token_ids)
    }
    rows = list(zip(step.ids.tolist(), step.positions.tolist(), step.slots.tolist(), strict=True))
    assert set(rows) == expected and len(rows) == len(expected)
    assert [rows[row][1] for row in step.sampled_rows.tolist()] == [34, 3, 39]


lengths = st.integers(1, 60)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(lengths, st.lists(lengths, max_size=4)), min_size=1, max_size=7))
def test_any_mixture_of_chunks_computes_what_each_sequence_computes_alone(
    runner: ModelRunner, shapes: list[tuple[int, list[int]]]
) -> None:
    driver = Driver(runner)
    waiting = []
    for salt, (first, more) in enumerate(shapes):
        tokens = [(17 * i + 5 * salt) % 300 + 3 for i in range(first + sum(more))]
        waiting.append((driver.add(tokens, room=0), [first, *more]))
    while any(pieces for _, pieces in waiting):
        driver.feed(*((sequence, pieces.pop(0)) for sequence, pieces in waiting if pieces))
    for sequence, _ in waiting:
        alone = Driver(runner)
        expected = alone.feed((alone.add(sequence.tokens), None))[0]
        torch.testing.assert_close(sequence.logits[-1], expected, atol=1e-4, rtol=1e-4)


def tensors_in(part: object) -> list[torch.Tensor]:
    """Every tensor of a plan, but those of an adapter, which lie where its layers do."""
    match part:
        case torch.Tensor():
            return [part]
        case tuple():
            return [found for each in part for found in tensors_in(each)]
        case dict():
            return tensors_in(tuple(part.values()))
        case _ if is_dataclass(part) and not isinstance(part, LoraAdapter):
            return [found for field in fields(part) for found in tensors_in(getattr(part, field.name))]
        case _:
            return []


@pytest.mark.parametrize("paged", [None, implementation("gathered")], ids=["gathered", "paged"])
def test_a_step_moves_to_the_next_device_whole(paged: PagedAttention | None) -> None:
    adapter = LoraAdapter("it", "it", (), 0)
    planner = StepPlanner(
        frozenset({None, 10}),
        HeadCounts(2, 1, 16),
        PAGE_TOKENS,
        dtype=torch.float32,
        device=torch.device("cpu"),
        paged=paged,
        adapters={"it": adapter},
    )
    chunks = [chunk(20, 1), replace(chunk(8, 30), adapter="it"), chunk(0, 50), replace(chunk(3, 4), adapter="it")]
    here = planner.plan([*chunks, chunk(90, 1)])
    there = here.on(torch.device("meta"))
    assert here.on(torch.device("cpu")) is here
    assert {tensor.device.type for tensor in tensors_in(here)} == {"cpu"}
    assert {tensor.device.type for tensor in tensors_in(there)} == {"meta"}
    assert [tensor.shape for tensor in tensors_in(there)] == [tensor.shape for tensor in tensors_in(here)]
    assert len(tensors_in(here)) >= 8
    assert there.adapted[0].adapter is adapter
