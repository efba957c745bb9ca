"""The card, driver and versions of a run."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from tests.gpu.report import Machine

_ENGINE = Path(__file__).parents[2] / "engine"


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
