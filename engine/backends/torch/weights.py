"""Reading safetensors folders tensor by tensor: sharded or not, never pickles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.errors import LoadCancelled, ModelLoadFailed, UnsafeWeights, UnsupportedModel

_INDEX = "model.safetensors.index.json"
_STORED_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it is; `kind` is its dtype in safetensors' words."""

    file: Path
    shape: tuple[int, ...]
    kind: str

    @property
    def stored_bytes(self) -> int:
        """Its size in the file, for a dtype that is read."""
        return math.prod(self.shape) * _STORED_BYTES.get(self.kind, 0)


class Checkpoint:
    """The tensors of a model folder, known by their headers until they are read."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the headers. Raises UnsafeWeights, UnsupportedModel or ModelLoadFailed, naming the file."""
        tensors: dict[str, TensorInfo] = {}
        for file in _weight_files(folder):
            tensors.update(_read_header(file))
        return cls(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def stored_bytes(self, names: Iterable[str]) -> int:
        """What the named tensors take on disk; missing ones count nothing."""
        return sum(self._tensors[name].stored_bytes for name in names if name in self._tensors)

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelLoadFailed for the first of `shapes` that is missing, of another shape or of a dtype not read."""
        for name, shape in shapes.items():
            info = self._tensors.get(name)
            if info is None:
                raise ModelLoadFailed(f"the weights lack the tensor {name}", tensor=name)
            if info.shape != shape:
                raise ModelLoadFailed(
                    f"the tensor {name} in {info.file.name} is {_by(info.shape)}; config.json makes it {_by(shape)}",
                    tensor=name,
                )

            if info.kind not in _STORED_BYTES:
                raise ModelLoadFailed(
                    f"the tensor {name} in {info.file.name} is stored as {info.kind}; "
                    f"the torch backend reads {', '.join(_STORED_BYTES)}",
                    tensor=name,
                )

    def info(self, name: str) -> TensorInfo:
        """Header of a tensor that `require` has found."""
        return self._tensors[name]


class WeightReader:
    """Copies tensors out of a checkpoint into memory of the wanted dtype and device, reporting bytes read.

    Cancelling is checked before each tensor; LoadCancelled is raised then.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        total_bytes: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._checkpoint, self._total_bytes, self._done_bytes = checkpoint, total_bytes, 0
        self._dtype, self._device = dtype, device
        self._report, self._cancelled = report, cancelled
        self.elements = 0

    def read(self, *names: str) -> Tensor:
        """The named tensors, joined along their first dimension into one new tensor."""
        infos = [self._checkpoint.info(name) for name in names]
        rows = [info.shape[0] for info in infos]
        joined = torch.empty((sum(rows), *infos[0].shape[1:]), dtype=self._dtype, device=self._device)
        for name, info, part in zip(names, infos, joined.split(rows), strict=True):
            self._copy(name, info, part)
        return joined

    def _copy(self, name: str, info: TensorInfo, target: Tensor) -> None:
        if self._cancelled():
            raise LoadCancelled("loading was cancelled while reading the weights")
        try:
            with safe_open(info.file, framework="pt") as file:
                target.copy_(file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise _damaged(info.file, error) from None
        self._done_bytes += info.stored_bytes
        self.elements += target.numel()
        self._report(LoadProgress(phase="weights", done=self._done_bytes, total=self._total_bytes))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        return _indexed_files(index)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    for pattern in _PICKLES:
        for pickle in sorted(folder.glob(pattern)):
            raise UnsafeWeights(
                f"{pickle.name} in {folder} is a pickle, which can run code when read; "
                "convert the model to safetensors",
                file=pickle.name,
            )
    raise UnsupportedModel(f"{folder} holds no weights: it has no *.safetensors file")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadFailed(f"{index.name} in {index.parent} cannot be read: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadFailed(f"{index.name} names {name!r}, which is no safetensors file beside it")
        if not (index.parent / name).is_file():
            raise ModelLoadFailed(f"{index.name} names {name}, which is not in {index.parent}", file=name)
    return [index.parent / name for name in names]


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: _tensor_info(file, opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from None


def _tensor_info(file: Path, header: Any) -> TensorInfo:
    return TensorInfo(file, tuple(header.get_shape()), str(header.get_dtype()))


def _damaged(file: Path, error: Exception) -> ModelLoadFailed:
    return ModelLoadFailed(f"{file.name} in {file.parent} is damaged or cut short: {error}", file=file.name)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
