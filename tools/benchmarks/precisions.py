"""Precisions of linear layers, read from the output of engines: "bf16", "f32" or "int8". Needs no package."""

from __future__ import annotations

_SHORT = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


def of_dtype(name: str) -> str:
    """That of a type as torch calls it, "bfloat16" or "torch.bfloat16"."""
    name = name.removeprefix("torch.")
    return _SHORT.get(name, name)


def of_linear_layers(linear: str, dtype: str) -> str:
    """This engine's. linear: what multiplies, "native avx512_vnni int4", whose rows are rounded to 8 bits."""
    return "int8" if "int" in linear else of_dtype(dtype)


def of_compute_type(name: str) -> str:
    """CTranslate2's: "int8_float32" has float32 around products of 8 bits."""
    return of_dtype(name.partition("_")[0])


def of_openvino(weights: str, inference: str, cpuinfo: str) -> str:
    """OpenVINO's. inference: its INFERENCE_PRECISION_HINT.

    By default it rounds rows of float32 to 8 bits for weights that have 8, where the CPU has VNNI; else it makes
    weights into what rows are.
    """
    return "int8" if (weights, inference) == ("int8", "f32") and "vnni" in cpuinfo else inference
