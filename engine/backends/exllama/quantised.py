"""Quantised tensors, looked at before the library has them: its native code goes by what stands in them, and writes
where they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.backends.torch.checkpoint import Checkpoint
from engine.backends.torch.quant.exl2 import PARTS as EXL2_PARTS
from engine.backends.torch.quant.exl2 import Exl2Linear
from engine.backends.torch.quant.gptq import PARTS as GPTQ_PARTS
from engine.backends.torch.quant.gptq import GptqLinear
from engine.backends.torch.quant.parts import malformed

ROW_MULTIPLE = 32
"""Rows that the library's kernels work on at once, whether they are there or not."""


def refuse_malformed(folder: Path, model: Any, raise_if_cancelled: Callable[[], None]) -> None:
    """Raise ModelLoadFailed naming the first quantised tensor of `folder` that does not fit the others of its layer, or
    the layer that `model`, which is not loaded yet, has in its place. Reads the small tensors alone."""
    checkpoint = Checkpoint.open(folder)
    layers = {each.key: each for module in model.modules for each in (module, *module.submodules)}
    for name in checkpoint:
        key, _, kind = name.rpartition(".")
        if kind in ("q_weight", "qweight"):
            raise_if_cancelled()
            check = _check_exl2 if kind == "q_weight" else _check_gptq
            rows, columns = check(checkpoint, key)
            _refuse_misfit(key, kind, (rows, columns), layers.get(key))


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
    """The layer's tensors. Of those that nobody looks into, not a byte is read."""
    present = [part for part in parts if f"{key}.{part}" in checkpoint]
    return dict(zip(present, checkpoint.read(*(f"{key}.{part}" for part in present)), strict=True))


def _refuse_misfit(key: str, kind: str, shape: tuple[int, int], layer: Any) -> None:
    """Raise ModelLoadFailed where the library has a layer of another shape; it pads outputs, of which the tensors may
    know nothing."""
    if layer is None or not hasattr(layer, "in_features"):
        return
    rows, columns = layer.in_features, layer.out_features
    if shape not in ((rows, columns), (rows, columns - layer.padding)):
        raise malformed(key, kind, f"is of {shape[0]} x {shape[1]}; config.json makes it {rows} x {columns}")
