"""Test of a compiled library in a separate process, as instructions that the CPU or hypervisor does not support would
end the process.

`python -m engine.backends.torch.native.trial LIBRARY ISA` exits with 0 if its products match torch's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from engine.backends.common.native_build import InstructionSet
from engine.backends.torch.native.layer import NativeLinear, quantise_linear
from engine.backends.torch.native.library import NativeLibrary

_ROWS = (1, 3, 16, 33)
_SHAPE = (80, 96)


def products_match(library: NativeLibrary) -> bool:
    """Return whether its bfloat16 products match torch's, for few rows and for many, and its int8 products of many rows
    those of each row alone."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    weight = random(*_SHAPE)
    layer, quantised = NativeLinear.pack(library, weight, None), quantise_linear(library, weight, None, 8)
    for rows in _ROWS:
        x = random(rows, _SHAPE[1])
        if not torch.allclose(layer(x).float(), x.float() @ weight.float().T, rtol=2**-7, atol=2**-7):
            return False
        if not torch.equal(quantised(x), torch.cat([quantised(row) for row in x.split(1)])):
            return False
    return True


def main(argv: list[str]) -> int:
    """Run the test; return 1 if the products differ."""
    path, name = argv
    (isa,) = (each for each in get_args(InstructionSet) if each == name)
    return 0 if products_match(NativeLibrary(isa, Path(path))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
