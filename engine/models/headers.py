"""The headers of a folder's safetensors files: every tensor's name, dtype and shape, without reading a tensor.

A file is an 8-byte little-endian length, a JSON object of that length and the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from engine.errors import ModelLoadFailed, UnsafeWeights, UnsupportedModel
from engine.models.files import read_json_object

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


class TensorHeader(msgspec.Struct, frozen=True):
    """One tensor: dtype in safetensors' words ("BF16"), its shape, and where it lies after the header."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """What it takes in the file."""
        return self.data_offsets[1] - self.data_offsets[0]


_HEADER = msgspec.json.Decoder(dict[str, TensorHeader])


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files: those its index names, or all. Raises UnsafeWeights where there are only
    pickles, UnsupportedModel where there are no weights, ModelLoadFailed where files of the index are missing."""
    names = sorted(entry.name for entry in folder.iterdir())
    document = read_json_object(folder / _INDEX)
    if document:
        index = document.get("weight_map")
        if not isinstance(index, dict):
            raise ModelLoadFailed(f"{_INDEX} in {folder} does not say which files hold the weights")
        needed = sorted({str(name) for name in index.values()})
        if missing := sorted(set(needed) - set(names)):
            raise ModelLoadFailed(
                f"{len(missing)} of {len(needed)} weight files are missing, {missing[0]} first", file=missing[0]
            )
        return [folder / name for name in needed]
    files = [folder / name for name in names if name.endswith(".safetensors")]
    if files:
        return files
    pickle = next((name for name in names if Path(name).suffix in _PICKLES), None)
    if pickle is not None:
        raise UnsafeWeights(
            f"{pickle} is a pickle, which can run code when read; convert the model to safetensors", file=pickle
        )
    raise UnsupportedModel("the folder holds no weights: it has no *.safetensors file")


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file by name; raises ModelLoadFailed for a damaged or unfinished one."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        if start == b"version ":
            raise ModelLoadFailed(f"{file.name} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ModelLoadFailed(f"{file.name} is damaged: it does not begin with a safetensors header")
        try:
            tensors = _HEADER.decode(stream.read(length))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelLoadFailed(f"{file.name} is damaged: its header is not valid: {error}") from error
    tensors.pop("__metadata__", None)
    promised = _LENGTH_BYTES + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if promised != size:
        raise ModelLoadFailed(
            f"{file.name} is cut short or damaged: it has {size} bytes, its header promises {promised}",
            file_bytes=size,
            promised_bytes=promised,
        )
    return tensors
