"""Whether a compiled library runs on this machine, found out in a process of its own: one that uses instructions which
the CPU or its hypervisor will not carry out ends the process that calls it.

`python -m engine.backends.torch.native.trial LIBRARY ISA` ends with 0 where its products are torch's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from engine.backends.common.native_build import InstructionSet
from engine.backends.torch.native.layer import NativeLinear
from engine.backends.torch.native.library import NativeLibrary

_ROWS = (1, 3, 16, 33)
_SHAPE = (80, 96)


def multiplies(library: NativeLibrary) -> bool:
    """Whether its bfloat16 products are torch's, for few rows and for many."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    weight = random(*_SHAPE)
    layer = NativeLinear.pack(library, weight, None)
    for rows in _ROWS:
        x = random(rows, _SHAPE[1])
        if not torch.allclose(layer(x).float(), x.float() @ weight.float().T, rtol=2**-7, atol=2**-7):
            return False
    return True


def main(argv: list[str]) -> int:
    """The program; 1 where the products are others."""
    path, name = argv
    (isa,) = (each for each in get_args(InstructionSet) if each == name)
    return 0 if multiplies(NativeLibrary(isa, Path(path))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
