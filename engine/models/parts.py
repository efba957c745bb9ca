"""How a model's weights are spread over its parts, from the headers of its files: embedding, each layer, head. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from engine.backends.torch.quant.declared import FP8_KINDS
from engine.models.headers import TensorHeader

MAX_LAYERS = 10_000
"""The largest models have some hundred; each is counted on its own."""

_LAYER_DIGITS = len(str(MAX_LAYERS))

_EMBEDDING = r"embed_tokens|embed_positions|wte|wpe|tok_embeddings|word_embeddings|embed_in"
_EMBEDDING_OR_LAYER = re.compile(rf"(?:^|\.)(?:{_EMBEDDING}|(?:layers|layer|h|blocks)\.(\d+))\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output|embed_out)\.")
_WIDE = ("F64", "F32")
_NOT_WEIGHTS = frozenset(
    (
        *("q_scale", "q_scale_max", "q_groups", "q_group_map", "q_perm", "q_invperm"),  # exl2
        *("qzeros", "scales", "g_idx"),  # gptq, awq
        *("weight_scale", "weight_scale_inv", "input_scale", "activation_scale", "k_scale", "v_scale"),  # fp8
        *("absmax", "quant_map", "nested_absmax", "nested_quant_map"),  # bitsandbytes
    )
)
_NUMBERS = frozenset({"F64", "F32", "F16", "BF16", *FP8_KINDS, "I8"})


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a model's tensors. elements: weights that they stand for, packed ones unpacked.

    packed_bytes: what they take as the files have them, floats wider than 16 bits cut to those.
    """

    elements: int = 0
    packed_bytes: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(elements=self.elements + other.elements, packed_bytes=self.packed_bytes + other.packed_bytes)


class ModelParts(msgspec.Struct, frozen=True, kw_only=True):
    """All parts. embedding: and what else comes before the layers; norm: and what else comes after them, but for the
    head.  packed_head: whether the head is quantised."""

    embedding: Part = Part()
    layers: tuple[Part, ...] = ()
    norm: Part = Part()
    head: Part = Part()
    packed_head: bool = False


def divide(tensors: Mapping[str, TensorHeader], layers: int, bits: float | None) -> ModelParts:
    """Give each tensor to its part; one of a layer beyond `layers` (guessing ahead, say) comes after them. Those for
    images and sound are of no part: no backend loads them.

    bits: of the quantised weights, as config.json has it.
    """
    elements_of, packed_of = [0] * (layers + 3), [0] * (layers + 3)
    packed_head = False
    for name, tensor in tensors.items():
        place = _place(name, layers)
        if place is not None:
            elements_of[place] += elements(name, tensors, bits)
            packed_of[place] += _packed_bytes(tensor)
            packed_head = packed_head or (place == _AT_HEAD and _is_packed(name, tensor))
    parts = [Part(elements=each, packed_bytes=packed) for each, packed in zip(elements_of, packed_of, strict=True)]
    return ModelParts(
        embedding=parts[_AT_EMBEDDING],
        layers=tuple(parts[:layers]),
        norm=parts[_AT_NORM],
        head=parts[_AT_HEAD],
        packed_head=packed_head,
    )


_AT_EMBEDDING, _AT_NORM, _AT_HEAD = -3, -2, -1


def _place(name: str, layers: int) -> int | None:
    """The layer that a tensor belongs to, else one of the other parts; None for neither."""
    if "vision" in name or "visual" in name or "image" in name or "audio" in name:
        return None
    if "multi_modal" in name or "mm_projector" in name:
        return None
    found = _EMBEDDING_OR_LAYER.search(name)
    if found is None:
        return _AT_HEAD if _HEAD.search(name) else _AT_NORM
    number = found[1]
    if number is None:
        return _AT_EMBEDDING
    if len(number) <= _LAYER_DIGITS and int(number) < layers:
        return int(number)
    return _AT_NORM


def elements(name: str, tensors: Mapping[str, TensorHeader], bits: float | None) -> int:
    """How many weights of the model a stored tensor stands for; packed ones stand for more than their elements."""
    tensor = tensors[name]
    stem, _, kind = name.rpartition(".")
    if kind == "q_weight":  # exl2: [packed rows, columns, padded to 32]; its permutation has one entry per row
        rows = tensors.get(f"{stem}.q_invperm") or tensors.get(f"{stem}.q_perm")
        return min(rows.elements * tensor.shape[-1], 8 * tensor.stored_bytes) if rows and tensor.shape else 0
    if kind == "qweight":  # gptq and awq: 32-bit words full of values
        return int(tensor.elements * 32 / (bits or 4))
    if kind in _NOT_WEIGHTS or ".quant_state." in name:
        return 0
    if tensor.dtype == "U8":  # bitsandbytes: two 4-bit values a byte
        return tensor.elements * 2
    return tensor.elements if tensor.dtype in _NUMBERS else 0


def _is_packed(name: str, tensor: TensorHeader) -> bool:
    return name.endswith((".q_weight", ".qweight")) or tensor.dtype in FP8_KINDS


def _packed_bytes(tensor: TensorHeader) -> int:
    return tensor.elements * 2 if tensor.dtype in _WIDE else tensor.stored_bytes
