"""The Triton kernels compile for cards that are not here, within their shared memory."""

from __future__ import annotations

import json

import pytest

from tests.fakes.uninterpreted import Compiles

pytestmark = pytest.mark.long

SHARED_KIB = {75: 64, 80: 163, 86: 99, 90: 227, 120: 99}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("capability", "head_dim", "rows", "page_tokens", "bits", "words"),
    [
        (75, 64, 4, 16, 16, ""),
        (80, 128, 8192, 16, 16, ""),
        (80, 128, 4, 256, 16, "append"),
        (86, 128, 8192, 256, 16, ""),
        (86, 256, 8192, 16, 16, "window capped"),
        (90, 80, 4, 256, 16, "append"),
        (120, 128, 4, 16, 16, "bf16"),
        (86, 128, 4, 16, 8, ""),
        (90, 128, 4, 16, 4, ""),
        (80, 128, 8192, 16, 4, ""),
        (80, 128, 8192, 16, 16, "varlen"),
        (90, 64, 8192, 16, 16, "varlen bf16 window"),
        (120, 128, 8192, 16, 8, "varlen"),
        (75, 64, 8, 256, 4, "apart"),
        (80, 128, 32, 256, 8, "apart"),
        (86, 128, 4, 256, 4, "apart"),
        (86, 256, 32, 256, 6, "apart window capped"),
        (90, 128, 64, 256, 4, "apart"),
        (120, 192, 8, 256, 6, "apart"),
        (120, 128, 4, 256, 8, "apart"),
    ],
)
def test_the_kernels_compile_for_every_kind_of_card(
    capability: int, head_dim: int, rows: int, page_tokens: int, bits: int, words: str, compiles: Compiles
) -> None:
    sizes = (capability, head_dim, rows, page_tokens, bits, words)
    made = json.loads(compiles("tests.fakes.compile_kernels", *sizes)[-1])
    assert made["shared"] <= SHARED_KIB[capability] * 1024
    assert bool(made["tensor_cores"]) == (capability >= 80)
    assert capability < 80 or made["stack"] <= 128, "registers that are spilled cost time"
