"""What config.json says of how the weights are quantised. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.errors import UnsupportedModel

Method = Literal["exl2", "gptq"]

GPTQ_BITS = 4

_GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Method of the quantised weights.

    gptq_group_size: consecutive input rows that share a scale; None where config.json leaves it to the tensors.
    gptq_zero_offset: what is added to a stored zero point; 0 for the checkpoint format gptq_v2.
    """

    method: Method
    gptq_group_size: int | None = None
    gptq_zero_offset: int = 1


def read_quantisation(raw: Mapping[str, object]) -> Quantisation | None:
    """config.json's quantization_config, None where there is none. Raises UnsupportedModel for what is not read."""
    declared = raw.get("quantization_config")
    if declared is None:
        return None
    method = declared.get("quant_method") if isinstance(declared, dict) else None
    if method == "exl2":
        return Quantisation("exl2")
    if method == "gptq" and isinstance(declared, dict):
        return _read_gptq(declared)
    raise UnsupportedModel(
        f"the weights are quantised by a method ({method or 'unknown'}) that the torch backend does not read; "
        "it reads exl2, gptq of 4 bits and unquantised weights",
        quant_method=str(method),
    )


def _read_gptq(declared: Mapping[str, object]) -> Quantisation:
    bits, layout = declared.get("bits", GPTQ_BITS), declared.get("checkpoint_format") or "gptq"
    if bits != GPTQ_BITS:
        raise UnsupportedModel(
            f"the weights are gptq of {bits} bits; the torch backend reads gptq of {GPTQ_BITS} bits", bits=str(bits)
        )
    if declared.get("is_marlin_format"):
        layout = "marlin"
    if layout not in _GPTQ_ZERO_OFFSETS:
        raise UnsupportedModel(
            f"the weights are gptq in the checkpoint format {layout}; the torch backend reads "
            f"{' and '.join(_GPTQ_ZERO_OFFSETS)}",
            checkpoint_format=str(layout),
        )
    return Quantisation(
        "gptq",
        gptq_group_size=_group_size(declared.get("group_size")),
        gptq_zero_offset=_GPTQ_ZERO_OFFSETS[str(layout)],
    )


def _group_size(value: object) -> int | None:
    """-1 means that all rows share a scale, which the tensors show as well."""
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise UnsupportedModel(f"the weights are gptq with a group_size of {value}; it must be a power of two, or -1")
    return value
