"""To OpenVINO's format, by optimum's exporter. weights: fp16 (computed with in bfloat16) or int8."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.benchmarks.convert.command import run


def convert(model: Path, to: Path, weights: str) -> None:
    """Export a model that can generate."""
    exporter = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    task = ["--task", "text-generation-with-past", "--weight-format", weights]
    subprocess.run([*exporter, "--model", str(model), *task, str(to)], check=True)


if __name__ == "__main__":
    run(convert)
