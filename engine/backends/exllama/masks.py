"""A mask of tokens as the bias that the library adds to logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.backends.base import TokenMask


def held_to(mask: TokenMask, bias: Tensor | None, width: int) -> Tensor:
    """`bias` (float32 [width], None is zeros) with minus infinity for every token that the mask does not allow."""
    bits = np.unpackbits(np.frombuffer(mask.allowed(), dtype=np.uint8), count=width, bitorder="little")
    held = torch.zeros(width) if bias is None else bias
    return held.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)
