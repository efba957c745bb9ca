"""From a plain model folder to an EXL2 one that ExLlamaV2 and the torch backend load: measure, plan, write.

Memory stays at about one matrix. Widths are chosen by what rounding does to the weights, weighed by the norm that a
layer reads through; no text is run through the model: this rounds to nearest and does not calibrate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.backends.torch.quant.exl2_writer import RoundingError, measure_linear, pack_linear, stored_shapes
from engine.backends.torch.quant.shards import SHARD_BYTES, ShardedWriter, TensorSpec
from engine.backends.torch.quant.source import LinearSource, SourceModel, open_source
from engine.backends.torch.quant.target import (
    QuantizeFailed,
    appearing,
    check_target,
    companions,
    copy_companions,
    write_config,
)
from engine.backends.torch.quant.widths import GROUP_SIZES, WIDTHS, MatrixShape, average_bits, least_bits, plan_widths
from engine.errors import InvalidRequest, LoadCancelled
from engine.models.files import open_file

HALF_BITS = 16
HEAD_BITS = (*WIDTHS, HALF_BITS)
"""Widths that the head may have; 16 keeps it as it is."""

DEFAULT_HEAD_BITS = 6
DEFAULT_GROUP_SIZE = 32

_MIN_BITS, _MAX_BITS = 2.0, 8.0
_LARGEST_HALF = 65504.0
_HEADER_BYTES = 1 << 20
_FORMAT_VERSION = "0.3.2"

Widths = Mapping[str, tuple[int, ...]]
"""Width of each group of rows, by the key of the layer."""


@dataclass(frozen=True, slots=True)
class QuantizeProgress:
    """done of total weights measured or written."""

    phase: Literal["measure", "write"]
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class QuantizeSummary:
    """What was made. bits_per_weight: over all linear layers but the head, overhead included.

    width_weights, width_errors: per width, how many weights have it and their relative error (root mean square of
    the error over that of the weights), the head's among them.  worst_layer: the matrix with the largest.
    """

    bits_per_weight: float
    file_bytes: int
    width_weights: Mapping[int, int]
    width_errors: Mapping[int, float]
    worst_layer: str
    worst_error: float


def quantize_folder(
    source: Path,
    target: Path,
    *,
    bits: float,
    head_bits: int = DEFAULT_HEAD_BITS,
    group_size: int = DEFAULT_GROUP_SIZE,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[QuantizeProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> QuantizeSummary:
    """Quantise the model in `source` to `bits` per weight into the new folder `target`, which appears when it is whole.

    Raises InvalidRequest for a bad number or target, UnsupportedModel for a source that cannot be quantised,
    QuantizeFailed where it cannot be written, LoadCancelled. Nothing is left behind then.
    """
    _check_numbers(bits, head_bits, group_size)
    target = target.resolve()
    quantiser = _Quantiser(open_source(source), head_bits, group_size, report, cancelled)
    quantiser.check(bits)
    check_target(target, quantiser.most_bytes(bits))
    widths = quantiser.plan(bits)
    try:
        with appearing(target) as folder:
            errors = quantiser.write(folder, widths, shard_bytes)
            copy_companions(source, folder)
            write_config(quantiser.model.config, _declaration(bits, head_bits), folder)
            file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except OSError as error:
        raise QuantizeFailed(f"{target} cannot be written: {error.strerror}") from error
    return _summary(quantiser, widths, errors, file_bytes)


class _Quantiser:
    """One model and how it is quantised."""

    def __init__(
        self,
        model: SourceModel,
        head_bits: int,
        group_size: int,
        report: Callable[[QuantizeProgress], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self.model, self._head_bits = model, head_bits
        self._report, self._cancelled = report, cancelled
        self._packs_head = head_bits != HALF_BITS
        self.packed = (*model.linears, model.head) if self._packs_head else model.linears
        self._plain = model.plain if self._packs_head or model.is_tied else (*model.plain, model.head.weight)
        self.shapes = {linear.key: MatrixShape(linear.rows, linear.columns, group_size) for linear in self.packed}
        self.body = {linear.key: self.shapes[linear.key] for linear in model.linears}
        self._done = 0

    def check(self, bits: float) -> None:
        """Raise InvalidRequest where `bits` cannot hold the narrowest width and its overhead."""
        least = least_bits(self.body.values())
        if bits < least:
            raise InvalidRequest(
                f"{bits:g} bits per weight are too few: with {WIDTHS[0]}-bit weights throughout, this model's scales "
                f"and row orders make it {least:.2f}",
                param="bits",
                least_bits=least,
            )

    def most_bytes(self, bits: float) -> int:
        """Disk space that the result takes at most."""
        body_bytes = bits / 8 * sum(shape.elements for shape in self.body.values())
        rest = [
            spec.stored_bytes for spec in self._specs(self._uniform(self._head_bits)) if not self._is_body(spec.name)
        ]
        copied = [file.stat().st_size for file in companions(self.model.folder)]
        return int(body_bytes) + sum(rest) + sum(copied) + _HEADER_BYTES

    def plan(self, bits: float) -> Widths:
        """Measure every layer and choose the width of each group; the head has its own."""
        self._done, errors = 0, {}
        for linear in self.model.linears:
            weight, importance = self._weight(linear), self._importance(linear)
            errors[linear.key] = measure_linear(weight, self.shapes[linear.key].group_size, importance)
            self._advance("measure", linear, self.model.linears)
        widths = plan_widths(errors, bits)
        return {**self._uniform(self._head_bits), **widths}

    def write(self, folder: Path, widths: Widths, shard_bytes: int) -> dict[str, Mapping[int, RoundingError]]:
        """Write the weights; returns per layer and width what rounding cost."""
        self._done, errors = 0, {}
        with ShardedWriter(folder, self._specs(widths), shard_bytes=shard_bytes) as writer:
            for name in self._plain:
                writer.write(name, self._read(name).half())
            for linear in self.packed:
                packed = pack_linear(
                    self._weight(linear),
                    widths[linear.key],
                    group_size=self.shapes[linear.key].group_size,
                    importance=self._importance(linear),
                    bias=self._read(linear.bias) if linear.bias else None,
                )
                for part, tensor in packed.tensors.items():
                    writer.write(f"{linear.key}.{part}", tensor)
                errors[linear.key] = packed.errors
                self._advance("write", linear, self.packed)
        return errors

    def _uniform(self, width: int) -> dict[str, tuple[int, ...]]:
        return {key: (width,) * len(shape.group_rows()) for key, shape in self.shapes.items()}

    def _is_body(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.body

    def _specs(self, widths: Widths) -> list[TensorSpec]:
        tensors = self.model.tensors
        plain = [TensorSpec(name, torch.float16, tensors[name].header.shape) for name in self._plain]
        return plain + [
            TensorSpec(f"{linear.key}.{part}", dtype, shape)
            for linear in self.packed
            for part, (dtype, shape) in stored_shapes(
                self.shapes[linear.key], widths[linear.key], bias=linear.bias is not None
            ).items()
        ]

    def _weight(self, linear: LinearSource) -> Tensor:
        return self._read(linear.weight)

    def _importance(self, linear: LinearSource) -> Tensor | None:
        """How much each input counts: the square of what its norm scales it by. Behind no norm all count the same."""
        return (self._read(linear.norm).float() + linear.norm_offset).square() if linear.norm else None

    def _read(self, name: str) -> Tensor:
        file = self.model.tensors[name].file
        try:
            with open_file(file) as stream, safe_open(f"/dev/fd/{stream.fileno()}", framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise QuantizeFailed(f"{file.name} in {file.parent} is damaged or cut short: {error}") from None
        largest = max(-float(tensor.min()), float(tensor.max()))
        if not largest <= _LARGEST_HALF:  # also where it is no number
            raise QuantizeFailed(f"{name} in {file.name} holds numbers that half precision cannot", tensor=name)
        return tensor

    def _advance(self, phase: Literal["measure", "write"], linear: LinearSource, of: tuple[LinearSource, ...]) -> None:
        self._done += linear.elements
        self._report(QuantizeProgress(phase, self._done, sum(each.elements for each in of)))
        if self._cancelled():
            raise LoadCancelled("quantising was cancelled")


def _check_numbers(bits: float, head_bits: int, group_size: int) -> None:
    if not _MIN_BITS <= bits <= _MAX_BITS:
        raise InvalidRequest(f"bits must be between {_MIN_BITS:g} and {_MAX_BITS:g}, not {bits:g}", param="bits")
    for param, value, known in (("head_bits", head_bits, HEAD_BITS), ("group_size", group_size, GROUP_SIZES)):
        if value not in known:
            raise InvalidRequest(f"{param} must be one of {', '.join(map(str, known))}, not {value}", param=param)


def _declaration(bits: float, head_bits: int) -> dict[str, object]:
    """quantization_config in ExLlamaV2's words; the calibration says that there was none."""
    return {
        "quant_method": "exl2",
        "version": _FORMAT_VERSION,
        "bits": bits,
        "head_bits": head_bits,
        "calibration": {"rows": 0, "length": 0, "dataset": "none, rounded to nearest"},
    }


def _summary(
    quantiser: _Quantiser, widths: Widths, errors: Mapping[str, Mapping[int, RoundingError]], file_bytes: int
) -> QuantizeSummary:
    counts: Counter[int] = Counter()
    by_width: defaultdict[int, RoundingError] = defaultdict(RoundingError)
    by_layer = {key: sum(parts.values(), RoundingError()) for key, parts in errors.items()}
    for key, shape in quantiser.shapes.items():
        for rows, width in zip(shape.group_rows(), widths[key], strict=True):
            counts[width] += rows * shape.columns
        for width, error in errors[key].items():
            by_width[width] += error
    worst = max(by_layer, key=lambda key: by_layer[key].relative)
    return QuantizeSummary(
        bits_per_weight=average_bits(quantiser.body, widths),
        file_bytes=file_bytes,
        width_weights=dict(sorted(counts.items())),
        width_errors={width: by_width[width].relative for width in sorted(by_width)},
        worst_layer=worst,
        worst_error=by_layer[worst].relative,
    )
