"""An adapter's folder against a model: which factors go with which weight, checked by headers before they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.backends.torch.archs import ARCHITECTURES
from engine.backends.torch.checkpoint import Checkpoint, TensorInfo
from engine.backends.torch.loading import tensor_shapes
from engine.backends.torch.lora import Place
from engine.backends.torch.model_config import ModelConfig
from engine.config import quoted
from engine.errors import InvalidRequest, UnsupportedModel
from engine.models.adapters import AdapterConfig, FactorHeaders, adapter_file, read_adapter_config, read_factor_headers


@dataclass(frozen=True, slots=True)
class Factors:
    """The low-rank change of one weight [out, in]: scale * b @ a, with a [rank, in] and b [out, rank] as stored, read
    when asked for."""

    checkpoint: Checkpoint
    headers: FactorHeaders
    scale: float

    @property
    def rank(self) -> int:
        """Rows of a, columns of b."""
        return self.headers.rank

    def read(self) -> tuple[Tensor, Tensor]:
        """a and b on the CPU. Raises ModelLoadFailed naming the file."""
        a, b = self.checkpoint.read(self.headers.a_name, self.headers.b_name)
        return a, b


def places(config: ModelConfig, layer: int) -> dict[Place, tuple[str, ...]]:
    """The linear layers of a block that can be adapted, and the modules that each is made of: no experts."""
    names = ARCHITECTURES[config.architecture].names
    found: dict[Place, tuple[str, ...]] = {"qkv": names.qkv, "o": (names.o,)}
    if config.traits.experts_of(layer) is None:
        found |= {"gate_up": names.gate_up, "down": (names.down,)}
    return found


def locate_factors(folder: Path, config: ModelConfig, scale: float = 1.0) -> dict[str, Factors]:
    """The factors in an adapter's folder by the module of the model that they go with, `scale` times as strong.

    Raises InvalidRequest for a scale that is no number, UnsupportedModel, UnsafeWeights or another ModelLoadFailed for
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
    """Every module that can be adapted: its layer and its weight's shape."""
    names, shapes = ARCHITECTURES[config.architecture].names, tensor_shapes(config)
    return {
        name: (layer, shapes[f"{name}.weight"])
        for layer in range(config.layers)
        for modules in places(config, layer).values()
        for name in (f"{names.layer.format(layer)}.{module}" for module in modules)
    }


def _not_adaptable(module: str, config: ModelConfig) -> UnsupportedModel:
    which = "attention and MLP" if config.traits.experts is None else "attention, and of no experts,"
    return UnsupportedModel(
        f"the adapter changes {quoted(module)}; in this model, the projections of {which} in {config.layers} layers "
        "can be adapted",
        module=quoted(module),
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
