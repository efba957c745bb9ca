"""A quantised linear layer of a checkpoint, read as the plain weight that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.torch.checkpoint import Checkpoint, TensorInfo
from engine.backends.torch.quant import exl2, gptq
from engine.backends.torch.quant.declared import Method, Quantisation
from engine.backends.torch.quant.parts import malformed

_MARKS: dict[str, Method] = {"q_weight": "exl2", "qweight": "gptq"}
"""The tensor by which each method is known: the tensors decide, config.json may be silent."""

_COLUMN_PACKED = ("q_scale", "qzeros")
_COLUMNS_PER_WORD = 8
_SLAB_COLUMNS = 4096
"""Columns dequantised at a time: beside the weight itself, only a slab of it is held."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """The weight of layer `key`, [out, in]; `parts` are the tensors that it is made from, by their short names."""

    checkpoint: Checkpoint
    key: str
    shape: tuple[int, int]
    parts: Mapping[str, TensorInfo]
    quantisation: Quantisation

    @property
    def stored_bytes(self) -> int:
        """What its parts take in their files."""
        return sum(info.stored_bytes for info in self.parts.values())

    def read(self, device: torch.device) -> Tensor:
        """Dequantise on `device`: float16. Raises ModelLoadFailed naming a tensor that is malformed."""
        stored = self.checkpoint.read(*(f"{self.key}.{part}" for part in self.parts))
        tensors = {part: tensor.to(device) for part, tensor in zip(self.parts, stored, strict=True)}
        bias = tensors.pop("bias", None)
        if bias is not None and bool(bias.any()):
            raise malformed(self.key, "bias", "is not zero, and config.json gives its layer no bias")
        weight = torch.empty(self.shape, dtype=torch.float16, device=device)
        for first in range(0, len(weight), _SLAB_COLUMNS):
            rows = weight[first : first + _SLAB_COLUMNS]
            rows.copy_(self._matrix(_columns(tensors, first), len(rows)).t())
        return weight

    def _matrix(self, tensors: Mapping[str, Tensor], columns: int) -> Tensor:
        if self.quantisation.method == "exl2":
            return exl2.Exl2Linear(self.key, **tensors).dequantise(columns)
        return gptq.GptqLinear(self.key, **tensors, zero_offset=self.quantisation.gptq_zero_offset).dequantise()


def _columns(tensors: Mapping[str, Tensor], first: int) -> dict[str, Tensor]:
    """A layer's tensors with at most _SLAB_COLUMNS of its columns, from `first` on; what has one dimension is of its
    rows."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            per_word = _COLUMNS_PER_WORD if name in _COLUMN_PACKED else 1
            found[name] = tensor[:, first // per_word : (first + _SLAB_COLUMNS) // per_word]
    return found


def method_of(checkpoint: Checkpoint, key: str) -> Method | None:
    """How the linear layer `key` is quantised, None where it is not."""
    return next((method for mark, method in _MARKS.items() if f"{key}.{mark}" in checkpoint), None)


def is_quantised(checkpoint: Checkpoint) -> bool:
    """Whether any layer is."""
    return any(name.rpartition(".")[2] in _MARKS for name in checkpoint)


def stored_bias_shape(method: Method | None, out_features: int) -> tuple[int]:
    """A layer's bias as the checkpoint has it: EXL2 pads it like the matrix."""
    return (exl2.padded(out_features) if method == "exl2" else out_features,)


def locate_quantised(
    checkpoint: Checkpoint,
    key: str,
    shape: tuple[int, int],
    *,
    method: Method,
    declared: Quantisation | None,
    has_bias: bool,
) -> QuantisedWeight:
    """The weight of layer `key`, which config.json makes [out, in] `shape`, judged by headers alone.

    A bias is read along only where the model has none there (`has_bias`): it must be zero then. Raises
    ModelLoadFailed naming the first tensor that does not fit, or that config.json's `declared` contradicts.
    """
    if declared is not None and declared.method != method:
        mark = next(mark for mark, marked in _MARKS.items() if marked == method)
        raise malformed(key, mark, f"is {method}; config.json says the weights are {declared.method}")
    names = exl2.PARTS if method == "exl2" else gptq.PARTS
    wanted = [name for name in names if not (name == "bias" and has_bias)]
    parts = {name: checkpoint.info(f"{key}.{name}") for name in wanted if f"{key}.{name}" in checkpoint}
    out_features, in_features = shape
    if method == "exl2":
        exl2.require_exl2(key, parts, in_features, exl2.padded(out_features))
    else:
        gptq.require_gptq(key, parts, in_features, out_features)
        _require_group_size(key, parts["scales"].shape[0], in_features, declared)
    return QuantisedWeight(checkpoint, key, shape, parts, declared or Quantisation(method))


def _require_group_size(key: str, groups: int, in_features: int, declared: Quantisation | None) -> None:
    size = declared.gptq_group_size if declared else None
    if size is not None and groups != -(-in_features // size):
        raise malformed(
            key, "scales", f"has {groups} groups; config.json's group_size of {size} makes {-(-in_features // size)}"
        )
