"""A GGUF model: its files, and what a model folder would hold in their place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import TypeVar

from engine.backends.common.families import architectures
from engine.backends.common.families.base import TensorNames
from engine.config import quote_value
from engine.errors import ModelLoadFailed, UnsupportedModel
from engine.models.files import is_file
from engine.models.gguf.config import Config, config_of, family_of
from engine.models.gguf.header import FORMATS, SPLIT_FIELDS, SUFFIX, GgufHeader, GgufTensor, read_parts
from engine.models.gguf.vocabulary import Json, end_tokens_of, tokenizer_config_of, tokenizer_of

_MAX_LISTED = 3
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
MAX_SPLITS = 1000
"""Parts of a file."""

_OTHER_FILES = ("mmproj", "imatrix")
"""In the names of GGUF files that are no language models."""

SomePath = TypeVar("SomePath", bound=PurePath)
_MAX_PIECES = 100_000
"""Tensors of a model folder. A model of 61 layers with 384 experts each has 70,000."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_NAMES = {
    "attn_norm": "input_norm",
    "attn_q": "q",
    "attn_qkv": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "post_attention_norm": "attention_out_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "post_ffw_norm": "mlp_out_norm",
}
"""Parts of a layer, by the field of `TensorNames` that names them in a model folder."""

_EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d{1,5})")
"""One of the experts of older files, which have a tensor for each."""

_NUMBERED = re.compile(r"(\.(?:norms|experts)\.)\d+")
"""Parts of one tensor, in a model folder's names."""

_SHARED = {"ffn_gate_shexp": "gate", "ffn_up_shexp": "up", "ffn_down_shexp": "down"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the model, made of one in the files. index: of several in one tensor, the number.
    heads: number of heads whose rows it has in the order of ggml's RoPE; 0 for rows as they are.
    less_one: whether the file has one more than a model folder.  is_row: whether its one row is a matrix's."""

    tensor: GgufTensor
    index: int | None = None
    heads: int = 0
    less_one: bool = False
    is_row: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that it makes."""
        shape = self.tensor.shape if self.index is None else self.tensor.shape[1:]
        return (1, *shape) if self.is_row and len(shape) == 1 else shape

    def shape_in_file(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor in the file that would make one of `shape`."""
        if self.index is not None:
            return (self.tensor.shape[0], *shape)
        return shape[1:] if self.is_row and len(self.tensor.shape) == 1 else shape

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self.tensor.num_bytes if self.index is None else self.tensor.num_bytes // self.tensor.shape[0]


class GgufModel:
    """The model in a GGUF file, or in all parts of one that is split. Raises what `read_gguf` does, and ModelLoadFailed
    where parts are missing or are not of one split."""

    def __init__(self, path: Path) -> None:
        self.headers = read_parts(split_files(path))
        _refuse_mixed_parts(self.headers)

    @property
    def header(self) -> GgufHeader:
        """The first file's, which has all metadata."""
        return self.headers[0]

    @cached_property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """Those of all files, by GGUF's names. Raises ModelLoadFailed for one that is there twice."""
        found: dict[str, GgufTensor] = {}
        for header in self.headers:
            if twice := found.keys() & header.tensors.keys():
                raise ModelLoadFailed(f"{quote_value(min(twice))} is in two parts of {quote_value(header.file.name)}")
            found |= header.tensors
        return found

    @cached_property
    def config(self) -> Config:
        """As config.json has it."""
        return config_of(GgufHeader(self.header.file, self.header.fields, self.tensors))

    def generation_config(self) -> Json:
        """As generation_config.json has it."""
        return {"eos_token_id": end_tokens_of(self.header)}

    def tokenizer(self) -> Json:
        """As tokenizer.json has it."""
        return tokenizer_of(self.header)

    def tokenizer_config(self) -> Json:
        """As tokenizer_config.json has it."""
        return tokenizer_config_of(self.header)

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        """The model's tensors under the names of a model folder; what is not known is left out."""
        family = family_of(self.header)
        names = architectures()[family.architecture].names
        heads = int(self.config["num_attention_heads"])
        kv_heads = int(self.config.get("num_key_value_heads", heads))
        permuted = {names.q: heads, names.k: kv_heads} if family.permuted else {}
        less_one = family.architecture.startswith("Gemma")
        found: dict[str, Piece] = {}
        for name, tensor in self.tensors.items():
            for place, index in _places(name, tensor, names):
                if len(found) == _MAX_PIECES:
                    raise UnsupportedModel(
                        f"{quote_value(self.header.file.name)} holds more than {_MAX_PIECES:,} tensors, those of its "
                        "experts among them, which is not supported",
                        limit=_MAX_PIECES,
                    )
                part = place.rpartition(".")[0]
                count = next((heads for suffix, heads in permuted.items() if part.endswith(f".{suffix}")), 0)
                is_norm = less_one and len(tensor.shape) == 1 and "norm" in part
                is_row = part.endswith(f".{names.experts.shared_gate}")
                found[place] = Piece(tensor, index, heads=count, less_one=is_norm, is_row=is_row)
        return found

    def name_in_file(self, name: str) -> str:
        """Return what the file calls a tensor of a model folder, or would call it."""
        names, pieces = architectures()[family_of(self.header).architecture].names, self.pieces
        if name in pieces:
            tensor = pieces[name].tensor
            return next(own for own, each in self.tensors.items() if each is tensor)
        name = _NUMBERED.sub(r"\g<1>0", name)
        kind = name.rpartition(".")[2]
        found = re.match(re.escape(names.layer).replace(r"\{\}", r"(\d+)") + r"\.", name)
        parts = ["token_embd", "output", "output_norm"]
        if found is not None:
            parts = [f"blk.{found[1]}.{part}" for part in _parts_of(names)]
        return next((f"{part}.{kind}" for part in parts if _makes(f"{part}.{kind}", name, names)), name)


def is_gguf(path: PurePath) -> bool:
    """Return whether a path names such a file."""
    return path.suffix.lower() == SUFFIX


def _split_of(path: PurePath) -> re.Match[str] | None:
    """The part of a split file that a name stands for: stem, number and count; None for a whole file, and where there
    can be no part of that number."""
    found = _SPLIT.fullmatch(path.name)
    return found if found is not None and 1 <= int(found["number"]) <= int(found["count"]) else None


def model_name(path: PurePath) -> str:
    """The name of a file's model: the file's own without its endings."""
    found = _split_of(path)
    return found["stem"] if found is not None else path.stem


def first_part(path: SomePath) -> SomePath:
    """The first part of a split file, for any other the file itself."""
    found = _split_of(path)
    return path if found is None else path.with_name(f"{found['stem']}-00001-of-{found['count']}{path.suffix}")


def count_parts(path: PurePath) -> int:
    """How many parts the file has, as its name says."""
    found = _split_of(path)
    return 1 if found is None else int(found["count"])


def is_text_model(path: PurePath) -> bool:
    """Return whether a path names a model, or a part of one: no hidden file, nothing that sees images or hears sound
    for another model, no importance matrix."""
    if not is_gguf(path) or path.name.startswith("."):
        return False
    return not any(other in path.name.lower() for other in _OTHER_FILES)


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF models in a folder by name, of a split one the first part, which may be missing; [] where the folder
    cannot be read."""
    try:
        with os.scandir(folder) as entries:
            files = {
                first_part(folder / entry.name)
                for entry in entries
                if is_text_model(PurePath(entry.name)) and is_file(Path(entry.path))
            }
    except OSError:
        return []
    return sorted(files)


def split_names(path: SomePath) -> list[SomePath]:
    """All parts of the file, in order, whether they are there or not. Raises UnsupportedModel for too many."""
    found = _split_of(path)
    if found is None:
        return [path]
    count = int(found["count"])
    if count > MAX_SPLITS:
        raise UnsupportedModel(f"{quote_value(path.name)} is one of {count} parts; up to {MAX_SPLITS} are supported")
    return [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}{path.suffix}") for number in range(1, count + 1)]


def split_files(path: Path) -> list[Path]:
    """All parts of the file, in order. Raises ModelLoadFailed where some are missing, UnsupportedModel."""
    files = split_names(path)
    missing = [quote_value(file.name) for file in files if not is_file(file)]
    if missing and len(files) > 1:
        listed = ", ".join(missing[:_MAX_LISTED]) + (" ..." if len(missing) > _MAX_LISTED else "")
        are = "is" if len(missing) == 1 else "are"
        raise ModelLoadFailed(f"{len(missing)} of {len(files)} parts {are} missing: {listed}", file=missing[0])
    return files


def present_files(path: Path) -> list[Path]:
    """Those parts of the file that are there; of a file of too many, its own alone."""
    try:
        names = split_names(path)
    except UnsupportedModel:
        names = [path]
    return list(filter(is_file, names))


def _refuse_mixed_parts(headers: Sequence[GgufHeader]) -> None:
    """Raise ModelLoadFailed for a file that is another part than its name says, or of a model with other tensors than
    the parts have. A whole file may call itself one of 0 parts, or of 1: once merged, it does."""
    count, num_tensors = len(headers), sum(len(header.tensors) for header in headers)
    claims = [tuple(map(header.whole, SPLIT_FIELDS)) for header in headers]
    for number, (header, (own_number, own_count, _)) in enumerate(zip(headers, claims, strict=True)):
        is_other = own_count not in (None, count) or own_number not in (None, number)
        if is_other and max(count, own_count or 0) > 1:
            own_number = number if own_number is None else own_number
            claim = f"part {own_number + 1} of {count if own_count is None else own_count}"
            named = f"part {number + 1} of {count}" if count > 1 else "a whole file"
            raise ModelLoadFailed(f"{quote_value(header.file.name)} says that it is {claim}; its name makes it {named}")
    for header, (*_, own_tensors) in zip(headers, claims, strict=True):
        if count > 1 and own_tensors not in (None, num_tensors):
            raise ModelLoadFailed(
                f"{quote_value(header.file.name)} is of a model of {own_tensors} tensors, and the {count} parts have "
                f"{num_tensors}: they are not of the same split"
            )


def _parts_of(names: TensorNames) -> list[str]:
    """The parts that a layer may have. Fused ones have names of their own."""
    other = {"attn_qkv"} if names.k else {"attn_q"}
    other |= set() if names.up else {"ffn_gate"}
    routers = ("ffn_gate_inp", "ffn_gate_inp_shexp")
    return [part for part in (*_NAMES, *routers, *_EXPERTS, *_SHARED) if part not in other]


def _makes(own: str, name: str, names: TensorNames) -> bool:
    """Return whether the file's tensor `own` makes the model folder's `name`, the first of several where it does."""
    shapes = [(1,) * number for number in (1, 2, 3)]
    return any(name == place for shape in shapes for place, _ in _places(own, _tensor_of(shape), names))


def _tensor_of(shape: tuple[int, ...]) -> GgufTensor:
    return GgufTensor(Path(), shape, FORMATS[0], 0)


def _places(name: str, tensor: GgufTensor, names: TensorNames) -> Iterator[tuple[str, int | None]]:
    """The names that a tensor, or each expert's part of it, has in a model folder."""
    whole = {"token_embd.weight": names.embedding, "output.weight": names.head}
    if name in whole:
        yield f"{whole[name]}.weight", None
    elif name in ("output_norm.weight", "output_norm.bias"):
        yield f"{names.final_norm}.{name.rpartition('.')[2]}", None
    elif found := _LAYER.fullmatch(name):
        number, part, kind = found.groups()
        layer = names.layer.format(int(number))
        experts = names.experts
        if part in ("attn_q_norm", "attn_k_norm") and len(tensor.shape) == 2:
            for head in range(tensor.shape[0]):
                yield f"{layer}.{getattr(names, _NAMES[part])}.norms.{head}.{kind}", head
        elif part in _NAMES:
            field = _NAMES[part]
            own = getattr(names, field) or (names.gate if field == "up" else "")
            if own:
                yield f"{layer}.{own}.{kind}", None
        elif part == "ffn_gate_inp":
            yield f"{layer}.{experts.router}.{kind}", None
        elif part == "ffn_gate_inp_shexp":
            yield f"{layer}.{experts.shared_gate}.{kind}", None
        elif part in _SHARED:
            yield f"{layer}.{experts.shared}.{getattr(experts, _SHARED[part])}.{kind}", None
        elif expert := _EXPERT.fullmatch(part):
            own, number = expert.groups()
            yield f"{layer}.{experts.expert.format(int(number))}.{getattr(experts, own)}.{kind}", None
        elif part in _EXPERTS and len(tensor.shape) == 3:
            for index in range(tensor.shape[0]):
                yield f"{layer}.{experts.expert.format(index)}.{getattr(experts, _EXPERTS[part])}.{kind}", index
