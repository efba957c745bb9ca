"""A model's norms, read as its traits and tensor names say which there are and of what kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.torch.archs.base import TensorNames
from engine.backends.torch.model_config import ModelConfig
from engine.backends.torch.norms import (
    HeadNorm,
    LayerNorm,
    Norm,
    ProjectionNorm,
    RmsNorm,
    WideRmsNorm,
    unchanged,
    unweighted,
)


class ReadTensor(Protocol):
    """Reads the tensor of that name, and makes of it what the model computes with."""

    def __call__(self, name: str, *, made: Callable[[Tensor], Tensor] = ...) -> Tensor: ...


def norm_shapes(config: ModelConfig, name: str, width: int = 0) -> dict[str, tuple[int, ...]]:
    """The tensors of a norm over `width` elements, those of a row if not told; none of a norm without a name."""
    kinds = ("weight", "bias") if config.traits.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": (width or config.hidden_size,) for kind in kinds if name}


def block_norm_shapes(config: ModelConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    """The tensors of all norms of one layer, by their names in it."""
    rows = [names.input_norm, names.attention_out_norm, names.mlp_out_norm]
    rows += [] if config.traits.parallel else [names.mlp_norm]
    shapes = {name: shape for each in rows for name, shape in norm_shapes(config, each).items()}
    for name, heads in ((names.q_norm, config.heads), (names.k_norm, config.kv_heads)):
        match config.traits.qk_norm:
            case "head":
                shapes[f"{name}.weight"] = (config.head_dim,)
            case "projection":
                shapes |= norm_shapes(config, name, heads * config.head_dim)
            case "each_head":
                shapes |= {f"{name}.norms.{head}.weight": (config.head_dim,) for head in range(heads)}
    return shapes


@dataclass(frozen=True, slots=True)
class NormLoader:
    """Makes norms of tensors whose names begin with `prefix`."""

    config: ModelConfig
    read: ReadTensor
    prefix: str = ""

    def norm(self, name: str) -> Norm:
        """The norm of that name, of the kind that the model has; what changes nothing where it has no name."""
        if not name:
            return unchanged
        eps = self.config.norm_eps
        match self.config.traits.norm:
            case "rms":
                return RmsNorm(self._weight(name), eps)
            case "rms_plus_one":
                return WideRmsNorm(self._weight(name), eps)
            case "layer":
                return LayerNorm(self._weight(name), self.read(f"{self.prefix}{name}.bias"), eps)

    def qk_norm(self, names: TensorNames) -> Norm | None:
        """What normalises query and key heads together, [T, heads + kv_heads, head_dim]; None where nothing does."""
        config = self.config
        match config.traits.qk_norm:
            case "projection":
                return ProjectionNorm(self.norm(names.q_norm), self.norm(names.k_norm), config.heads)
            case "head":
                queries, keys = self._weight(names.q_norm), self._weight(names.k_norm)
                weight = torch.cat((queries.expand(config.heads, -1), keys.expand(config.kv_heads, -1)))
            case "each_head":
                heads = [(names.q_norm, head) for head in range(config.heads)]
                heads += [(names.k_norm, head) for head in range(config.kv_heads)]
                weight = torch.stack([self._weight(f"{name}.norms.{head}") for name, head in heads])
            case None:
                return None
        norm = unweighted(config.traits.norm, config.head_dim, config.norm_eps)
        return HeadNorm(norm, weight, None if config.traits.norm == "layer" else config.norm_eps)

    def _weight(self, name: str) -> Tensor:
        made = _plus_one if self.config.traits.norm == "rms_plus_one" else unchanged
        return self.read(f"{self.prefix}{name}.weight", made=made)


def _plus_one(weight: Tensor) -> Tensor:
    return weight.float() + 1.0
