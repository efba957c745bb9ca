"""A plain model folder as the quantiser sees it: which tensors are linear layers, which stay as they are. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.backends.torch.archs import ARCHITECTURES
from engine.backends.torch.archs.base import Architecture, TensorNames
from engine.backends.torch.archs.reading import positive
from engine.backends.torch.quant.widths import ROW_STEP
from engine.config import quoted
from engine.errors import UnsupportedModel
from engine.models.files import read_json_object, refuse_links
from engine.models.headers import TensorHeader, read_header, weight_files

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
        """Whether the head is the embedding."""
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
    architecture = ARCHITECTURES.get(_architecture(config))
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
    """Whether its norms scale by one more than is stored."""
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
            f"config.json has num_hidden_layers = {quoted(layers)}; it must be a whole number of at least 1"
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
            f"{weight} is {' x '.join(map(str, shape))}; EXL2 needs input features in a multiple of {ROW_STEP} "
            f"and at most {MAX_ROWS}",
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
        f"the weights are quantised already ({quoted(method or packed)}); give the unquantised model"
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
