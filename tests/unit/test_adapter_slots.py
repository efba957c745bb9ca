"""Rows of recorded steps get the LoRA updates of the adapters that their slots name, whatever lies in the slots. The
Triton kernels run in Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from engine.backends.common.step_memory import MAX_RECORDED_RANK
from engine.backends.torch.model.lora import LinearName, LoraAdapter, LowRank

pytest.importorskip("triton")

from engine.backends.torch.cuda.adapter_slots import MAX_SLOTS, AdapterSlots, SlotRows, adapters_problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES: Mapping[LinearName, tuple[int, int]] = {"qkv": (300, 200), "down": (520, 64)}
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def adapter(
    key: str, ranks: Mapping[LinearName, int], dtype: torch.dtype = torch.float16, *, layers: int = 2
) -> LoraAdapter:
    generator = torch.Generator().manual_seed(sum(map(ord, key)))

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[1] ** 0.5).to(DEVICE, dtype)

    def factors() -> dict[LinearName, LowRank]:
        return {
            name: LowRank(drawn(rank, SHAPES[name][0]), drawn(rank, SHAPES[name][1])) for name, rank in ranks.items()
        }

    return LoraAdapter(key, key, tuple(factors() for _ in range(layers)), 0)


def check(
    slots: AdapterSlots, adapters: Mapping[str, LoraAdapter], keys: Sequence[str], dtype: torch.dtype, layer: int = 1
) -> None:
    """The update of every row is its own adapter's, and rows and places without one stay to the bit."""
    numbers = slots.assign(keys)
    assert numbers is not None
    rows = slots.rows(torch.tensor([numbers[key] for key in keys], dtype=torch.int32, device=DEVICE))
    for name, (inputs, outputs) in SHAPES.items():
        x, out = (torch.randn(len(keys), width).to(DEVICE, dtype) for width in (inputs, outputs))
        expected, found = out.double(), out.clone()
        for row, key in enumerate(keys):
            factors = adapters[key].layers[layer].get(name) if key else None
            if factors is not None:
                expected[row] += (x[row] @ factors.a.T).double() @ factors.b.double()
        rows.add_(found, x, layer, name)
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        same = [row for row, key in enumerate(keys) if not key or name not in adapters[key].layers[layer]]
        assert torch.equal(found[same], out[same])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_each_row_gets_the_update_of_its_own_adapter(dtype: torch.dtype) -> None:
    adapters = {
        "a": adapter("a", {"qkv": 5, "down": 8}, dtype),
        "b": adapter("b", {"qkv": 48}, dtype),
        "c": adapter("c", {"down": 70}, dtype),
    }
    slots = AdapterSlots(adapters, 2, [DEVICE])
    check(slots, adapters, ["a"], dtype)
    check(slots, adapters, ["", "b", "a", "", "c", "a"], dtype, layer=0)
    check(slots, adapters, ["a"] * 20 + [""] * 3 + ["c"] * 18 + ["b", "a"], dtype)
    check(slots, adapters, [""] * 5, dtype)


def test_another_adapter_takes_the_place_of_one_that_no_step_needs() -> None:
    adapters = {str(number): adapter(str(number), {"qkv": 2}, layers=1) for number in range(MAX_SLOTS + 3)}
    slots = AdapterSlots(adapters, 1, [DEVICE])
    names = list(adapters)
    first, again = slots.assign(names[:MAX_SLOTS]), slots.assign(names[:MAX_SLOTS])
    assert first == again and first is not None and len(set(first.values())) == MAX_SLOTS + 1
    check(slots, adapters, names[MAX_SLOTS:], torch.float16, layer=0)
    kept = slots.assign(names[-3:])
    assert kept == slots.assign(names[-3:])
    check(slots, adapters, names[: MAX_SLOTS // 2], torch.float16, layer=0)


def test_an_adapter_that_was_freed_leaves_its_slot_and_another_version_is_not_taken_for_it() -> None:
    adapters = {"a": adapter("a", {"qkv": 2}), "b": adapter("b", {"qkv": 2})}
    slots = AdapterSlots(adapters, 2, [DEVICE])
    check(slots, adapters, ["a", "b"], torch.float16)
    del adapters["a"]
    gc.collect()
    adapters["a"] = adapter("another", {"qkv": 7, "down": 3})
    check(slots, adapters, ["b", "a"], torch.float16)


def test_steps_with_too_many_adapters_or_too_high_a_rank_have_no_slots() -> None:
    adapters = {str(number): adapter(str(number), {"qkv": 1}, layers=1) for number in range(MAX_SLOTS + 1)}
    adapters["high"] = adapter("high", {"qkv": MAX_RECORDED_RANK + 1}, layers=1)
    slots = AdapterSlots(adapters, 1, [DEVICE])
    assert slots.assign(["high", "1"]) is None
    assert slots.assign(list(adapters)[:-1]) is None
    assert slots.assign([*list(adapters)[: MAX_SLOTS - 1], "", ""]) is not None


def test_outputs_that_lie_apart_are_refused() -> None:
    adapters = {"a": adapter("a", {"qkv": 2})}
    slots = AdapterSlots(adapters, 2, [DEVICE])
    rows = slots.rows(torch.zeros(2, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="must be dense"):
        rows.add_(torch.zeros(2, 400, dtype=torch.float16)[:, :200], torch.zeros(2, 300, dtype=torch.float16), 0, "qkv")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_kernels_are_tried_before_they_are_used(dtype: torch.dtype) -> None:
    assert adapters_problem([DEVICE], dtype) == ""


def test_wrong_updates_changed_rows_and_errors_are_found_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(self: SlotRows, out: Tensor, x: Tensor, layer: int, name: LinearName) -> None:
        right(self, out, 2 * x, layer, name)

    def damage(self: SlotRows, out: Tensor, x: Tensor, layer: int, name: LinearName) -> None:
        out.add_(1.0)

    def break_off(self: SlotRows, out: Tensor, x: Tensor, layer: int, name: LinearName) -> None:
        raise RuntimeError("no compiler\nand more")

    right = SlotRows.add_
    for wrong, problem in ((double, "differ from torch's"), (damage, "rows without an adapter change")):
        monkeypatch.setattr(SlotRows, "add_", wrong)
        assert problem in adapters_problem([DEVICE], torch.float16)
    monkeypatch.setattr(SlotRows, "add_", break_off)
    assert adapters_problem([DEVICE], torch.float16) == f"they fail on {DEVICE}: RuntimeError: no compiler"
