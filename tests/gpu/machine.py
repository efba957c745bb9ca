"""The card, driver and versions of a run, and where its nvcc lies."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import torch

from tests.gpu.report import Machine

_ENGINE = Path(__file__).parents[2] / "engine"
_CUDA_HOMES = ("/usr/local/cuda", "/opt/cuda")


def this_machine() -> Machine:
    """What the first visible GPU and this Python are. Raises RuntimeError where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device; these checks need one")
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        card=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        driver=_said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        memory_bytes=properties.total_memory,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        flash_attn=metadata.version("flash_attn") if importlib.util.find_spec("flash_attn") else "",
        commit=_said("git", "rev-parse", "HEAD") or f"files {digest(_ENGINE)}",
    )


def digest(folder: Path) -> str:
    """Ten characters that differ where any Python file of a folder does."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:10]


def _said(*command: str) -> str:
    """What a command prints, "" where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


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
