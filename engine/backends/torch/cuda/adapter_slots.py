"""AdapterSlots: the LoRA adapters that recorded steps compute with, by slot. Not yet run on a GPU.

A recorded step has fixed kernels and addresses, whatever its rows name. So each row has the number of a slot, and a
table at a fixed address has the factors of each slot's adapter: which adapters there are may change from step to step.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final, get_args
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from engine.backends.common.gguf_codes import triton_problem
from engine.backends.common.step_memory import ADAPTER_SHARES, MAX_RECORDED_RANK
from engine.backends.torch.cuda.layer_ops import differ
from engine.backends.torch.model.lora import LinearName, LoraAdapter, LowRank
from engine.backends.triton_launch import claim_triton_cache, kernels_problem

MAX_SLOTS = 64
"""Adapters of one step; one with more is computed without a recording."""

PLACES: tuple[LinearName, ...] = get_args(LinearName)

_ENTRY = 3
"""Numbers of a table for each linear layer: the addresses of a and b, and the rank."""
_BLOCK_M, _BLOCK_R, _BLOCK_K, _BLOCK_N = 16, 16, 128, 64
_RANK_PROGRAMS = 4


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows of a recorded step with adapters. slots int32 [rows]: -1 for none.  table int64 [slots, layers, places,
    3], on the same device."""

    kernels: ModuleType
    slots: Tensor
    table: Tensor

    def add_(self, out: Tensor, x: Tensor, layer: int, name: LinearName) -> None:
        """Add each row's update of a linear layer to `out` [rows, outputs], from `x` [rows, inputs], both dense."""
        x = x.contiguous()
        (rows, inputs), outputs, device = x.shape, out.shape[1], x.device
        if not out.is_contiguous():
            raise ValueError("the outputs of a linear layer with adapters must be dense")
        sums = torch.empty((ADAPTER_SHARES, rows, MAX_RECORDED_RANK), dtype=torch.float32, device=device)
        place = (layer * len(PLACES) + PLACES.index(name)) * _ENTRY
        constants = {"max_rank": MAX_RECORDED_RANK, "block_m": _BLOCK_M, "block_r": _BLOCK_R, "num_warps": 4}
        constants["upcast"] = x.dtype == torch.bfloat16 and device.type != "cuda"
        blocks, stride = -(-rows // _BLOCK_M), self.table.stride(0)
        with torch.cuda.device_of(x):
            self.kernels.shrink_kernel[(blocks, ADAPTER_SHARES, _RANK_PROGRAMS)](
                *(x, self.slots, self.table, sums, rows, inputs, place, stride), block_k=_BLOCK_K, **constants
            )
            self.kernels.expand_kernel[(blocks, -(-outputs // _BLOCK_N))](
                *(out, self.slots, self.table, sums, rows, outputs, place, stride),
                shares=ADAPTER_SHARES,
                block_n=_BLOCK_N,
                **constants,
            )


class AdapterSlots:
    """Which adapter has which slot, and their tables on each device of a model with `layers` layers.

    by_key: the adapters in memory. One that was freed leaves its slot to another.
    """

    def __init__(self, by_key: Mapping[str, LoraAdapter], layers: int, devices: Iterable[torch.device]) -> None:
        """Allocate the tables. Raises ImportError without Triton, OSError where what it compiles cannot be kept from
        other users."""
        if problem := triton_problem():
            raise ImportError(problem)
        claim_triton_cache()
        self._kernels: Final = importlib.import_module("engine.backends.torch.cuda.lora_kernels")
        self._by_key: Final = by_key
        self._shape: Final = (layers, len(PLACES), _ENTRY)
        self._tables: Final = {
            device: torch.zeros((MAX_SLOTS, *self._shape), dtype=torch.int64, device=device) for device in devices
        }
        self._assigned: Final[list[ReferenceType[LoraAdapter] | None]] = [None] * MAX_SLOTS

    def rows(self, slots: Tensor) -> SlotRows:
        """Return the rows whose slots are, when the step runs, in `slots`."""
        return SlotRows(self._kernels, slots, self._tables[slots.device])

    def assign(self, keys: Sequence[str]) -> dict[str, int] | None:
        """Return the slots of these adapters, each of which may be new, and -1 for ""; None where they are too many, or
        one has too high a rank. Tables change in the order of the device's work: earlier steps read the old ones."""
        wanted = {key: self._by_key[key] for key in dict.fromkeys(keys) if key}
        if len(wanted) > MAX_SLOTS or any(_max_rank(adapter) > MAX_RECORDED_RANK for adapter in wanted.values()):
            return None
        assigned = {id(adapter): slot for slot, each in enumerate(self._assigned) if each and (adapter := each())}
        slots = {key: assigned[id(adapter)] for key, adapter in wanted.items() if id(adapter) in assigned}
        free = iter(sorted(set(range(MAX_SLOTS)) - set(slots.values()), key=lambda slot: slot in assigned.values()))
        for key, adapter in wanted.items():
            if key not in slots:
                slots[key] = slot = next(free)
                self._assigned[slot] = ref(adapter)
                entries = torch.tensor(_entries(adapter), dtype=torch.int64).view(self._shape)
                for table in self._tables.values():
                    table[slot].copy_(entries)
        return {"": -1, **slots}


def _entries(adapter: LoraAdapter) -> list[tuple[int, int, int]]:
    found = [layer.get(place) for layer in adapter.layers for place in PLACES]
    return [(0, 0, 0) if each is None else (each.a.data_ptr(), each.b.data_ptr(), len(each.a)) for each in found]


def _max_rank(adapter: LoraAdapter) -> int:
    return max((len(each.a) for layer in adapter.layers for each in layer.values()), default=0)


# Whether they can be used.

_TRIAL_INPUTS, _TRIAL_OUTPUTS = 160, 96
_TRIAL_RANKS = (5, 40)


def adapters_problem(devices: Sequence[torch.device], dtype: torch.dtype) -> str:
    """Return why the kernels cannot add the updates of adapters in `dtype` on `devices`, as a clause; "" where they
    can.

    They are compiled and tried there on small adapters. Raises where a device is lost.
    """
    return kernels_problem(devices, "they", lambda device: _trial(device, dtype))


def _trial(device: torch.device, dtype: torch.dtype) -> str:
    """Rows of two adapters, in the order of neither, and one without."""
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(device, dtype)

    factors = [LowRank(random(rank, _TRIAL_INPUTS), random(rank, _TRIAL_OUTPUTS)) for rank in _TRIAL_RANKS]
    adapters = {str(at): LoraAdapter(str(at), str(at), ({"qkv": each},), 0) for at, each in enumerate(factors)}
    keys = ["1", "", "0", "1"]
    slots = AdapterSlots(adapters, 1, [device])
    numbers = slots.assign(keys)
    assert numbers is not None, "two adapters have slots"
    x, out = random(len(keys), _TRIAL_INPUTS), random(len(keys), _TRIAL_OUTPUTS)
    expected = out.float().cpu()
    for row, key in enumerate(keys):
        if key:
            each = adapters[key].layers[0]["qkv"]
            expected[row] += (x[row].float() @ each.a.float().T @ each.b.float()).cpu()
    before = out[1].clone()
    on_device = torch.tensor([numbers[key] for key in keys], dtype=torch.int32).to(device)
    slots.rows(on_device).add_(out, x, 0, "qkv")
    if not torch.equal(out[1], before):
        return "rows without an adapter change"
    return "updates of adapters differ from torch's" if differ(out, expected) else ""
