"""From a plain model folder to an EXL2 one that ExLlamaV2 and the torch backend load: measure, plan, write.

Memory stays at about one matrix. Widths are chosen by what rounding does to the weights, weighed by the norm that a
layer reads through; no text is run through the model: this rounds to nearest and does not calibrate.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.backends.common.config_values import positive
from engine.backends.common.families import architectures
from engine.backends.common.families.base import Architecture, TensorNames
from engine.config import quote_value
from engine.errors import EngineError, InvalidRequest, LoadCancelled, UnsupportedModel
from engine.models.files import is_folder, open_file, read_json_object, refuse_links
from engine.models.headers import TensorHeader, read_header, weight_files
from tools.exl2_writer.bit_allocation import (
    GROUP_SIZES,
    ROW_STEP,
    WIDTHS,
    MatrixShape,
    average_bits,
    least_bits,
    plan_widths,
)
from tools.exl2_writer.exl2_packing import RoundingError, measure_linear, pack_linear, stored_shapes
from tools.exl2_writer.safetensors_writer import SHARD_BYTES, ShardedWriter, TensorSpec

# A plain model folder as the quantiser sees it: which tensors are linear layers, which stay as they are. No torch.

MAX_ROWS = 1 << 16
"""ExLlamaV2 keeps the order of a matrix's rows in 16 bits."""

_KINDS = ("F32", "F16", "BF16")
_QUANTISED = (".q_weight", ".qweight", ".weight_scale", ".weight_scale_inv", ".absmax")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_RECOMPUTED = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    file: Path
    header: TensorHeader


@dataclass(frozen=True, slots=True)
class LinearSource:
    """A linear layer. key: its name once packed.  weight, bias: tensors of the source, [columns, rows] and [columns].

    norm: the tensor that scales its input just before it, by itself plus norm_offset; None where nothing does.
    """

    key: str
    weight: str
    bias: str | None
    norm: str | None
    rows: int
    columns: int
    norm_offset: float = 0.0

    @property
    def elements(self) -> int:
        """Weights in its matrix."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class SourceModel:
    """An unquantised model. plain: tensors that are stored as they are, the head not among them."""

    folder: Path
    config: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]
    linears: tuple[LinearSource, ...]
    head: LinearSource
    plain: tuple[str, ...]

    @property
    def is_tied(self) -> bool:
        """True if the head is the embedding."""
        return self.head.weight in self.plain


def open_source(folder: Path) -> SourceModel:
    """Read config.json and the headers. Raises UnsupportedModel, naming what cannot be quantised and why."""
    config = read_json_object(folder / "config.json")
    if not config:
        raise UnsupportedModel(f"{folder} is no model folder: it has no config.json")
    refuse_links(folder)
    tensors = {
        name: StoredTensor(file, header) for file in weight_files(folder) for name, header in read_header(file).items()
    }
    _refuse_quantised(config, tensors)
    _refuse_experts(config, tensors)
    architecture = architectures().get(_architecture(config))
    names = architecture.names if architecture else TensorNames()
    linears = tuple(_linears(config, names, tensors, norms=architecture is not None))
    head = _head(config, names, tensors, norm=architecture is not None)
    if architecture is not None and _adds_one(architecture, config):
        linears = tuple(replace(linear, norm_offset=1.0) for linear in linears)
        head = replace(head, norm_offset=1.0)
    packed = {tensor for linear in linears for tensor in (linear.weight, linear.bias)} | {f"{names.head}.weight"}
    plain = tuple(name for name in tensors if name not in packed and not name.endswith(_RECOMPUTED))
    _refuse_unnamed(names, tensors, plain)
    return SourceModel(folder, config, tensors, linears, head, plain)


def _adds_one(architecture: Architecture, config: Mapping[str, object]) -> bool:
    """Return whether its norms scale by one more than is stored."""
    return (
        architecture.traits({**architecture.defaults, **config}, positive(config, "num_hidden_layers")).norm
        == "rms_plus_one"
    )


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise UnsupportedModel("config.json must name one architecture in `architectures`, and it does not")
    return str(names[0])


def _linears(
    config: Mapping[str, object], names: TensorNames, tensors: Mapping[str, StoredTensor], *, norms: bool
) -> Iterator[LinearSource]:
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise UnsupportedModel(
            f"config.json has num_hidden_layers = {quote_value(layers)}; it must be a whole number of at least 1"
        )
    for number in range(layers):
        layer = names.layer.format(number)
        for linear, norm in _linear_names(names):
            key = f"{layer}.{linear}"
            yield _linear(key, f"{key}.weight", f"{layer}.{norm}.weight" if norm and norms else None, tensors)


def _linear_names(names: TensorNames) -> Iterator[tuple[str, str]]:
    """The linear layers of a block, each with the norm that it reads through ("" for none)."""
    yield from ((linear, names.input_norm) for linear in names.qkv)
    yield names.o, ""
    yield from ((linear, names.mlp_norm) for linear in names.gate_up)
    yield names.down, ""


def _head(
    config: Mapping[str, object], names: TensorNames, tensors: Mapping[str, StoredTensor], *, norm: bool
) -> LinearSource:
    """The head; the embedding where the source has none of its own. ExLlamaV2 stores one for tied models too."""
    weight = f"{names.head}.weight"
    if weight not in tensors and config.get("tie_word_embeddings") is not False:
        weight = f"{names.embedding}.weight"
    return _linear(names.head, weight, f"{names.final_norm}.weight" if norm else None, tensors)


def _linear(key: str, weight: str, norm: str | None, tensors: Mapping[str, StoredTensor]) -> LinearSource:
    found = tensors.get(weight)
    if found is None:
        raise UnsupportedModel(
            f"the weights lack {weight}; models whose layers are named otherwise cannot be quantised here",
            tensor=weight,
        )
    shape = found.header.shape
    if len(shape) != 2 or shape[1] % ROW_STEP or not 0 < shape[1] <= MAX_ROWS:
        raise UnsupportedModel(
            f"{weight} is {' x '.join(map(str, shape))}; EXL2 needs input features in a multiple of {ROW_STEP}, "
            f"max {MAX_ROWS}",
            tensor=weight,
        )
    bias = f"{key}.bias"
    return LinearSource(
        key, weight, bias if bias in tensors else None, norm if norm in tensors else None, shape[1], shape[0]
    )


def _refuse_quantised(config: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> None:
    declared = config.get("quantization_config")
    packed = next((name for name in tensors if name.endswith(_QUANTISED)), None)
    if declared is None and packed is None:
        return
    method = declared.get("quant_method") if isinstance(declared, dict) else None
    raise UnsupportedModel(
        f"the weights are quantised already ({quote_value(method or packed)}); give the unquantised model"
    )


def _refuse_experts(config: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> None:
    experts = next((config[key] for key in _EXPERTS if isinstance(config.get(key), int)), 1)
    if experts != 1 or any(".experts." in name for name in tensors):
        raise UnsupportedModel("the model is a mixture of experts, which cannot be quantised here")


def _refuse_unnamed(names: TensorNames, tensors: Mapping[str, StoredTensor], plain: tuple[str, ...]) -> None:
    """Raise for a matrix that is no linear layer we know of, and for numbers that are not plain floats."""
    for name in plain:
        if len(tensors[name].header.shape) > 1 and name != f"{names.embedding}.weight":
            raise UnsupportedModel(
                f"{name} is no tensor that can be quantised here: its layer is not known", tensor=name
            )
    for required in (names.embedding, names.final_norm):
        if f"{required}.weight" not in plain:
            raise UnsupportedModel(f"the weights lack {required}.weight", tensor=f"{required}.weight")
    for name, tensor in tensors.items():
        if tensor.header.dtype not in _KINDS:
            raise UnsupportedModel(
                f"{name} is stored as {tensor.header.dtype}; {', '.join(_KINDS)} can be quantised", tensor=name
            )


# The folder that quantising makes: refused before the work begins, whole or not there afterwards.

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".onnx", ".index.json")
_CONFIG = "config.json"


class QuantizeFailed(EngineError):
    """The model could not be quantised, or not be written; the message says why."""

    code: ClassVar[str] = "quantize_failed"


def check_target(target: Path, needed_bytes: int) -> None:
    """Raise InvalidRequest where `target` is taken or has nowhere to lie, QuantizeFailed where the disk is short."""
    try:
        is_taken = any(target.iterdir()) if is_folder(target) else os.path.lexists(target)
    except OSError:
        is_taken = True
    if is_taken:
        raise InvalidRequest(f"{target} exists and is not an empty folder; name a new one", param="target")
    if not is_folder(target.parent):
        raise InvalidRequest(f"{target} cannot be made: there is no folder {target.parent}", param="target")
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < needed_bytes:
        raise QuantizeFailed(
            f"the disk is short: {target} needs up to {needed_bytes / 1e9:.2f} GB, "
            f"and {free_bytes / 1e9:.2f} GB are free",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A work folder next to `target`, renamed to it at the end; on any error nothing is left."""
    work = target.with_name(f".{target.name}.quantising.{os.getpid()}")
    work.mkdir()
    try:
        yield work
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def companions(source: Path) -> list[Path]:
    """Files of a model besides its weights and config.json: tokenizer, chat template, licence."""
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and not file.name.endswith(_WEIGHTS)
        and file.name != _CONFIG
    ]


def copy_companions(source: Path, folder: Path) -> None:
    """Copy them. Raises UnsupportedModel for a link that leads out of `source`."""
    for file in companions(source):
        with open_file(file) as stream, (folder / file.name).open("xb") as copy:
            shutil.copyfileobj(stream, copy)


def write_config(config: Mapping[str, object], quantisation: Mapping[str, object], folder: Path) -> None:
    """config.json of the quantised model."""
    document = msgspec.json.encode({**config, "quantization_config": quantisation})
    (folder / _CONFIG).write_bytes(msgspec.json.format(document, indent=2) + b"\n")


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
    """Numbers of the written model. bits_per_weight: over all linear layers but the head, overhead included.

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
    for param, value, choices in (("head_bits", head_bits, HEAD_BITS), ("group_size", group_size, GROUP_SIZES)):
        if value not in choices:
            raise InvalidRequest(f"{param} must be one of {', '.join(map(str, choices))}, not {value}", param=param)


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
