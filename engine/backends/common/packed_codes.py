"""Weights of a model folder that the kernels of CUDA compute from as the files have them: GPTQ and AWQ of 4 bits, and
8-bit floats. By headers alone: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.backends.common.gguf_codes import CodedTensors, Codes
from engine.backends.common.quant_config import (
    FP8_KINDS,
    FP8_SCALES,
    Quantisation,
    fp8_scales,
    gptq_group_size,
    method_of_words,
)

Headers = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor, in safetensors' words."""

_GROUP_INPUTS = 32
_STEP_GROUPS = 4
_WORD_VALUES = 8

ALL = 1 << 24
"""Groups of a span, or rows, where one scale is for all of them, whatever their number."""


def packed_codes(tensors: Headers, declared: Quantisation | None) -> CodedTensors:
    """Return the matrices that the kernels compute from, by their names as plain weights.

    Those are matrices of whole groups of 32 inputs whose scales are for one or two groups, a multiple of four, or all.
    """
    found: dict[str, Codes] = {}
    for name, (shape, kind) in tensors.items():
        key, _, last = name.rpartition(".")
        codes = None
        if last == "qweight" and len(shape) == 2 and kind == "I32":
            codes = _four_bits(tensors, key, shape)
        elif last == "weight" and len(shape) == 2 and kind in FP8_KINDS:
            codes = _floats(tensors, key, (shape[0], shape[1]), kind, declared)
        if codes is not None and codes.inputs > 0 and codes.rows > 0 and codes.inputs % _GROUP_INPUTS == 0:
            found[f"{key}.weight"] = codes
    return CodedTensors(found, "cuda")


def _four_bits(tensors: Headers, key: str, words: tuple[int, ...]) -> Codes | None:
    scales, _ = tensors.get(f"{key}.scales", ((), ""))
    if len(scales) != 2 or scales[0] < 1:
        return None
    groups, rows = scales
    if method_of_words(words[1], rows) == "awq":
        span = _span(words[0] // groups, words[0])
        return None if span is None else Codes("AWQ", rows, words[0], span)
    inputs = words[0] * _WORD_VALUES
    span = _span(gptq_group_size(inputs, groups), inputs)
    return None if span is None else Codes("GPTQ", rows, inputs, span, ordered=f"{key}.g_idx" in tensors)


def _floats(
    tensors: Headers, key: str, shape: tuple[int, int], kind: str, declared: Quantisation | None
) -> Codes | None:
    scale = next((tensors[name][0] for name in _scale_names(key) if name in tensors), None)
    block = dict(fp8_scales(shape, declared.fp8_block if declared else None)).get(scale) if scale is not None else None
    if block is None:
        return None
    span = _span(block[1], shape[1])
    if span is None:
        return None
    rounds_x = declared is not None and declared.fp8_activations
    return Codes(kind, *shape, span, ALL if block[0] >= shape[0] else block[0], rounds_x=rounds_x)


def _scale_names(key: str) -> Iterator[str]:
    return (f"{key}.{name}" for name in FP8_SCALES)


def _span(size: int, inputs: int) -> int | None:
    """Groups of 32 inputs of a span of `size` inputs; None where the kernels do not have it."""
    if size >= inputs:
        return ALL
    span, rest = divmod(size, _GROUP_INPUTS)
    return span if rest == 0 and (span in (1, 2) or (span and span % _STEP_GROUPS == 0)) else None
