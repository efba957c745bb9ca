"""Our EXL2 reader against the library's own unpacking on the GPU: every bit of every weight, for every bit width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.backends.checkpoints.exl2 import Exl2Linear
from tests.gpu.exl2_random import WIDTHS
from tests.gpu.library import config_of, imported, loaded_model
from tests.gpu.models import TINY, exl2_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, promise, skipped

ODD = replace(TINY, name="odd", hidden=576, inner=544, layers=1, heads=9, kv_heads=3, vocab=330, group_rows=96)
"""Columns that must be padded, and last groups that are not whole. Only its weights are looked at."""


def checks(place: Place) -> Iterable[Row]:
    """A row for each width in the tiny model, and one for the odd one."""
    yield from attempt("tiny", lambda: _by_width(exl2_model(place, TINY)))
    yield from attempt("padding and partial groups", lambda: _odd(exl2_model(place, ODD)))


def _by_width(folder: Path) -> Iterable[Row]:
    compared, wrong = compare_folder(folder)
    for bits in WIDTHS:
        name = f"{bits}-bit weights equal"
        if not compared[bits]:
            yield skipped(name, "the model has none")
        else:
            yield promise(name, not wrong[bits], f"{wrong[bits]} of {compared[bits]} differ")


def _odd(folder: Path) -> Iterable[Row]:
    compared, wrong = compare_folder(folder)
    count = compared.total()
    yield promise("padding and partial groups", count > 0 and not wrong.total(), f"{wrong.total()} of {count} differ")


def compare_folder(folder: Path) -> tuple[Counter[int], Counter[int]]:
    """Weights compared and weights that differ, by width, over every packed matrix of the model in `folder`."""
    library = imported()
    model = loaded_model(library, config_of(library, folder, 2048))
    stored = load_file(folder / "output.safetensors")
    compared, wrong = Counter[int](), Counter[int]()
    try:
        for key in packed_keys(stored):
            theirs = model.modules_dict[key].get_weight_tensor_dq().cpu()
            more, worse = compare_matrix(layer(stored, key), theirs)
            compared.update(more)
            wrong.update(worse)
    finally:
        model.unload()
    return compared, wrong


def packed_keys(stored: Mapping[str, Tensor]) -> list[str]:
    """Layers that are stored in EXL2."""
    return [name.removesuffix(".q_weight") for name in stored if name.endswith(".q_weight")]


def layer(stored: Mapping[str, Tensor], key: str) -> Exl2Linear:
    """A layer as our reader takes it."""
    return Exl2Linear(
        key, **{name.removeprefix(f"{key}."): tensor for name, tensor in stored.items() if name.startswith(f"{key}.")}
    )


def compare_matrix(packed: Exl2Linear, theirs: Tensor) -> tuple[Counter[int], Counter[int]]:
    """Elements and differing elements by width; `theirs` is float16 [in, columns with padding]."""
    differs = packed.dequantise().view(torch.int16) != theirs.contiguous().view(torch.int16)
    widths = torch.cat([torch.full((group.rows,), group.bits) for group in packed.groups()])
    by_row = widths[packed.q_invperm.long()]
    compared, wrong = Counter[int](), Counter[int]()
    for bits in by_row.unique().tolist():
        rows = differs[by_row == bits]
        compared[bits], wrong[bits] = rows.numel(), int(rows.sum())
    return compared, wrong
