"""Our way to an RMS norm gives what torch's does."""

from __future__ import annotations

import pytest
import torch

from engine.backends.torch.model.norms import RmsNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_rows_of_any_size_become_what_torch_makes_of_them(dtype: torch.dtype, size: float, rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(rows, 96, generator=generator) * size).to(dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    before = x.clone()
    expected = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-5)
    found = RmsNorm(weight, 1e-5)(x)
    assert found.dtype == dtype and torch.equal(x, before)
    error = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(found.double(), expected, atol=1e-7, rtol=2 * error)


def test_a_row_of_zeros_stays_one() -> None:
    assert not RmsNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)).any()
