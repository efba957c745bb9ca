"""LoRA adapters on this machine: finding their folders, and reading what PEFT wrote into them. No torch here.

A folder holds adapter_config.json and adapter_model.safetensors
(https://huggingface.co/docs/peft, "Checkpoint format").
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from engine.config import AdapterSpec
from engine.errors import EngineError, UnsafeWeights, UnsupportedModel
from engine.models.discover import find_folders
from engine.models.files import read_json_object
from engine.models.headers import TensorHeader, read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_FLOATS = ("F32", "F16", "BF16")
_REFUSED: Mapping[str, str] = {
    "use_dora": "is a DoRA adapter",
    "use_qalora": "is a QA-LoRA adapter",
    "modules_to_save": "brings whole modules of its own",
    "layer_replication": "repeats layers of the model",
    "lora_bias": "has biases of its own",
    "fan_in_fan_out": "is for transposed weights",
    "trainable_token_indices": "brings embeddings of its own",
    "target_parameters": "adapts bare parameters",
    "alora_invocation_tokens": "works from an invocation on (aLoRA)",
    "megatron_config": "is for Megatron's layers",
}
"""Keys of PEFT's config that change what is computed, and what each says of the adapter."""

_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the model's own weights: unless it was converted, the adapter fits those alone."""

_Rank = Annotated[int, msgspec.Meta(gt=0)]
_Alpha = Annotated[float, msgspec.Meta(gt=0)]
_Value = TypeVar("_Value", int, float)
_VERSION_BYTES = 8


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What adapter_config.json says of the factors, with PEFT's defaults.

    rank_pattern, alpha_pattern: regular expressions over module names, and what holds for those instead.
    layers: the only layers that are adapted; None is all.  targets: names of the adapted modules, or one expression.
    """

    rank: _Rank = msgspec.field(default=8, name="r")
    alpha: _Alpha = msgspec.field(default=8.0, name="lora_alpha")
    rank_stabilised: bool = msgspec.field(default=False, name="use_rslora")
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    layers: list[int] | int | None = msgspec.field(default=None, name="layers_to_transform")
    base_model: str | None = msgspec.field(default=None, name="base_model_name_or_path")
    targets: list[str] | str | None = msgspec.field(default=None, name="target_modules")

    def rank_of(self, module: str) -> int:
        """The rank of a module's factors."""
        return _matching(self.rank_pattern or {}, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of a module's factors is multiplied by: alpha / rank, or alpha / sqrt(rank) for
        rank-stabilised ones (Kalajdzievski 2023)."""
        rank = self.rank_of(module)
        alpha = _matching(self.alpha_pattern or {}, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def adapts_layer(self, layer: int) -> bool:
        """Whether a layer may be adapted."""
        return self.layers is None or layer in (self.layers if isinstance(self.layers, list) else [self.layers])


class FactorHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """The two factors of one module, a [rank, in] and b [out, rank], and their names in the file."""

    a_name: str
    a: TensorHeader
    b_name: str
    b: TensorHeader

    @property
    def rank(self) -> int:
        """Rows of a, columns of b."""
        return self.a.shape[0]


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter folder. rank: the largest.  problem: why it cannot be used with any model, "" when it can.

    base_model: what it was trained on, as its author called it.  targets: last names of the modules that it adapts.
    """

    name: str
    path: Path
    origin: str
    rank: int = 0
    base_model: str = ""
    targets: tuple[str, ...] = ()
    weights_bytes: int = 0
    problem: str = ""


def find_adapters(folders: Sequence[Path], *, hub_cache: bool = True) -> list[AdapterEntry]:
    """Every adapter in `folders` (two levels deep: publisher/adapter too) and the hub cache, under unique names. Never
    raises: what cannot be used is an entry with a problem."""
    return [
        msgspec.structs.replace(describe_adapter(found.path), name=found.name, origin=found.origin)
        for found in find_folders(folders, CONFIG, hub_cache=hub_cache)
    ]


def describe_adapter(folder: Path) -> AdapterEntry:
    """What lies in an adapter's folder; judged by headers alone, and never raises."""
    entry = AdapterEntry(name=folder.name, path=folder, origin=str(folder.parent))
    try:
        config = read_adapter_config(folder)
        entry = msgspec.structs.replace(entry, rank=config.rank, base_model=config.base_model or "")
        file = adapter_file(folder)
        entry = msgspec.structs.replace(entry, weights_bytes=file.stat().st_size)
        factors = read_factor_headers(file)
    except EngineError as error:
        return msgspec.structs.replace(entry, problem=error.message)
    except OSError as error:
        return msgspec.structs.replace(entry, problem=f"{folder} cannot be read: {error.strerror}")
    return msgspec.structs.replace(
        entry,
        rank=max(factor.rank for factor in factors.values()),
        targets=tuple(sorted({module.rpartition(".")[2] for module in factors})),
    )


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The adapter's config. Raises UnsupportedModel naming the first setting that would change what is computed in a
    way that is not known here, or that makes no sense."""
    raw = read_json_object(folder / CONFIG)
    if not raw:
        raise UnsupportedModel(f"{folder} holds no LoRA adapter: it has no {CONFIG}")
    _refuse_other_kinds(raw)
    try:
        config = msgspec.convert(raw, AdapterConfig)
        for pattern in (*(config.rank_pattern or ()), *(config.alpha_pattern or ())):
            re.compile(pattern)
    except (msgspec.ValidationError, re.error) as error:
        raise UnsupportedModel(f"{CONFIG} in {folder} has a setting that makes no sense: {error}") from None
    return config


def adapter_file(folder: Path) -> Path:
    """The folder's safetensors file. Raises UnsafeWeights where a pickle lies in its place, UnsupportedModel where
    nothing does."""
    file = folder / WEIGHTS
    if file.is_file():
        return file
    if (folder / _PICKLE).is_file():
        raise UnsafeWeights(
            f"{_PICKLE} in {folder} is a pickle, which can run code when read; convert the adapter to safetensors",
            file=_PICKLE,
        )
    raise UnsupportedModel(f"{folder} holds no LoRA adapter: it has no {WEIGHTS}")


def read_factor_headers(file: Path) -> dict[str, FactorHeaders]:
    """The factors in an adapter's file by the name of the module that they adapt, such as model.layers.0.mlp.up_proj.

    Raises UnsupportedModel for tensors that are no factors, of a dtype that is not read, without their other half or of
    shapes that do not belong together; ModelLoadFailed for a damaged file.
    """
    halves: dict[str, dict[str, tuple[str, TensorHeader]]] = {}
    for name, header in read_header(file).items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise UnsupportedModel(f"the tensor {name} in {file.name} is no plain LoRA factor", tensor=name)
        if header.dtype not in _FLOATS:
            raise UnsupportedModel(
                f"the tensor {name} in {file.name} is stored as {header.dtype}; {', '.join(_FLOATS)} are read",
                tensor=name,
            )
        halves.setdefault(match["module"], {})[match["half"]] = name, header
    if not halves:
        raise UnsupportedModel(f"{file.name} in {file.parent} holds no LoRA factors")
    return {module: _paired(module, found) for module, found in sorted(halves.items())}


def version_of(spec: AdapterSpec) -> str:
    """Return a digest of an adapter's scale and files, all of which are read: another adapter that takes its place in
    the folder, or its name, has another. It is the same wherever they lie; where a file is missing, it is the path's.
    """
    digest = hashlib.blake2b(repr(float(spec.scale)).encode(), digest_size=_VERSION_BYTES)
    try:
        for name in (CONFIG, WEIGHTS):
            with (spec.path / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    except OSError:
        digest.update(str(spec.path).encode())
    return digest.hexdigest()


def _paired(module: str, found: Mapping[str, tuple[str, TensorHeader]]) -> FactorHeaders:
    if found.keys() != {"A", "B"}:
        lacking: Literal["A", "B"] = "A" if "B" in found else "B"
        raise UnsupportedModel(f"the adapter of {module} lacks its lora_{lacking}")
    (a_name, a), (b_name, b) = found["A"], found["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise UnsupportedModel(
            f"the adapter of {module} has factors of shapes {list(a.shape)} and {list(b.shape)}, which share no rank"
        )
    return FactorHeaders(a_name=a_name, a=a, b_name=b_name, b=b)


def _refuse_other_kinds(raw: Mapping[str, object]) -> None:
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModel(f"the adapter is of the kind {kind}; LORA is the one that can be used")
    for key, says in _REFUSED.items():
        if raw.get(key):
            raise UnsupportedModel(f"the adapter {says} ({key}), which is not supported")
    bias = raw.get("bias", "none")
    if bias != "none":
        raise UnsupportedModel(f"the adapter was trained together with biases (bias is {bias}), which is not supported")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise UnsupportedModel(
            f"the adapter belongs to changed base weights (init_lora_weights is {start}); convert it to a plain LoRA"
        )


def _matching(patterns: Mapping[str, _Value], module: str, otherwise: _Value) -> _Value:
    """The value of the first pattern that matches the end of a module's name from a dot on, as PEFT matches."""
    found = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
    return next(found, otherwise)
