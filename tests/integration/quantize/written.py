"""What `python -m tools.exl2_writer` wrote, read again."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

TENSORS = ("q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups")


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def stored_bits(tensors: dict[str, Tensor]) -> float:
    """Bits per weight of all packed layers but the head, counted from the file."""
    keys = [name.removesuffix(".q_weight") for name in tensors if name.endswith(".q_weight") and "lm_head" not in name]
    bits = sum(8 * tensors[f"{key}.{part}"].nbytes for key in keys for part in TENSORS)
    return bits / sum(tensors[f"{key}.q_weight"].shape[1] * len(tensors[f"{key}.q_invperm"]) for key in keys)


def nothing_but(folder: Path, *names: str) -> bool:
    return {path.name for path in folder.iterdir()} == set(names)
