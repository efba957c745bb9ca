"""The installed Triton's driver gets from a direct launch what it gets from Triton's own, argument by argument."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def launches(folder: Path, *arguments: str) -> Any:
    """What a driver got from `tests.fakes.triton_launches`."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.fakes.triton_launches", *arguments],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    if not found["is_direct"]:
        pytest.skip("this Triton launches in its own way")
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the stub of the driver needs gcc")
def test_a_direct_launch_of_attention_has_the_arguments_of_an_ordinary_one(tmp_path: Path) -> None:
    found = launches(tmp_path)
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the stub of the driver needs gcc")
def test_a_direct_launch_of_a_layer_or_of_codes_has_the_arguments_of_an_ordinary_one(tmp_path: Path) -> None:
    found = launches(tmp_path, "layers")
    assert found["direct"] == found["ordinary"]
    products = ["multiply_kernel", "combine_kernel"]
    assert [launch[0] for launch in found["direct"]] == [
        *("add_norm_kernel", "rotate_and_write_kernel", "gate_kernel"),
        *(4 * products),
        *("route_kernel", "order_kernel", "gate_up_kernel", "down_kernel", "mix_kernel"),
        *("route_kernel", "order_kernel", "multiply_experts_kernel", "gate_kernel"),
        *("multiply_experts_kernel", "mix_kernel"),
    ]
