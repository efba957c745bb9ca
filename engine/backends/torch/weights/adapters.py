"""Loading LoRA adapters: separately, for the requests that name them, or merged into the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor

from engine.backends.checkpoints.checkpoint import Checkpoint, TensorInfo
from engine.backends.common.families import architectures
from engine.backends.common.model_config import WHOLE_MODEL, ModelConfig
from engine.backends.common.sharding import TensorPart, tensor_parts
from engine.backends.common.tensor_shapes import tensor_shapes
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.model.lora import LinearName, LoraAdapter, LowRank
from engine.backends.torch.model.parallel import Group
from engine.backends.torch.weights.reader import StoredWeight
from engine.config import AdapterSpec, quote_value
from engine.errors import EngineError, InvalidRequest, UnsupportedModel, WorkerFailed
from engine.models.adapters import (
    AdapterConfig,
    FactorHeaders,
    adapter_file,
    read_adapter_config,
    read_factor_headers,
    version_of,
)

# An adapter's factors for each weight of a model, checked by headers before they are read.


@dataclass(frozen=True, slots=True)
class Factors:
    """Low-rank update of one weight [out, in]: scale * b @ a, with a [rank, in] and b [out, rank] as stored, read on
    demand."""

    checkpoint: Checkpoint
    headers: FactorHeaders
    scale: float

    @property
    def rank(self) -> int:
        """Rows of a, columns of b."""
        return self.headers.rank

    def read(self) -> tuple[Tensor, Tensor]:
        """Return a and b on the CPU. Raises ModelLoadFailed naming the file."""
        a, b = self.checkpoint.read(self.headers.a_name, self.headers.b_name)
        return a, b


def adaptable_layers(config: ModelConfig, layer: int) -> dict[LinearName, tuple[str, ...]]:
    """Return the adaptable linear layers of a block, and the modules of each; experts are not adaptable."""
    names = architectures()[config.architecture].names
    found: dict[LinearName, tuple[str, ...]] = {"qkv": names.qkv, "o": (names.o,)}
    if config.traits.experts_of(layer) is None:
        found |= {"gate_up": names.gate_up, "down": (names.down,)}
    return found


def locate_factors(folder: Path, config: ModelConfig, scale: float = 1.0) -> dict[str, Factors]:
    """Return the factors of an adapter's folder, times `scale`, by module of the model.

    Raises InvalidRequest for a scale that is not finite, UnsupportedModel, UnsafeWeights or another ModelLoadFailed for
    an adapter that cannot be read or does not fit the model.
    """
    if not math.isfinite(scale):
        raise InvalidRequest(f"the adapter's scale is {scale}; it must be a finite number", param="scale")
    adapter, file = read_adapter_config(folder), adapter_file(folder)
    headers = read_factor_headers(file)
    adaptable = _adaptable(config)
    for module, found in headers.items():
        if module not in adaptable:
            raise _not_adaptable(module, config)
        _refuse_misfit(module, found, adapter, adaptable)
    tensors = [pair for found in headers.values() for pair in ((found.a_name, found.a), (found.b_name, found.b))]
    checkpoint = Checkpoint({name: TensorInfo(file, header.shape, header.dtype) for name, header in tensors})
    return {module: Factors(checkpoint, found, adapter.scale_of(module) * scale) for module, found in headers.items()}


def _adaptable(config: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the layer and weight shape of every adaptable module."""
    names, shapes = architectures()[config.architecture].names, tensor_shapes(config)
    return {
        name: (layer, shapes[f"{name}.weight"])
        for layer in range(config.layers)
        for modules in adaptable_layers(config, layer).values()
        for name in (f"{names.layer.format(layer)}.{module}" for module in modules)
    }


def _not_adaptable(module: str, config: ModelConfig) -> UnsupportedModel:
    which = "attention and MLP" if config.traits.experts is None else "attention, and of no experts,"
    return UnsupportedModel(
        f"the adapter changes {quote_value(module)}; in this model, the projections of {which} in {config.layers} "
        "layers can be adapted",
        module=quote_value(module),
    )


def _refuse_misfit(
    module: str,
    found: FactorHeaders,
    adapter: AdapterConfig,
    adaptable: Mapping[str, tuple[int, tuple[int, ...]]],
) -> None:
    layer, (rows, columns) = adaptable[module]
    if (found.b.shape[0], found.a.shape[1]) != (rows, columns):
        raise UnsupportedModel(
            f"the adapter of {module} is for a weight of {found.b.shape[0]} x {found.a.shape[1]}; "
            f"this model's is {rows} x {columns}",
            module=module,
        )
    if found.rank != adapter.rank_of(module):
        raise UnsupportedModel(
            f"the adapter of {module} has rank {found.rank}; its config makes it {adapter.rank_of(module)}",
            module=module,
        )
    if not adapter.adapts_layer(layer):
        raise UnsupportedModel(f"the adapter changes {module}, which layers_to_transform leaves out", module=module)


@dataclass(frozen=True, slots=True)
class AdapterLoader:
    """Loads adapters for one model. memories: of the device of each layer.  group: the ranks of which each has its part
    of the model; None where this is all of it."""

    config: ModelConfig
    dtype: torch.dtype
    memories: Sequence[DeviceMemory]
    group: Group | None = None

    def refuse_misfit(self, spec: AdapterSpec) -> None:
        """Raise as `load` does for an adapter that does not fit this model."""
        locate_factors(spec.path, self.config, spec.scale)

    @torch.inference_mode()
    def load(self, spec: AdapterSpec, key: str) -> LoraAdapter:
        """Load the adapter of `spec`. Raises InvalidRequest, or ModelLoadFailed or a subclass, with nothing left
        allocated."""
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

    def _layout(self, factors: Mapping[str, Factors]) -> list[dict[LinearName, list[_Part]]]:
        """Return the parts of each layer's linear layers, also those without factors, if any part has some."""
        names, shapes = architectures()[self.config.architecture].names, tensor_shapes(self.config)
        parts_of_rank = tensor_parts(self.config, self.group.shard if self.group is not None else WHOLE_MODEL)
        layers: list[dict[LinearName, list[_Part]]] = []
        for layer in range(self.config.layers):
            prefix = names.layer.format(layer)
            parts = {
                place: [
                    _Part(factors.get(key), shapes[f"{key}.weight"], parts_of_rank.get(f"{key}.weight"))
                    for key in (f"{prefix}.{module}" for module in modules)
                ]
                for place, modules in adaptable_layers(self.config, layer).items()
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
                a, b = part.read(part.factors)
                fused_a[first_rank:last_rank] = a
                fused_b[first_rank:last_rank, first_row:last_row] = b.float().T * part.factors.scale
            first_rank, first_row = last_rank, last_row
        summed = self.group is not None and any(part.has_some_inputs for part in parts)
        return LowRank(fused_a, fused_b, self.group.all_reduce if self.group is not None and summed else None)


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the weights of a linear layer, and its factors, if any. part: that a rank has; None for all."""

    factors: Factors | None
    shape: tuple[int, ...]
    part: TensorPart | None

    @property
    def rows(self) -> int:
        """Outputs that are computed."""
        return self._part_shape[0]

    @property
    def columns(self) -> int:
        """Inputs that are there."""
        return self._part_shape[1]

    @property
    def has_some_inputs(self) -> bool:
        """True if a rank has some of the inputs."""
        return self.part is not None and self.part.dim == 1

    @property
    def _part_shape(self) -> tuple[int, ...]:
        return self.shape if self.part is None else self.part.shape(self.shape)

    def read(self, factors: Factors) -> tuple[Tensor, Tensor]:
        """Return what of a and b belongs to the part, on the CPU."""
        a, b = factors.read()
        if self.part is None:
            return a, b
        if self.part.dim == 1:
            return torch.cat([a[:, each.start : each.stop] for each in self.part.ranges], 1), b
        return a, torch.cat([b[each.start : each.stop] for each in self.part.ranges])

    @property
    def rank(self) -> int:
        return self.factors.rank if self.factors is not None else 0


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """A stored weight with an adapter merged into it."""

    weight: StoredWeight
    factors: Factors

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def stored_bytes(self) -> int:
        """Size of the weight in its file."""
        return self.weight.stored_bytes

    def read(self, device: torch.device) -> Tensor:
        """Return weight + scale * b @ a, in float32."""
        weight = self.weight.read(device).float()
        a, b = (factor.to(weight) for factor in self.factors.read())
        return torch.addmm(weight, b, a, alpha=self.factors.scale)


def merge_adapter(weights: Mapping[str, StoredWeight], factors: Mapping[str, Factors]) -> dict[str, StoredWeight]:
    """Return `weights` with an adapter merged into those that it changes."""
    changed = {f"{module}.weight": found for module, found in factors.items()}
    return {
        name: MergedWeight(weight, changed[name]) if name in changed else weight for name, weight in weights.items()
    }


# Attached adapters, and those that requests still use.


class AttachedAdapters:
    """The adapters of one model, by AdapterSpec.key: name and version, or only the name without a version.

    An adapter stays in memory as long as it is attached or a request uses it: a request keeps its adapter even if that
    is detached or replaced.
    """

    def __init__(self, loader: AdapterLoader) -> None:
        self._loader = loader
        self._attached: dict[str, LoraAdapter] = {}
        self._by_key: WeakValueDictionary[str, LoraAdapter] = WeakValueDictionary()
        self._refused: dict[str, str] = {}

    @property
    def by_key(self) -> Mapping[str, LoraAdapter]:
        """Every adapter in memory."""
        return self._by_key

    def attach(self, spec: AdapterSpec) -> LoraAdapter:
        """Load an adapter and attach it in place of another with its key. One in memory is not loaded again. Raises
        InvalidRequest or ModelLoadFailed, with nothing changed: also where the folder has another version now."""
        try:
            adapter = self._by_key.get(spec.key) if spec.version else None
            self._attached[spec.key] = adapter = adapter or self._load(spec)
        except EngineError as error:
            self._refused[spec.key] = error.message
            raise
        self._refused.pop(spec.key, None)
        return adapter

    def _load(self, spec: AdapterSpec) -> LoraAdapter:
        self._loader.refuse_misfit(spec)  # checks only headers; what follows reads every byte, while no step runs
        found = msgspec.structs.replace(spec, version=version_of(spec))
        if spec.version not in ("", found.version):
            raise UnsupportedModel(f"the files in {spec.path} have changed since the adapter was attached")
        adapter = self._by_key.get(found.key) or self._loader.load(spec, found.key)
        self._by_key[found.key] = adapter
        return adapter

    def detach(self, key: str) -> None:
        """Detach an adapter; unknown ones are ignored."""
        self._attached.pop(key, None)
        self._refused.pop(key, None)

    def clear(self) -> None:
        """Detach all adapters."""
        self._attached.clear()
        self._refused.clear()

    def find(self, key: str) -> LoraAdapter | None:
        """Return the adapter of that key, None for "". Raises InvalidRequest with the attached names, or WorkerFailed
        where it could not be attached."""
        if not key or key in self._attached:
            return self._attached.get(key)
        name = key.partition("\0")[0]
        if key in self._refused:
            raise WorkerFailed(f"the adapter {name} could not be attached: {self._refused[key]}")
        attached = ", ".join(sorted({each.partition("\0")[0] for each in self._attached})) or "none"
        raise InvalidRequest(f"no adapter {name} is attached; attached: {attached}", param="adapter", value=name)
