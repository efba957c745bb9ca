"""Tensors, looked at before the library has them: its native code goes by what stands in them and in the headers of
their files, and writes where they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.backends.torch.checkpoint import Checkpoint, TensorInfo
from engine.backends.torch.quant.exl2 import PARTS as EXL2_PARTS
from engine.backends.torch.quant.exl2 import Exl2Linear
from engine.backends.torch.quant.gptq import PARTS as GPTQ_PARTS
from engine.backends.torch.quant.gptq import GptqLinear
from engine.backends.torch.quant.parts import malformed
from engine.errors import ModelLoadFailed
from engine.models.files import file_names
from engine.models.headers import read_header

_MARKS = ("q_weight", "qweight")
_ONLY_QUANTISED = {*EXL2_PARTS, *GPTQ_PARTS} - {"bias", *_MARKS}

ROW_MULTIPLE = 32
"""Rows that the library's kernels work on at once, whether they are there or not."""


def refuse_malformed(folder: Path, model: Any, raise_if_cancelled: Callable[[], None]) -> None:
    """Raise ModelLoadFailed for a damaged file of `folder`, or naming the first quantised tensor that does not fit the
    others of its layer, or the layer that `model`, which is not loaded yet, has in its place. Reads headers and the
    small tensors alone."""
    checkpoint = _open(folder, model)
    layers = {each.key: each for module in model.modules for each in (module, *module.submodules)}
    kinds = {key: kind for key, _, kind in (name.rpartition(".") for name in checkpoint) if kind in _MARKS}
    for name in checkpoint:
        key, _, kind = name.rpartition(".")
        if kind in _ONLY_QUANTISED and key not in kinds:
            raise malformed(key, kind, f"has no {' or '.join(_MARKS)} beside it")
    for key, kind in kinds.items():
        raise_if_cancelled()
        shape = (_check_exl2 if kind == "q_weight" else _check_gptq)(checkpoint, key)
        _refuse_misfit(key, kind, shape, layers.get(key))


def _open(folder: Path, model: Any) -> Checkpoint:
    """All files that the library takes tensors from, whatever an index says. It goes by names that it makes of theirs;
    where two tensors have the same, nobody can say which it takes."""
    files = [folder / name for name in file_names(folder) if name.endswith(".safetensors") and name[0] != "."]
    headers = [(file, name, header) for file in files for name, header in read_header(file).items()]
    names = getattr(model.config, "tensor_file_map", None)
    if len({name for _, name, _ in headers} if names is None else names) != len(headers):
        raise ModelLoadFailed(f"the weight files in {folder} have tensors of the same name")
    return Checkpoint({name: TensorInfo(file, header.shape, header.dtype) for file, name, header in headers})


def _check_exl2(checkpoint: Checkpoint, key: str) -> tuple[int, int]:
    """Rows and columns of the layer."""
    layer = Exl2Linear(key, **_read(checkpoint, key, EXL2_PARTS))
    for number, group in enumerate(layer.groups()):
        if group.rows % ROW_MULTIPLE:
            raise malformed(
                key, "q_groups", f"has {group.rows} rows in its group {number}; exllamav2 takes a multiple of 32"
            )
    return layer.in_features, layer.q_weight.shape[1]


def _check_gptq(checkpoint: Checkpoint, key: str) -> tuple[int, int]:
    layer = GptqLinear(key, **_read(checkpoint, key, GPTQ_PARTS), zero_offset=1)
    if layer.in_features % ROW_MULTIPLE:
        raise malformed(key, "qweight", f"has {layer.in_features} rows; exllamav2 takes a multiple of 32")
    return layer.in_features, layer.qweight.shape[1]


def _read(checkpoint: Checkpoint, key: str, parts: tuple[str, ...]) -> dict[str, Tensor]:
    """The layer's tensors. Of those that nobody looks into, not a byte is read. Raises ModelLoadFailed for one that is
    missing."""
    optional = ("bias", "g_idx")
    present = [part for part in parts if f"{key}.{part}" in checkpoint or part not in optional]
    return dict(zip(present, checkpoint.read(*(f"{key}.{part}" for part in present)), strict=True))


def _refuse_misfit(key: str, kind: str, shape: tuple[int, int], layer: Any) -> None:
    """Raise ModelLoadFailed where the library has a layer of another shape; it pads outputs, of which the tensors may
    know nothing."""
    if not hasattr(layer, "padding"):  # none, or no linear one
        return
    rows, columns = layer.in_features, layer.out_features
    if shape not in ((rows, columns), (rows, columns - layer.padding)):
        raise malformed(key, kind, f"is of {shape[0]} x {shape[1]}; config.json makes it {rows} x {columns}")
