"""The Triton kernels compile for cards that are not here, within their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
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
    ],
)
def test_the_kernels_compile_for_every_kind_of_card(
    capability: int, head_dim: int, rows: int, page_tokens: int, bits: int, words: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    sizes = [*map(str, (capability, head_dim, rows, page_tokens, bits)), *words.split()]
    result = subprocess.run(
        [sys.executable, "-m", "tests.fakes.compile_kernels", *sizes],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    made = json.loads(result.stdout.splitlines()[-1])
    assert made["shared"] <= SHARED_KIB[capability] * 1024
    assert bool(made["tensor_cores"]) == (capability >= 80)
    assert capability < 80 or made["stack"] <= 128, "registers that are spilled cost time"
