"""LoRA adapters on this machine: reading what PEFT wrote into their folders. No torch here.

A folder holds adapter_config.json and adapter_model.safetensors
(https://huggingface.co/docs/peft, "Checkpoint format").
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from engine.config import AdapterSpec, quote_value
from engine.errors import UnsafeWeights, UnsupportedModel
from engine.models.files import open_file, problem_with, read_json_object
from engine.models.headers import TensorHeader, read_header

# Which of an adapter's patterns a module's name matches: PEFT's `rank_pattern` and `alpha_pattern`, in linear time.
#
# PEFT takes each for a regular expression of Python, which can take time with the power of a name's length, and matches
# it against the end of a name from a dot on. Most patterns are names, or ends of names, and are looked up. Any other is
# matched by Rust's regex engine, which knows no expression that it would take long for.

MAX_EXPRESSIONS = 64
"""Patterns that are more than a name, in one adapter. Hand-written ones are a handful."""

MAX_CHARACTERS = 1024
"""Of these together: each may take a quarter of a millisecond to compile, and 30 KiB."""

_NAME = re.compile(r"(?P<start>\^?)(?P<name>(?:[\w-]|\\?\.)+)\$?")

PatternValue = TypeVar("PatternValue")


class ModulePatterns(Generic[PatternValue]):
    """Values by pattern; the first pattern that matches a module decides.

    A dot in a pattern that is a name is a dot. Raises UnsupportedModel for a pattern that is no regular expression, one
    with look-around, back references or counted repetitions, and too many of them.
    """

    def __init__(self, values: Mapping[str, PatternValue]) -> None:
        self._by_end: dict[str, tuple[int, PatternValue]] = {}
        self._by_name: dict[str, tuple[int, PatternValue]] = {}
        expressions: list[tuple[int, str, PatternValue]] = []
        for position, (pattern, value) in enumerate(values.items()):
            found = _NAME.fullmatch(pattern)
            if found is None:
                expressions.append((position, pattern, value))
            else:
                names = self._by_name if found["start"] else self._by_end
                names.setdefault(found["name"].replace("\\", ""), (position, value))
        characters = sum(len(pattern) for _, pattern, _ in expressions)
        if len(expressions) > MAX_EXPRESSIONS or characters > MAX_CHARACTERS:
            raise UnsupportedModel(
                f"the adapter has {len(expressions)} patterns of {characters} characters for module names; the "
                f"limit is {MAX_EXPRESSIONS} of {MAX_CHARACTERS} together"
            )
        self._expressions = [(position, _Expression(pattern), value) for position, pattern, value in expressions]

    def value_of(self, module: str, otherwise: PatternValue) -> PatternValue:
        """The value of the first pattern that matches a module's name, `otherwise` where none does."""
        named = [self._by_name[module]] if module in self._by_name else []
        named += [self._by_end[end] for end in _ends(module) if end in self._by_end]
        before, value = min(named, key=lambda found: found[0], default=(None, otherwise))
        for position, expression, its_value in self._expressions:
            if before is not None and position > before:
                break
            if expression.matches(module):
                return its_value
        return value


class _Expression:
    """A regular expression over the end of a name from a dot on."""

    def __init__(self, pattern: str) -> None:
        from pydantic_core import SchemaError, SchemaValidator, core_schema

        if "{" in pattern:
            raise UnsupportedModel(
                f"the adapter has a pattern with a counted repetition or class: {quote_value(pattern)}"
            )
        try:
            re.compile(pattern)  # Rust takes some that Python does not, and PEFT does not either then
            for whole in (pattern, rf"^(?:.*\.)?(?:{pattern})$"):
                schema = core_schema.str_schema(pattern=whole, regex_engine="rust-regex")
                self._validator = SchemaValidator(schema)
        except (SchemaError, re.error, RecursionError, OverflowError):
            raise UnsupportedModel(
                f"the adapter has an invalid pattern, or one with lookaround or backreferences: {quote_value(pattern)}"
            ) from None

    def matches(self, name: str) -> bool:
        return self._validator.isinstance_python(name)


def _ends(module: str) -> Iterator[str]:
    """The name, and what is behind each of its dots."""
    yield module
    at = module.find(".")
    while at >= 0:
        yield module[at + 1 :]
        at = module.find(".", at + 1)


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_FLOATS = ("F32", "F16", "BF16")
_REFUSED: Mapping[str, str] = {
    "use_dora": "is a DoRA adapter",
    "use_qalora": "is a QA-LoRA adapter",
    "modules_to_save": "has modules of its own",
    "layer_replication": "repeats layers of the model",
    "lora_bias": "has biases of its own",
    "fan_in_fan_out": "is for transposed weights",
    "trainable_token_indices": "has embeddings of its own",
    "target_parameters": "adapts bare parameters",
    "alora_invocation_tokens": "starts at an invocation (aLoRA)",
    "megatron_config": "is for Megatron's layers",
}
"""Keys of PEFT's config that change what is computed, and what each says of the adapter."""

_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the model's own weights: unless it was converted, the adapter fits those alone."""

MAX_RANK = 2**16
"""Of factors: more than the width of any published model."""

MAX_ALPHA = 1e9

MAX_TARGETS = 32
"""Names of modules in an entry. A block has seven that are adapted."""

_Rank = Annotated[int, msgspec.Meta(gt=0, le=MAX_RANK)]
_Alpha = Annotated[float, msgspec.Meta(gt=0, le=MAX_ALPHA)]
_VERSION_BYTES = 8


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The factors as adapter_config.json describes them, with PEFT's defaults.

    rank_pattern, alpha_pattern: patterns over module names, and what holds for those instead; see ModulePatterns.
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
        return self.ranks.value_of(module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of a module's factors: alpha / rank, or alpha / sqrt(rank) for
        rank-stabilised ones (Kalajdzievski 2023)."""
        rank = self.rank_of(module)
        alpha = self.alphas.value_of(module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    @cached_property
    def ranks(self) -> ModulePatterns[int]:
        """Ranks other than `rank`. Raises UnsupportedModel for a pattern that is not supported."""
        return ModulePatterns(self.rank_pattern or {})

    @cached_property
    def alphas(self) -> ModulePatterns[float]:
        """Likewise, of `alpha`."""
        return ModulePatterns(self.alpha_pattern or {})

    def adapts_layer(self, layer: int) -> bool:
        """Return whether a layer may be adapted."""
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
    """Description of an adapter folder. rank: the largest.  problem: why no model can use it, "" when one can.

    base_model: what it was trained on, as its author called it.  targets: last names of the modules that it adapts.
    """

    rank: int = 0
    base_model: str = ""
    targets: tuple[str, ...] = ()
    weights_bytes: int = 0
    problem: str = ""


def describe_adapter(folder: Path) -> AdapterEntry:
    """Return the adapter in a folder; judged by headers alone, and never raises."""
    entry = AdapterEntry()
    try:
        config = read_adapter_config(folder)
        entry = msgspec.structs.replace(entry, rank=config.rank, base_model=quote_value(config.base_model or ""))
        file = adapter_file(folder)
        entry = msgspec.structs.replace(entry, weights_bytes=file.stat().st_size)
        factors = read_factor_headers(file)
    except Exception as error:
        return msgspec.structs.replace(entry, problem=problem_with(folder, error))
    targets = sorted({module.rpartition(".")[2] for module in factors})
    return msgspec.structs.replace(
        entry,
        rank=max(factor.rank for factor in factors.values()),
        targets=tuple(map(quote_value, targets[:MAX_TARGETS])),
    )


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The adapter's config. Raises UnsupportedModel naming the first setting that would change what is computed in a
    way that is not known here, or that makes no sense."""
    raw = read_json_object(folder / CONFIG)
    if not raw:
        raise UnsupportedModel(f"{folder} is not a LoRA adapter: it has no {CONFIG}")
    _refuse_other_kinds(raw)
    try:
        config = msgspec.convert(raw, AdapterConfig)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"{CONFIG} in {folder} has an invalid setting: {quote_value(str(error))}") from None
    _ = config.ranks, config.alphas  # raises for a pattern that is not supported
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
    raise UnsupportedModel(f"{folder} is not a LoRA adapter: it has no {WEIGHTS}")


def read_factor_headers(file: Path) -> dict[str, FactorHeaders]:
    """The factors in an adapter's file by the name of the module that they adapt, such as model.layers.0.mlp.up_proj.

    Raises UnsupportedModel for tensors that are no factors, of a dtype that is not read, without their other half or of
    shapes that do not belong together; ModelLoadFailed for a damaged file.
    """
    halves: dict[str, dict[str, tuple[str, TensorHeader]]] = {}
    for name, header in read_header(file).items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise UnsupportedModel(
                f"the tensor {quote_value(name)} in {file.name} is not a plain LoRA factor", tensor=quote_value(name)
            )
        if header.dtype not in _FLOATS:
            raise UnsupportedModel(
                f"the tensor {quote_value(name)} in {file.name} is stored as {header.dtype}; {', '.join(_FLOATS)} "
                "are read",
                tensor=quote_value(name),
            )
        halves.setdefault(match["module"], {})[match["half"]] = name, header
    if not halves:
        raise UnsupportedModel(f"{file.name} in {file.parent} holds no LoRA factors")
    return {module: _pair_factors(module, found) for module, found in sorted(halves.items())}


def version_of(spec: AdapterSpec) -> str:
    """Return a digest of an adapter's scale and files, all of which are read: another adapter that takes its place in
    the folder, or its name, has another. It is the same wherever they lie; where one cannot be read, it is the path's.
    """
    digest = hashlib.blake2b(repr(float(spec.scale)).encode(), digest_size=_VERSION_BYTES)
    try:
        for name in (CONFIG, WEIGHTS):
            with open_file(spec.path / name) as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    except (OSError, UnsupportedModel):
        digest.update(str(spec.path).encode())
    return digest.hexdigest()


def _pair_factors(module: str, found: Mapping[str, tuple[str, TensorHeader]]) -> FactorHeaders:
    if found.keys() != {"A", "B"}:
        lacking: Literal["A", "B"] = "A" if "B" in found else "B"
        raise UnsupportedModel(f"the adapter of {quote_value(module)} lacks its lora_{lacking}")
    (a_name, a), (b_name, b) = found["A"], found["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise UnsupportedModel(
            f"the adapter of {quote_value(module)} has factors of shapes {list(a.shape)} and {list(b.shape)}, which "
            "share no rank"
        )
    return FactorHeaders(a_name=a_name, a=a, b_name=b_name, b=b)


def _refuse_other_kinds(raw: Mapping[str, object]) -> None:
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModel(f"the adapter is of the kind {quote_value(kind)}; only LORA is supported")
    for key, feature in _REFUSED.items():
        if raw.get(key):
            raise UnsupportedModel(f"the adapter {feature} ({key}), which is not supported")
    bias = raw.get("bias", "none")
    if bias != "none":
        raise UnsupportedModel(
            f"the adapter was trained together with biases (bias is {quote_value(bias)}), which is not supported"
        )
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise UnsupportedModel(
            f"the adapter belongs to changed base weights (init_lora_weights is {quote_value(start)}); convert it to a "
            "plain LoRA"
        )
