"""Seconds to load the weights of a GGUF file on this CPU beside those of reading the file, interleaved:
python -m tools.performance.gguf_load FILE. Cold: nothing of the file is in the system's cache."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine.config import ModelSpec

_CHUNK_BYTES = 16 << 20


def _drop(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())  # what is not on the disk yet is not dropped
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: Path) -> float:
    buffer = bytearray(_CHUNK_BYTES)
    began = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
    return time.perf_counter() - began


def _load(file: Path) -> None:
    """Load it in this process, and print the seconds that took; imports are left out."""
    from engine.backends.torch.weights.model_loader import load_decoder

    began = time.perf_counter()
    load_decoder(file, ModelSpec(path=file, name=file.stem), report=lambda _: None, cancelled=lambda: False)
    sys.stdout.write(f"{time.perf_counter() - began}\n")


def _loaded_s(file: Path) -> float:
    command = [sys.executable, "-m", "tools.performance.gguf_load", str(file), "--once"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(given: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="load it once and print the seconds")
    arguments = parser.parse_args(given)
    file: Path = arguments.file
    if arguments.once:
        _load(file)
        return
    _loaded_s(file)  # the kernels are compiled
    for cold in (True, False):
        reads, loads = [], []
        for _ in range(arguments.rounds):
            for seconds, measure in ((reads, _read), (loads, _loaded_s)):
                if cold:
                    _drop(file)
                seconds.append(measure(file))
        read_s, load_s = statistics.median(reads), statistics.median(loads)
        sys.stdout.write(
            f"{'cold' if cold else 'cached'}: read {read_s:.2f} s, load {load_s:.2f} s, ratio {load_s / read_s:.2f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
