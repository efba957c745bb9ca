"""Quantisation of the weights by config.json, and other signs of the methods. No torch here."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from engine.config import quote_value
from engine.errors import UnsupportedModel

Method = Literal["exl2", "exl3", "gptq", "awq", "fp8"]

FP8_KINDS = ("F8_E4M3", "F8_E5M2")
"""8-bit floats in safetensors' words. A weight of these is fp8."""

FP8_SCALES = ("weight_scale_inv", "weight_scale")
"""Tensors next to such a weight, one of which has its scales."""

FP8_BLOCK = (128, 128)
"""Rows and columns that share a scale, where config.json does not say it."""

GPTQ_BITS = 4

_MAX_GROUP = 2**24
"""Rows or columns that share a scale: as many as a weight can have."""

_AWQ_VERSION = "gemm"
_AWQ_BITS = 4
_FP8_STRATEGIES = ("tensor", "channel", "block")
_X_STRATEGIES = ("tensor", "token")
_GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}

_READ = "exl2, exl3, gptq and awq of 4 bits, fp8 and unquantised weights"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Method of the quantised weights. Which layers have it, their tensors show: those that config.json excepts
    (`modules_to_not_convert`, `ignore`) are stored as plain numbers.

    group_size: consecutive input rows that share a scale; None where config.json leaves it to the tensors.
    gptq_zero_offset: what is added to a stored zero point; 0 for the checkpoint format gptq_v2.
    fp8_block: rows and columns of a weight that share a scale; None where the scales' shape shows it.
    fp8_activations: the model is meant for x in 8-bit floats too, scaled as it comes.
    """

    method: Method
    group_size: int | None = None
    gptq_zero_offset: int = 1
    fp8_block: tuple[int, int] | None = None
    fp8_activations: bool = False


def read_quantisation(raw: Mapping[str, object]) -> Quantisation | None:
    """config.json's quantization_config, None where there is none. Raises UnsupportedModel for what is not read."""
    declared = raw.get("quantization_config")
    if declared is None:
        return None
    settings: Mapping[str, object] = declared if isinstance(declared, dict) else {}
    match settings.get("quant_method"):
        case "exl2" | "exl3" as method:
            return Quantisation(method)
        case "gptq":
            return _read_gptq(settings)
        case "awq":
            return _read_awq(settings)
        case "fp8":
            dynamic = settings.get("activation_scheme") == "dynamic"
            return Quantisation("fp8", fp8_block=_block(settings.get("weight_block_size")), fp8_activations=dynamic)
        case "compressed-tensors":
            return _read_compressed(settings)
        case method:
            raise UnsupportedModel(
                f"the weights are quantised by a method ({quote_value(method or 'unknown')}) that the torch backend "
                f"does not read; it reads {_READ}",
                quant_method=quote_value(method),
            )


def method_of_words(words: int, columns: int) -> Method:
    """Which method packed a `qweight` that is `words` wide for `columns` columns: AWQ puts eight columns into a word,
    GPTQ eight rows."""
    return "awq" if 0 < 2 * words <= columns else "gptq"


def gptq_group_size(in_features: int, groups: int) -> int:
    """Consecutive rows per group where g_idx does not say: the smallest power of two with which `groups` suffice."""
    return 1 << (-(-in_features // groups) - 1).bit_length()


def fp8_scales(
    shape: tuple[int, int], block: tuple[int, int] | None
) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    """Shapes that the scales of a weight [rows, columns] may have, each with the block of it that shares one.

    block: as config.json has it; without one all shapes are possible.
    """
    rows, columns = shape
    down, across = block or FP8_BLOCK
    yield (-(-rows // down), -(-columns // across)), (down, across)
    if block is None:
        yield from ((scalar, shape) for scalar in ((), (1,), (1, 1)))
        yield from ((channels, (1, columns)) for channels in ((rows,), (rows, 1)))


def _read_gptq(declared: Mapping[str, object]) -> Quantisation:
    bits, layout = declared.get("bits", GPTQ_BITS), declared.get("checkpoint_format") or "gptq"
    _require_bits("gptq", bits, GPTQ_BITS)
    if declared.get("is_marlin_format"):
        layout = "marlin"
    if not isinstance(layout, str) or layout not in _GPTQ_ZERO_OFFSETS:
        raise UnsupportedModel(
            f"the weights are gptq in the checkpoint format {quote_value(layout)}; the torch backend reads "
            f"{' and '.join(_GPTQ_ZERO_OFFSETS)}",
            checkpoint_format=quote_value(layout),
        )
    size = _group_size("gptq", declared.get("group_size"))
    if size is not None and size & (size - 1):
        raise UnsupportedModel(f"the weights are gptq with a group_size of {size}; it must be a power of two, or -1")
    return Quantisation("gptq", group_size=size, gptq_zero_offset=_GPTQ_ZERO_OFFSETS[layout])


def _read_awq(declared: Mapping[str, object]) -> Quantisation:
    """AutoAWQ calls the layout `version`, transformers 5 `format` as well; both mean gemm where they say nothing."""
    _require_bits("awq", declared.get("bits", _AWQ_BITS), _AWQ_BITS)
    version = quote_value(declared.get("version") or declared.get("format") or _AWQ_VERSION).lower()
    if declared.get("backend") == "llm-awq":
        version = "llm-awq"
    if version != _AWQ_VERSION:
        raise UnsupportedModel(
            f"the weights are awq in the version {version}; the torch backend reads the version {_AWQ_VERSION}",
            version=version,
        )
    if declared.get("zero_point", True) is not True:
        raise UnsupportedModel("the weights are awq without zero points; the torch backend reads awq with them")
    return Quantisation("awq", group_size=_group_size("awq", declared.get("group_size")))


def _read_compressed(declared: Mapping[str, object]) -> Quantisation:
    """compressed-tensors' config_groups, each the scheme of some layers' weights."""
    groups = declared.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    schemes = [group["weights"] for group in found if isinstance(group, dict) and _is_fp8(group.get("weights"))]
    activations = [group.get("input_activations") for group in found if isinstance(group, dict)]
    if not schemes or len(schemes) < len(found):
        raise UnsupportedModel(
            f"the weights are compressed-tensors in the format {quote_value(declared.get('format') or 'unknown')}; of "
            f"those the torch backend reads floats of 8 bits with a scale for each {', '.join(_FP8_STRATEGIES)}",
            format=quote_value(declared.get("format")),
        )
    blocks = {_block(scheme.get("block_structure")) for scheme in schemes}
    dynamic = all(map(_is_dynamic, activations))
    return Quantisation("fp8", fp8_block=blocks.pop() if len(blocks) == 1 else None, fp8_activations=dynamic)


def _is_fp8(scheme: object, strategies: Container[object] = _FP8_STRATEGIES) -> bool:
    return (
        isinstance(scheme, dict)
        and scheme.get("type") == "float"
        and scheme.get("num_bits") == 8
        and scheme.get("symmetric", True) is True
        and scheme.get("strategy") in strategies
    )


def _is_dynamic(scheme: object) -> bool:
    return isinstance(scheme, dict) and scheme.get("dynamic") is True and _is_fp8(scheme, _X_STRATEGIES)


def _require_bits(method: Method, bits: object, read: int) -> None:
    if bits != read:
        raise UnsupportedModel(
            f"the weights are {method} of {quote_value(bits)} bits; the torch backend reads {method} of {read} bits",
            bits=quote_value(bits),
        )


def _group_size(method: Method, value: object) -> int | None:
    """-1 means that all rows share a scale, which the tensors show as well."""
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or not 1 <= value <= _MAX_GROUP:
        raise UnsupportedModel(
            f"the weights are {method} with a group_size of {quote_value(value)}; it must be from 1 to "
            f"{_MAX_GROUP}, or -1"
        )
    return value


def _block(value: object) -> tuple[int, int] | None:
    """Two numbers; none where scales are of whole rows or matrices."""
    if value is None:
        return None
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(size, int) and 1 <= size <= _MAX_GROUP for size in value)
    ):
        return value[0], value[1]
    raise UnsupportedModel(
        f"the weights are fp8 in blocks of {quote_value(value)}; it must be two whole numbers from 1 to {_MAX_GROUP}"
    )
