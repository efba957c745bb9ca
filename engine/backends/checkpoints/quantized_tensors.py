"""The tensors that one quantised linear layer is stored as, checked by their shapes and dtypes before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import ModelLoadFailed

_KINDS = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int16: "I16",
}


class Part(Protocol):
    """A tensor by its file's header; `kind` is its dtype in safetensors' words ("I32")."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...


class TensorPart(NamedTuple):
    """The same of a tensor in memory."""

    shape: tuple[int, ...]
    kind: str


def parts_of(tensors: Mapping[str, Tensor | None]) -> dict[str, TensorPart]:
    """Describe each tensor that is there."""
    return {
        name: TensorPart(tuple(tensor.shape), _KINDS.get(tensor.dtype, str(tensor.dtype)))
        for name, tensor in tensors.items()
        if tensor is not None
    }


class Wanted(NamedTuple):
    """Shape and kinds that a part must have."""

    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    optional: bool = False


def first_size(parts: Mapping[str, Part], name: str) -> int:
    """First dimension of a part; 0 where it is missing or a scalar, which `require_parts` then refuses."""
    part = parts.get(name)
    return part.shape[0] if part is not None and part.shape else 0


def require_parts(key: str, parts: Mapping[str, Part], wanted: Mapping[str, Wanted]) -> None:
    """Raise ModelLoadFailed naming the first of `wanted` that layer `key` lacks, or that is of another shape or dtype.

    An optional part may be missing.
    """
    for name, want in wanted.items():
        part = parts.get(name)
        if part is None:
            if want.optional:
                continue
            raise malformed_tensor(key, name, "is missing")
        if part.shape != want.shape:
            raise malformed_tensor(key, name, f"is {by(part.shape)}; its layer makes it {by(want.shape)}")
        if part.kind not in want.kinds:
            raise malformed_tensor(key, name, f"is stored as {part.kind}; it must be {' or '.join(want.kinds)}")


def malformed_tensor(key: str, name: str, problem: str) -> ModelLoadFailed:
    """The refusal of tensor `key`.`name`, whose `problem` ends the sentence."""
    return ModelLoadFailed(f"the quantised tensor {key}.{name} {problem}", tensor=f"{key}.{name}")


def by(shape: tuple[int, ...]) -> str:
    """ "4 x 8"."""
    return " x ".join(map(str, shape)) or "a scalar"
