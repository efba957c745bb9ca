"""Everything that needs a GPU, in one table: `tests/gpu/run.sh [--quick] [--only a,b]`; see docs/gpu.md."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu import report
from tests.gpu.machine import this_machine
from tests.gpu.place import Place
from tests.gpu.runner import Part, chosen, run_parts
from tests.gpu.toolchain import build_environment, package_folders

TOTAL_S = 530.0
PARTS = (
    Part("kernels", "the library's kernels", "tests.gpu.check_kernels", 240),
    Part("models", "synthetic models", "tests.gpu.models", 60),
    Part("weights", "EXL2 weights, bit for bit", "tests.gpu.check_weights", 30),
    Part("exl3", "EXL3 weights, bit for bit", "tests.gpu.check_exl3", 30),
    Part("gguf", "GGUF codes, products and speed", "tests.gpu.check_gguf", 120),
    Part("attention", "paged attention kernels", "tests.gpu.check_attention", 90),
    Part("tokens", "greedy tokens", "tests.gpu.check_tokens", 120),
    Part("life", "load, unload, errors", "tests.gpu.check_life", 70),
    Part("parity", "torch backend, CUDA against CPU", "tests.gpu.check_parity", 40),
    Part("graphs", "torch backend, recorded decodes and drafts", "tests.gpu.check_graphs", 40),
    Part("layers", "torch backend, fused kernels and experts", "tests.gpu.check_layers", 60),
    Part("ahead", "torch backend, steps planned ahead", "tests.gpu.check_ahead", 40),
    Part("throughput", "our engine against the library alone", "tests.gpu.check_throughput", 120),
    Part("torch", "torch backend, speed", "tests.gpu.check_torch_speed", 60),
)
_RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the parts, print the table, save the JSON; the exit code."""
    given = _arguments()
    try:
        parts, machine = chosen(PARTS, given.only), this_machine()
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="ericllm-gpu-"))
    try:
        rows, seconds = run_parts(
            parts,
            Place(folder, quick=given.quick),
            total_s=given.seconds,
            environment=build_environment(os.environ, package_folders()),
            on_start=lambda part, limit_s: print(f"{part.title} (at most {limit_s:.0f} s) ...", flush=True),
        )
    finally:
        if given.keep:
            print(f"models and logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    found = report.Report(machine=machine, at=at, quick=given.quick, rows=tuple(rows), seconds=seconds)
    print("\n" + report.table(found))
    print(f"\nsaved as {report.write(found, Path(os.environ.get('OUT') or _RESULTS))}")
    return report.exit_code(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description="Checks that need a CUDA device.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, the same promises")
    parser.add_argument("--only", default="", metavar="A,B", help=f"parts: {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="wall time of all parts together (%(default)g)")
    parser.add_argument("--keep", action="store_true", help="keep the models and each part's log")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
