"""`python -m tools.benchmarks.convert.NAME --model DIR --to DIR --weights W`: a folder that is whole, or not there."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path


def run(convert: Callable[[Path, Path, str], None]) -> None:
    """Let `convert` read a model and write a folder with weights of that kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    given = parser.parse_args()
    partial: Path = given.to.with_name(f"{given.to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    convert(given.model, partial, given.weights)
    partial.rename(given.to)
