"""The installed Triton's driver gets from a direct launch what it gets from Triton's own, argument by argument."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the stub of the driver needs gcc")
def test_a_direct_launch_has_the_arguments_of_an_ordinary_one(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.fakes.triton_launches"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    if not found["is_direct"]:
        pytest.skip("this Triton launches in its own way")
    assert found["direct"] == found["ordinary"]
    kernels = [[launch[0] for launch in case] for case in found["direct"]]
    assert kernels == [
        ["attend_kernel"],
        ["attend_kernel", "combine_kernel"],
        ["attend_kernel", "combine_kernel"],
        ["append_kernel", "attend_kernel"],
        ["varlen_kernel", "varlen_combine_kernel"],
    ]
    assert found["unaligned"] == 1, "tensors that start elsewhere get a kernel of their own"
