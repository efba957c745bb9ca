"""Checkpoints that keep all experts of a layer in one tensor, as transformers computes with them, seen as if each
expert had tensors of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.backends.torch.archs import ARCHITECTURES
from engine.backends.torch.archs.experts import ExpertNames
from engine.backends.torch.checkpoint import Checkpoint, TensorInfo
from engine.backends.torch.model_config import ModelConfig
from engine.backends.torch.quant.parts import by
from engine.errors import ModelLoadFailed

_ROUTER = "mlp.gate.weight"
_GATE_UP = "mlp.experts.gate_up_proj"
"""[experts, 2 * inner, hidden], each expert's gate first."""

_DOWN = "mlp.experts.down_proj"
"""[experts, hidden, inner]."""


def by_expert(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """`checkpoint`, its fused experts under the names that they have one by one. Raises ModelLoadFailed, naming a
    tensor that is none of several experts."""
    if config.traits.experts is None:
        return checkpoint
    names = ARCHITECTURES[config.architecture].names
    found: dict[str, TensorInfo] = {}
    for layer in map(names.layer.format, range(config.layers)):
        if f"{layer}.{_GATE_UP}" in checkpoint:
            found |= {f"{layer}.{name}.weight": info for name, info in _pieces(checkpoint, layer, names.experts)}
    return checkpoint.with_pieces(found)


def _pieces(checkpoint: Checkpoint, layer: str, names: ExpertNames) -> Iterator[tuple[str, TensorInfo]]:
    if f"{layer}.{_ROUTER}" in checkpoint:
        yield names.router, replace(checkpoint.info(f"{layer}.{_ROUTER}"), stored_as=f"{layer}.{_ROUTER}")
    for fused, parts in ((_GATE_UP, (names.gate, names.up)), (_DOWN, (names.down,))):
        info = replace(checkpoint.info(f"{layer}.{fused}"), stored_as=f"{layer}.{fused}")
        if len(info.shape) != 3 or info.shape[1] % len(parts):
            raise ModelLoadFailed(
                f"the tensor {layer}.{fused} in {info.file.name} is {by(info.shape)}, which is not several experts",
                tensor=f"{layer}.{fused}",
            )
        rows = info.shape[1] // len(parts)
        for number in range(info.shape[0]):
            for place, part in enumerate(parts):
                yield f"{names.expert.format(number)}.{part}", info.matrix(number, place * rows, rows)
