"""How a model's weights are spread over its parts, from the headers of its files: embedding, each layer, head. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from engine.backends.torch.quant.declared import FP8_KINDS
from engine.models.headers import TensorHeader

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embed_positions|wte|wpe|tok_embeddings|word_embeddings|embed_in)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output|embed_out)\.")
_ELSEWHERE = re.compile(r"vision|visual|image|audio|multi_modal|mm_projector")
_WIDE = ("F64", "F32")
_NOT_WEIGHTS = (
    *(".q_scale", ".q_scale_max", ".q_groups", ".q_group_map", ".q_perm", ".q_invperm"),  # exl2
    *(".qzeros", ".scales", ".g_idx"),  # gptq, awq
    *(".weight_scale", ".weight_scale_inv", ".input_scale", ".activation_scale", ".k_scale", ".v_scale"),  # fp8
    *(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),  # bitsandbytes
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
    embedding = norm = head = Part()
    by_layer = [Part()] * layers
    for name, tensor in tensors.items():
        part = Part(elements=elements(name, tensors, bits), packed_bytes=_packed_bytes(tensor))
        found = _LAYER.search(name)
        if _ELSEWHERE.search(name):
            continue
        if _EMBEDDING.search(name):
            embedding += part
        elif found is not None and int(found[1]) < layers:
            by_layer[int(found[1])] += part
        elif found is None and _HEAD.search(name):
            head += part
        else:
            norm += part
    packed_head = any(_HEAD.search(name) and _is_packed(name, tensor) for name, tensor in tensors.items())
    return ModelParts(embedding=embedding, layers=tuple(by_layer), norm=norm, head=head, packed_head=packed_head)


def elements(name: str, tensors: Mapping[str, TensorHeader], bits: float | None) -> int:
    """How many weights of the model a stored tensor stands for; packed ones stand for more than their elements."""
    tensor = tensors[name]
    stem, _, kind = name.rpartition(".")
    if kind == "q_weight":  # exl2: [packed rows, columns, padded to 32]; its permutation has one entry per row
        rows = tensors.get(f"{stem}.q_invperm") or tensors.get(f"{stem}.q_perm")
        return rows.elements * tensor.shape[-1] if rows and tensor.shape else 0
    if kind == "qweight":  # gptq and awq: 32-bit words full of values
        return int(tensor.elements * 32 / (bits or 4))
    if name.endswith(_NOT_WEIGHTS) or ".quant_state." in name:
        return 0
    if tensor.dtype == "U8":  # bitsandbytes: two 4-bit values a byte
        return tensor.elements * 2
    return tensor.elements if tensor.dtype in _NUMBERS else 0


def _is_packed(name: str, tensor: TensorHeader) -> bool:
    return name.endswith((".q_weight", ".qweight")) or tensor.dtype in FP8_KINDS


def _packed_bytes(tensor: TensorHeader) -> int:
    return tensor.elements * 2 if tensor.dtype in _WIDE else tensor.stored_bytes
