"""Which rows of a step compute with which adapter."""

from __future__ import annotations

import torch

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.model.lora import LoraAdapter, LowRank, adapted_rows, add_adapters
from engine.backends.torch.model.step_plan import HeadCounts, StepPlan, StepPlanner

CPU = torch.device("cpu")
ADAPTERS = {key: LoraAdapter(name=key, key=key, layers=({},), size_bytes=0) for key in ("a", "b")}


def chunk(adapter: str, tokens: int = 1, start: int = 9) -> ChunkInput:
    return ChunkInput([7] * tokens, start, [0, 1], sample=True, adapter=adapter)


def plan(*chunks: ChunkInput) -> StepPlan:
    planner = StepPlanner(
        frozenset([None]), HeadCounts(2, 1, 16), 16, dtype=torch.float32, device=CPU, adapters=ADAPTERS
    )
    return planner.plan(chunks)


def test_a_step_without_adapters_has_no_adapted_rows() -> None:
    assert plan(chunk(""), chunk("", 5)).adapted == ()


def test_adjacent_rows_are_a_slice_and_scattered_ones_are_numbers() -> None:
    first, second = adapted_rows([chunk("a", 2), chunk("b", 3), chunk("a", 1)], ADAPTERS, CPU)
    assert (first.adapter.key, second.adapter.key) == ("a", "b")
    assert isinstance(first.rows, torch.Tensor)
    assert first.rows.tolist() == [0, 1, 5]
    assert second.rows == slice(2, 5)


def test_decodes_of_one_adapter_lie_side_by_side_and_answers_keep_their_order() -> None:
    step = plan(*(chunk(name, start=9 + number) for number, name in enumerate(["a", "", "b", "a", "", "b"])))
    assert {part.adapter.key: part.rows for part in step.adapted} == {"a": slice(2, 4), "b": slice(4, 6)}
    assert step.positions[step.sampled_rows].tolist() == [9, 10, 11, 12, 13, 14]
    assert len(step.groups) == 1


def test_rows_of_no_adapter_and_places_that_none_changes_stay_as_they_are() -> None:
    added = LowRank(torch.ones(1, 2), torch.full((1, 3), 2.0))
    adapter = LoraAdapter(name="a", key="a", layers=({"o": added}, {}), size_bytes=0)
    rows = adapted_rows([chunk(""), chunk("a", 2), chunk("")], {"a": adapter}, CPU)
    x = torch.arange(8.0).view(4, 2)
    out = add_adapters(torch.zeros(4, 3), x, 0, "o", rows)
    assert out.tolist() == [[0.0] * 3, [10.0] * 3, [18.0] * 3, [0.0] * 3]
    for layer, place in ((0, "down"), (1, "o")):
        assert not add_adapters(torch.zeros(4, 3), x, layer, place, rows).any()
