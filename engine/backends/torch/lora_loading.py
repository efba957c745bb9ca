"""Putting an adapter into memory: beside the weights, for the requests that name it, or into them, for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.torch.archs import ARCHITECTURES
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.loading import tensor_shapes
from engine.backends.torch.lora import LoraAdapter, LowRank, Place
from engine.backends.torch.lora_factors import Factors, locate_factors, places
from engine.backends.torch.model_config import ModelConfig
from engine.backends.torch.weights import StoredWeight
from engine.config import AdapterSpec


@dataclass(frozen=True, slots=True)
class AdapterLoader:
    """Loads adapters for one model. memories: where each of its layers lies."""

    config: ModelConfig
    dtype: torch.dtype
    memories: Sequence[DeviceMemory]

    def refuse_misfit(self, spec: AdapterSpec) -> None:
        """Raise as `load` does for an adapter that is not for this model."""
        locate_factors(spec.path, self.config, spec.scale)

    @torch.inference_mode()
    def load(self, spec: AdapterSpec, key: str) -> LoraAdapter:
        """The adapter that `spec` names, in memory. Raises InvalidRequest or ModelLoadFailed or a child of it, with
        nothing left allocated."""
        layout = self._layout(locate_factors(spec.path, self.config, spec.scale))
        needed = [sum(self._bytes(parts) for parts in layer.values()) for layer in layout]
        by_memory = {
            memory: sum(size for size, where in zip(needed, self.memories, strict=True) if where is memory)
            for memory in dict.fromkeys(self.memories)
        }
        with ExitStack() as room:
            for memory, size_bytes in by_memory.items():
                room.enter_context(memory.room_for(size_bytes, f"the factors of the adapter {spec.name}"))
            layers = tuple(
                {place: self._fuse(parts, memory.device) for place, parts in layer.items()}
                for layer, memory in zip(layout, self.memories, strict=True)
            )
        adapter = LoraAdapter(spec.name, key, layers, sum(needed))
        for memory, size_bytes in by_memory.items():
            memory.hold_for(adapter, size_bytes)
        return adapter

    def _layout(self, factors: Mapping[str, Factors]) -> list[dict[Place, list[_Part]]]:
        """Per layer and place the parts of its output, those without factors too; places without any are left out."""
        names, shapes = ARCHITECTURES[self.config.architecture].names, tensor_shapes(self.config)
        layers: list[dict[Place, list[_Part]]] = []
        for layer in range(self.config.layers):
            prefix = names.layer.format(layer)
            parts = {
                place: [
                    _Part(factors.get(f"{prefix}.{module}"), *shapes[f"{prefix}.{module}.weight"]) for module in modules
                ]
                for place, modules in places(self.config, layer).items()
            }
            layers.append({place: found for place, found in parts.items() if any(part.factors for part in found)})
        return layers

    def _bytes(self, parts: Sequence[_Part]) -> int:
        rank = sum(part.rank for part in parts)
        return rank * (parts[0].columns + sum(part.rows for part in parts)) * self.dtype.itemsize

    def _fuse(self, parts: Sequence[_Part], device: torch.device) -> LowRank:
        rank, rows = sum(part.rank for part in parts), sum(part.rows for part in parts)
        fused_a = torch.empty((rank, parts[0].columns), dtype=self.dtype, device=device)
        fused_b = torch.zeros((rank, rows), dtype=self.dtype, device=device)
        first_rank = first_row = 0
        for part in parts:
            last_rank, last_row = first_rank + part.rank, first_row + part.rows
            if part.factors is not None:
                a, b = part.factors.read()
                fused_a[first_rank:last_rank] = a
                fused_b[first_rank:last_rank, first_row:last_row] = b.float().T * part.factors.scale
            first_rank, first_row = last_rank, last_row
        return LowRank(fused_a, fused_b)


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the weights [rows, columns] that a linear layer is made of, and how it is adapted, if at all."""

    factors: Factors | None
    rows: int
    columns: int

    @property
    def rank(self) -> int:
        return self.factors.rank if self.factors is not None else 0


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """A stored weight with an adapter in it."""

    weight: StoredWeight
    factors: Factors

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own."""
        return self.weight.shape

    @property
    def stored_bytes(self) -> int:
        """What the weight itself takes in its file."""
        return self.weight.stored_bytes

    def read(self, device: torch.device) -> Tensor:
        """weight + scale * b @ a, in float32."""
        weight = self.weight.read(device).float()
        a, b = (factor.to(weight) for factor in self.factors.read())
        return torch.addmm(weight, b, a, alpha=self.factors.scale)


def merged(weights: Mapping[str, StoredWeight], factors: Mapping[str, Factors]) -> dict[str, StoredWeight]:
    """`weights` with an adapter in those that it changes."""
    changed = {f"{module}.weight": found for module, found in factors.items()}
    return {
        name: MergedWeight(weight, changed[name]) if name in changed else weight for name, weight in weights.items()
    }
