"""Where nvcc lies, for machines that keep it in an odd place; the build's other needs are the product's own affair."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

_CUDA_HOMES = ("/usr/local/cuda", "/opt/cuda")


def build_environment(environ: Mapping[str, str], packages: Iterable[Path]) -> dict[str, str]:
    """CUDA_HOME where nothing in `environ` leads to an nvcc and there is one all the same: beside other software, or in
    torch's nvidia packages in the site folders `packages`. Empty where there is nothing to add."""
    if environ.get("CUDA_HOME") or shutil.which("nvcc", path=environ.get("PATH", os.defpath)):
        return {}
    homes = [Path(home) for home in _CUDA_HOMES]
    homes += [home for folder in packages for home in sorted(folder.glob("nvidia/cu*"))]
    found = next((home for home in homes if (home / "bin" / "nvcc").exists()), None)
    return {"CUDA_HOME": str(found)} if found is not None else {}


def package_folders() -> list[Path]:
    """Site folders in which torch's nvidia packages may lie."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
