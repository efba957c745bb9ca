"""`python -m tools.benchmarks.pack DIR THREADS`: read weights and pack those of linear layers once.

What loading a model cannot do without; how long it takes is what the engine's own load is held against.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors import safe_open


def main(folder: Path, threads: int) -> None:
    """The packed weights stay until the end, as an engine would."""
    torch.set_num_threads(threads)
    packs = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    weights = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                weight = tensors.get_tensor(name)
                weights.append(
                    torch.ops.mkldnn._reorder_linear_weight(weight) if packs and weight.dim() == 2 else weight.clone()
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
