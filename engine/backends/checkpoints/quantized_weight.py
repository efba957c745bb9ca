"""A quantised linear layer of a checkpoint, read as the plain weight that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.checkpoints import awq, exl2, exl3, gptq
from engine.backends.checkpoints.checkpoint import Checkpoint, TensorInfo
from engine.backends.checkpoints.fp8 import Fp8Weight, locate_fp8
from engine.backends.checkpoints.quantized_tensors import malformed_tensor
from engine.backends.common.quant_config import FP8_KINDS, Method, Quantisation, method_of_words

_MARKS: dict[Method, str] = {
    "exl2": "q_weight",
    "exl3": "trellis",
    "gptq": "qweight",
    "awq": "qweight",
    "fp8": "weight",
}
"""The tensor by which each method is known: the tensors decide, config.json may be silent."""

_PARTS: dict[Method, tuple[str, ...]] = {
    "exl2": exl2.PARTS,
    "exl3": exl3.PARTS,
    "gptq": gptq.PARTS,
    "awq": awq.PARTS,
}
_COLUMN_PACKED: dict[Method, tuple[str, ...]] = {
    "exl2": ("q_scale",),
    "gptq": ("qzeros",),
    "awq": ("qweight", "qzeros"),
}
_COLUMNS_PER_WORD = 8
_SPLIT = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The layers that exllamav3 writes in place of one which the model has fused, by the last word of their keys."""

_SLAB_COLUMNS = 4096
"""Columns dequantised at a time: besides the weight itself, only a slab of it is in memory."""


PackedSlabs = tuple[gptq.GptqLinear | awq.AwqLinear, ...]
"""A layer in parts, each with some of its columns."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """The weight of layer `key`, [out, in], which is stored as the matrix [in, out] in words of small whole numbers;
    `parts` are the tensors that it is made from, by their short names."""

    checkpoint: Checkpoint
    key: str
    shape: tuple[int, int]
    parts: Mapping[str, TensorInfo]
    quantisation: Quantisation

    @property
    def stored_bytes(self) -> int:
        """Bytes of its parts in their files."""
        return sum(info.stored_bytes for info in self.parts.values())

    def read(self, device: torch.device) -> Tensor:
        """Dequantise on `device`: float16. Raises ModelLoadFailed naming a tensor that is malformed."""
        tensors = {part: tensor.to(device) for part, tensor in self._tensors().items()}
        weight = torch.empty(self.shape, dtype=torch.float16, device=device)
        if self.quantisation.method == "exl3":
            exl3.Exl3Linear(self.key, **tensors).write(weight)
            return weight
        for first in range(0, len(weight), _SLAB_COLUMNS):
            rows = weight[first : first + _SLAB_COLUMNS]
            rows.copy_(self._matrix(self._columns(tensors, first), len(rows)).t())
        return weight

    def read_codes(self) -> PackedSlabs:
        """Read GPTQ or AWQ as it is stored, in slabs of its columns, on the CPU. Raises as `read`."""
        tensors = self._tensors()
        return tuple(self._packed(self._columns(tensors, first)) for first in range(0, self.shape[0], _SLAB_COLUMNS))

    def _tensors(self) -> dict[str, Tensor]:
        stored = self.checkpoint.read(*(f"{self.key}.{part}" for part in self.parts))
        tensors = dict(zip(self.parts, stored, strict=True))
        bias = tensors.pop("bias", None)
        if bias is not None and bool(bias.any()):
            raise malformed_tensor(self.key, "bias", "is not zero, and config.json gives its layer no bias")
        return tensors

    def _matrix(self, tensors: Mapping[str, Tensor], columns: int) -> Tensor:
        if self.quantisation.method == "exl2":
            return exl2.Exl2Linear(self.key, **tensors).dequantise(columns)
        return self._packed(tensors).dequantise()

    def _packed(self, tensors: Mapping[str, Tensor]) -> gptq.GptqLinear | awq.AwqLinear:
        if self.quantisation.method == "awq":
            return awq.AwqLinear(self.key, **tensors)
        return gptq.GptqLinear(self.key, **tensors, zero_offset=self.quantisation.gptq_zero_offset)

    def _columns(self, tensors: Mapping[str, Tensor], first: int) -> dict[str, Tensor]:
        """A layer's tensors with at most _SLAB_COLUMNS of its columns, from `first` on; what has one dimension is of
        its rows."""
        found, packed = dict(tensors), _COLUMN_PACKED[self.quantisation.method]
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                per_word = _COLUMNS_PER_WORD if name in packed else 1
                found[name] = tensor[:, first // per_word : (first + _SLAB_COLUMNS) // per_word]
        return found


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """The weight [out, in] of a fused layer that is stored as several: their rows, one after the other."""

    parts: tuple[QuantisedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts in their files."""
        return sum(part.stored_bytes for part in self.parts)

    def read(self, device: torch.device) -> Tensor:
        """Dequantise on `device`: float16. Raises ModelLoadFailed naming a tensor that is malformed."""
        weight = torch.empty(self.shape, dtype=torch.float16, device=device)
        for part, rows in zip(self.parts, weight.split([part.shape[0] for part in self.parts]), strict=True):
            rows.copy_(part.read(device))
        return weight


def locate_split(
    checkpoint: Checkpoint, key: str, shape: tuple[int, int], *, declared: Quantisation | None
) -> JoinedWeight | None:
    """The weight of the fused layer `key`, [out, in] `shape`, where EXL3 tensors of its parts are stored; else None.

    Raises ModelLoadFailed as `locate_quantised`, and for parts that do not add up to the layer.
    """
    stem, _, name = key.rpartition(".")
    keys = [f"{stem}.{part}" for part in _SPLIT.get(name, ())]
    if not keys or any(method_of(checkpoint, each) != "exl3" for each in keys):
        return None
    rows = [exl3.out_features(checkpoint.info(f"{each}.trellis")) for each in keys]
    if sum(rows) != shape[0]:
        problem = f"has {rows[0]} outputs, and with {' and '.join(keys[1:])} {sum(rows)}; {key} has {shape[0]}"
        raise malformed_tensor(keys[0], "trellis", problem)
    located = [
        locate_quantised(checkpoint, each, (count, shape[1]), method="exl3", declared=declared, has_bias=False)
        for each, count in zip(keys, rows, strict=True)
    ]
    return JoinedWeight(tuple(part for part in located if isinstance(part, QuantisedWeight)))


def method_of(checkpoint: Checkpoint, key: str) -> Method | None:
    """How the linear layer `key` is quantised, None where it is not."""
    if f"{key}.q_weight" in checkpoint:
        return "exl2"
    if f"{key}.trellis" in checkpoint:
        return "exl3"
    if f"{key}.qweight" in checkpoint:
        columns = _width(checkpoint, f"{key}.scales") or _COLUMNS_PER_WORD * _width(checkpoint, f"{key}.qzeros")
        return method_of_words(_width(checkpoint, f"{key}.qweight"), columns)
    weight = f"{key}.weight"
    return "fp8" if weight in checkpoint and checkpoint.info(weight).kind in FP8_KINDS else None


def methods_of(checkpoint: Checkpoint) -> frozenset[Method]:
    """How any layers are."""
    keys = {name.rpartition(".")[0] for name in checkpoint if name.rpartition(".")[2] in _MARKS.values()}
    return frozenset(method for key in keys if (method := method_of(checkpoint, key)) is not None)


def _width(checkpoint: Checkpoint, name: str) -> int:
    """Last dimension of a tensor, 0 where it is missing or a scalar."""
    shape = checkpoint.info(name).shape if name in checkpoint else ()
    return shape[-1] if shape else 0


def stored_bias_shape(method: Method | None, out_features: int) -> tuple[int]:
    """A layer's bias as the checkpoint has it: EXL2 and EXL3 pad it like the matrix."""
    match method:
        case "exl2":
            return (exl2.padded_columns(out_features),)
        case "exl3":
            return (exl3.padded_features(out_features),)
        case _:
            return (out_features,)


def locate_quantised(
    checkpoint: Checkpoint,
    key: str,
    shape: tuple[int, int],
    *,
    method: Method,
    declared: Quantisation | None,
    has_bias: bool,
) -> QuantisedWeight | Fp8Weight:
    """The weight of layer `key`, which config.json makes [out, in] `shape`, judged by headers alone.

    A bias is read along only where the model has none there (`has_bias`): it must be zero then. Raises
    ModelLoadFailed naming the first tensor that does not fit, or that config.json's `declared` contradicts.
    """
    if declared is not None and declared.method != method:
        raise malformed_tensor(key, _MARKS[method], f"is {method}; config.json says the weights are {declared.method}")
    if method == "fp8":
        return locate_fp8(checkpoint, key, shape, declared.fp8_block if declared else None)
    wanted = [name for name in _PARTS[method] if not (name == "bias" and has_bias)]
    parts = {name: checkpoint.info(f"{key}.{name}") for name in wanted if f"{key}.{name}" in checkpoint}
    out_features, in_features = shape
    if method == "exl2":
        exl2.require_exl2(key, parts, in_features, exl2.padded_columns(out_features))
    elif method == "exl3":
        exl3.require_exl3(key, parts, in_features, out_features)
    else:
        require = awq.require_awq if method == "awq" else gptq.require_gptq
        require(key, parts, in_features, out_features)
        _require_group_size(key, parts["scales"].shape[0], in_features, declared)
    return QuantisedWeight(checkpoint, key, shape, parts, declared or Quantisation(method))


def _require_group_size(key: str, groups: int, in_features: int, declared: Quantisation | None) -> None:
    size = declared.group_size if declared else None
    if size is not None and groups != -(-in_features // size):
        raise malformed_tensor(
            key, "scales", f"has {groups} groups; config.json's group_size of {size} makes {-(-in_features // size)}"
        )
