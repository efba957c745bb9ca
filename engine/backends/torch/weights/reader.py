"""WeightReader: reads a model's tensors, stored or quantised in any supported way, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.checkpoints.checkpoint import Checkpoint
from engine.backends.checkpoints.fp8 import Fp8Codes, Fp8Weight
from engine.backends.checkpoints.quantized_tensors import by
from engine.backends.checkpoints.quantized_weight import (
    PackedSlabs,
    QuantisedWeight,
    locate_quantised,
    locate_split,
    method_of,
    stored_bias_shape,
)
from engine.backends.common.quant_config import Quantisation
from engine.backends.common.sharding import TensorPart
from engine.errors import LoadCancelled, ModelLoadFailed

Result = TypeVar("Result")

_FLOATS = ("F32", "F16", "BF16")


class StoredWeight(Protocol):
    """One tensor of the model. stored_bytes: read from the files."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stored_bytes(self) -> int: ...
    def read(self, device: torch.device) -> Tensor:
        """Return the tensor in its stored dtype, or that of its quantisation, on `device` or the CPU. Raises
        ModelLoadFailed naming the tensor or file."""


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A tensor stored as floats under its own name, of which the model may need only the first rows."""

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]

    @property
    def stored_bytes(self) -> int:
        """Its size in the file."""
        return self.checkpoint.info(self.name).stored_bytes

    @property
    def is_stored_alone(self) -> bool:
        """True if it is all of one tensor of a safetensors file."""
        info = self.checkpoint.info(self.name)
        return info.piece is None and not info.at and info.shape == self.shape

    def read(self, device: torch.device) -> Tensor:
        """Return the tensor on the CPU, as a view of the file; float32 where it was a GGUF file's codes."""
        return self.read_as(torch.float32)

    def read_as(self, dtype: torch.dtype) -> Tensor:
        """Return the same, a GGUF file's codes as `dtype`."""
        (tensor,) = self.checkpoint.read(self.name, decoded=dtype)
        return tensor[: self.shape[0]]


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The part of a weight that a rank of tensor parallelism has. Plain ones are read in part, others whole."""

    weight: StoredWeight
    part: TensorPart

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.part.shape(self.weight.shape)

    @property
    def stored_bytes(self) -> int:
        """About the size of the part in the file."""
        return self.weight.stored_bytes * self.part.length // self.weight.shape[self.part.dim]

    def read(self, device: torch.device) -> Tensor:
        """Return the part, as `weight` would return the whole."""
        if isinstance(self.weight, PlainWeight) and self.weight.is_stored_alone:
            return self.weight.checkpoint.read_ranges(self.weight.name, self.part.dim, self.part.ranges)
        whole = self.weight.read(device)
        return torch.cat(
            [whole.narrow(self.part.dim, each.start, len(each)) for each in self.part.ranges], self.part.dim
        )


def weight_parts(weights: Mapping[str, StoredWeight], parts: Mapping[str, TensorPart]) -> dict[str, StoredWeight]:
    """Return `weights`, of those in `parts` that part alone."""
    return {name: WeightPart(weight, parts[name]) if name in parts else weight for name, weight in weights.items()}


def _codes(weight: StoredWeight) -> Tensor:
    assert isinstance(weight, PlainWeight), "an adapter is not merged into codes"
    return weight.checkpoint.read_codes(weight.name)


def _packed(weight: StoredWeight) -> PackedSlabs | Fp8Codes:
    assert isinstance(weight, QuantisedWeight | Fp8Weight), "an adapter is not merged into codes"
    return weight.read_codes()


def locate_weights(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], declared: Quantisation | None
) -> dict[str, StoredWeight]:
    """Locate each tensor of `shapes` in the checkpoint: `key.weight` may be quantised, as `declared`.

    Reads only headers. Raises ModelLoadFailed for the first that is missing, or has another shape or an unsupported
    dtype.
    """
    return {name: _locate(checkpoint, name, shapes, declared) for name in shapes}


def _locate(
    checkpoint: Checkpoint, name: str, shapes: Mapping[str, tuple[int, ...]], declared: Quantisation | None
) -> StoredWeight:
    key, _, kind = name.rpartition(".")
    method = method_of(checkpoint, key)
    match shapes[name]:
        case (out_features, in_features) if method is not None and kind == "weight":
            has_bias = f"{key}.bias" in shapes
            return locate_quantised(
                checkpoint, key, (out_features, in_features), method=method, declared=declared, has_bias=has_bias
            )
        case (out_features, in_features) if name not in checkpoint and (
            split := locate_split(checkpoint, key, (out_features, in_features), declared=declared)
        ):
            return split
        case (out_features,) if kind == "bias":
            return _locate_plain(checkpoint, name, (out_features,), stored_bias_shape(method, out_features))
        case shape:
            return _locate_plain(checkpoint, name, shape, shape)


def _locate_plain(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], stored: tuple[int, ...]) -> PlainWeight:
    info = checkpoint.info(name)
    if info.shape != stored:
        source = "config.json" if info.piece is None else "its metadata"
        raise ModelLoadFailed(
            f"the tensor {name} in {info.file.name} is {by(info.shape)}; {source} makes it {by(stored)}", tensor=name
        )
    if info.kind not in _FLOATS and info.piece is None:
        raise ModelLoadFailed(
            f"the tensor {name} in {info.file.name} is stored as {info.kind}; "
            f"the torch backend reads {', '.join(_FLOATS)}",
            tensor=name,
        )
    return PlainWeight(checkpoint, name, shape)


class WeightReader:
    """Reads a model's tensors as `dtype`, and reports the bytes read.

    Checks for cancellation before each tensor, and raises LoadCancelled.
    """

    def __init__(
        self,
        weights: Mapping[str, StoredWeight],
        *,
        dtype: torch.dtype,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._weights, self._done_bytes = weights, 0
        self._total_bytes = sum(weight.stored_bytes for weight in weights.values())
        self._dtype = dtype
        self._report, self._cancelled = report, cancelled

    def read(self, *names: str, device: torch.device) -> Tensor:
        """Return the named tensors, concatenated along their first dimension into a new tensor on `device`."""
        return self._concatenate(names, (self._read_stored(name, device) for name in names), device)

    def read_codes(self, *names: str) -> tuple[Tensor, ...]:
        """Return the rows of a GGUF file's tensors as the file has them, uint8 [rows, bytes of a row]."""
        return tuple(self._counted(name, _codes) for name in names)

    def read_packed(self, *names: str) -> tuple[PackedSlabs | Fp8Codes, ...]:
        """Return weights of a model folder as they are stored in GPTQ, AWQ or 8-bit floats, on the CPU."""
        return tuple(self._counted(name, _packed) for name in names)

    def view(self, *names: str, device: torch.device) -> tuple[Tensor, ...]:
        """Return the named tensors without a copy where dtype and device allow. The file may change, so a view must be
        copied at once."""
        stored = tuple(self._read_stored(name, device) for name in names)
        if all((each.dtype, each.device.type) == (self._dtype, device.type) for each in stored):
            return tuple(each.contiguous() for each in stored)
        return (self._concatenate(names, stored, device),)

    def _concatenate(self, names: Sequence[str], parts: Iterable[Tensor], device: torch.device) -> Tensor:
        shapes = [self._weights[name].shape for name in names]
        rows = [shape[0] for shape in shapes]
        concatenated = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=device)
        for part, target in zip(parts, concatenated.split(rows), strict=True):
            target.copy_(part)
        return concatenated

    def _read_stored(self, name: str, device: torch.device) -> Tensor:
        return self._counted(
            name,
            lambda weight: weight.read_as(self._dtype) if isinstance(weight, PlainWeight) else weight.read(device),
        )

    def _counted(self, name: str, read: Callable[[StoredWeight], Result]) -> Result:
        if self._cancelled():
            raise LoadCancelled("loading was cancelled while reading the weights")
        weight = self._weights[name]
        found = read(weight)
        self._done_bytes = min(self._done_bytes + weight.stored_bytes, self._total_bytes)
        self._report(LoadProgress(phase="weights", done=self._done_bytes, total=self._total_bytes))
        return found

    def finish(self) -> None:
        """Report completion, where not everything had to be read."""
        if self._done_bytes < self._total_bytes:
            self._report(LoadProgress(phase="weights", done=self._total_bytes, total=self._total_bytes))
