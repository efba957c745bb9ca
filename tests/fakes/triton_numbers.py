"""Numbers that Triton kernels are tried with, and how near to others their results have to be."""

from __future__ import annotations

import torch
from hypothesis import Phase, settings
from torch import Tensor

from engine.backends.common.model_config import Activation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float16, torch.bfloat16)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
FUZZ = settings(max_examples=15, phases=(Phase.explicit, Phase.generate), deadline=None)


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor, units: float) -> None:
    """They differ by no more than so many units in the last place of the largest number of their row."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if not found.numel():
        return
    size = expected.float().abs().amax(dim=-1, keepdim=True)
    unit = torch.finfo(expected.dtype).eps * size + torch.finfo(expected.dtype).tiny
    assert ((found.float() - expected.float()).abs() <= units * unit).all()
