"""Weights that `--weights` makes smaller, and their size then. Integers alone: nothing here imports torch.

All linear layers are made so but the routers of a mixture; the head, where an error costs most, is never below 8 bits.
Embedding, norms and biases stay as they are. Without it, weights of 16 bits may stay such with rows of float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from engine.backends.common.model_config import ModelConfig
from engine.config import ModelSpec, WeightsName

Bits = Literal[8, 4]

BITS: Mapping[WeightsName, Bits] = MappingProxyType({"int8": 8, "int4": 4})
HEAD_BITS: Bits = 8
GROUP_INPUTS: Mapping[Bits, int] = MappingProxyType({8: 64, 4: 32})
"""Inputs of an output that share a scale, as native/quantised.h has it."""

PACK_FLOAT32_MIN_ELEMENTS = 1 << 18
"""Below this, float32 multiplies faster unpacked."""

MAX_HEAD_COPY_BYTES = 256 << 20
"""A tied head is packed for the CPU as a copy of the embedding up to this size; a larger one is used as it is."""

HALF_BYTES = 2

_BLOCK = 16
_SCALE_BYTES = 2


class _Linear(NamedTuple):
    """The shape of a layer. gates: the first half of the outputs gates the second."""

    outputs: int
    inputs: int
    gates: bool = False


def packed_bytes(bits: Bits, outputs: int, inputs: int, *, gates: bool = False) -> int:
    """Codes and scales of a layer as the kernels read it: padded to whole groups and to blocks of 16 outputs."""
    blocks = 2 * -(-outputs // 2 // _BLOCK) if gates else -(-outputs // _BLOCK)
    group = GROUP_INPUTS[bits]
    return blocks * _BLOCK * -(-inputs // group) * (group * bits // 8 + _SCALE_BYTES)


def saved_bytes(config: ModelConfig, layer: int, weights: WeightsName, item_bytes: int) -> int:
    """By how much less a layer takes than with `item_bytes` for every weight."""
    if weights == "auto":
        return 0
    return sum(
        count
        * (
            item_bytes * each.outputs * each.inputs
            - packed_bytes(BITS[weights], each.outputs, each.inputs, gates=each.gates)
        )
        for each, count in _linears(config, layer)
    )


def keeps_float16(spec: ModelSpec, dtype: str, stored: str) -> bool:
    """Return whether linear layers on a CPU without our kernels keep weights `stored` in 16 bits as float16, where
    float32 is the `dtype` only for want of something better. A load that asks for float32 gets all of it."""
    if spec.tensor_parallel_size > 1:
        return False
    return (spec.dtype, spec.weights, dtype) == ("auto", "auto", "float32") and stored in ("bfloat16", "float16")


def fp16_saved_bytes(config: ModelConfig, layer: int) -> int:
    """By how much less a layer takes then than in float32."""
    sizes = ((each.outputs * each.inputs, count) for each, count in _linears(config, layer))
    return sum(HALF_BYTES * elements * count for elements, count in sizes if elements >= PACK_FLOAT32_MIN_ELEMENTS)


def fp16_saved_head_bytes(config: ModelConfig) -> int:
    """By how much less a head takes then that is not the embedding itself."""
    elements = config.vocab_size * config.hidden_size
    return HALF_BYTES * elements if elements >= PACK_FLOAT32_MIN_ELEMENTS else 0


def head_bytes(config: ModelConfig) -> int:
    """The head, which is a copy of the embedding where the two are tied."""
    return packed_bytes(HEAD_BITS, config.vocab_size, config.hidden_size)


def _linears(config: ModelConfig, layer: int) -> Iterator[tuple[_Linear, int]]:
    """The linear layers of a block, and how many there are of each."""
    hidden, queries = config.hidden_size, config.heads * config.head_dim
    yield _Linear(queries + 2 * config.kv_heads * config.head_dim, hidden), 1
    yield _Linear(hidden, queries), 1
    experts = config.traits.experts_of(layer)
    inners = [(config.intermediate_size, 1)] if experts is None else [(experts.inner, experts.count)]
    if experts is not None and experts.shared_inner:
        inners.append((experts.shared_inner, 1))
    for inner, count in inners:
        yield _Linear(2 * inner, hidden, gates=True), count
        yield _Linear(hidden, inner), count
