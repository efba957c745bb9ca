"""Everything that needs a GPU, in one table: `tests/gpu/run.sh [--quick] [--big] [--only a,b]`; see docs/gpu.md."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from tests.gpu import report
from tests.gpu.machine import build_environment, package_folders, this_machine
from tests.gpu.place import Place
from tests.gpu.report import Row
from tests.gpu.runner import Part, chosen, run_parts

TOTAL_S, BIG_TOTAL_S = 530.0, 1800.0
PARTS = (
    Part("kernels", "the library's kernels", "tests.gpu.library", 240, stall_s=150),
    Part("models", "synthetic models", "tests.gpu.models", 60),
    Part("tokens", "greedy tokens", "tests.gpu.check_tokens", 120, "correctness"),
    Part("throughput", "our engine against the library alone", "tests.gpu.check_throughput", 120, "speed"),
    Part("speed", "prompts, decodes, bandwidth, attention", "tests.gpu.check_speed", 150, "speed"),
    Part("attention", "paged attention kernels", "tests.gpu.check_attention", 90, "correctness"),
    Part("graphs", "torch backend, recorded decodes and drafts", "tests.gpu.check_graphs", 60, "correctness"),
    Part("layers", "torch backend, fused kernels and experts", "tests.gpu.check_layers", 60, "correctness"),
    Part("formats", "formats, families, KV codes, drafts, LoRA", "tests.gpu.check_formats", 120, "correctness"),
    Part("weights", "EXL2 weights, bit for bit", "tests.gpu.check_weights", 30, "correctness"),
    Part("serving", "while serving: graphs, contexts, memory, draws", "tests.gpu.check_serving", 100, "correctness"),
    Part("life", "load, unload, errors", "tests.gpu.check_life", 90, "correctness"),
    Part("engine", "the whole engine: crashes, grammars, memory", "tests.gpu.check_engine", 90, "correctness"),
    Part("parity", "torch backend, CUDA against CPU", "tests.gpu.check_parity", 40, "correctness"),
    Part("ahead", "torch backend, steps planned ahead", "tests.gpu.check_ahead", 40, "correctness"),
    Part("tiers", "torch backend, KV pages outside the GPU", "tests.gpu.check_tiers", 40, "correctness"),
    Part("ranks", "torch backend, layers split over two GPUs", "tests.gpu.check_ranks", 90, "correctness"),
    Part("gguf", "GGUF codes, products and speed", "tests.gpu.check_gguf", 120, "correctness"),
    Part("packed", "GPTQ, AWQ and FP8, products and speed", "tests.gpu.check_packed", 90, "correctness"),
    Part("big", "8B in bfloat16 and in 4.65 bits per weight", "tests.gpu.check_big", 900, "big", stall_s=300),
    Part("exl3", "EXL3 weights, bit for bit", "tests.gpu.check_exl3", 30, "correctness"),
)
"""In the order of what is lost without them, should the time not suffice for all."""

_RESULTS = Path(__file__).parent / "results"


_NAME_WIDTH = 60


class _Run:
    """What was found so far: printed and saved row by row, so that nothing of it is lost with the machine."""

    def __init__(self, found: report.Report, folder: Path) -> None:
        self.report = found
        self._folder = folder
        self.part = ""
        self.file = report.write(found, folder)

    def begin(self, part: Part, limit_s: float) -> None:
        """Name a part that begins."""
        self.part = part.name
        print(f"\n{part.name}: {part.title} (max {limit_s:.0f} s)", flush=True)

    def add(self, row: Row) -> None:
        """Save and print a row."""
        self._save(msgspec.structs.replace(self.report, rows=(*self.report.rows, row)))
        print(report.table([row], _NAME_WIDTH), flush=True)

    def end(self, part: Part, seconds: float) -> None:
        """Note what a part took."""
        print(f"  {seconds:.0f} s", flush=True)
        self._save(msgspec.structs.replace(self.report, seconds=self.report.seconds | {part.name: seconds}))

    def _save(self, found: report.Report) -> None:
        self.report = found  # also where the run is stopped while it is written
        self.file = report.write(found, self._folder)


def main() -> int:
    """Run the parts, print and save each row as it comes; the exit code."""
    given = _arguments()
    try:
        parts, machine = chosen(PARTS, given.only, big=given.big), this_machine()
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the part at hand is ended too
    total_s = given.seconds or (BIG_TOTAL_S if given.big else TOTAL_S)
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    found = report.Report(machine=machine, at=at, quick=given.quick, rows=(), seconds={})
    run = _Run(found, Path(os.environ.get("OUT") or _RESULTS))
    print(report.headline(machine), flush=True)
    folder = Path(tempfile.mkdtemp(prefix="ericllm-gpu-"))
    try:
        for part, _, seconds in run_parts(
            parts,
            Place(folder, quick=given.quick),
            total_s=total_s,
            environment=build_environment(os.environ, package_folders()),
            on_start=run.begin,
            on_row=run.add,
        ):
            if seconds is not None:
                run.end(part, seconds)
    except (KeyboardInterrupt, SystemExit):
        run.add(Row(part=run.part, name="the run", verdict="error", detail="it was stopped"))
        raise
    finally:
        print(f"\n{report.summary(run.report)}\n\nsaved as {run.file}", flush=True)
        if given.keep:
            print(f"models and logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return report.exit_code(run.report.rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description="Checks that need a CUDA device.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, the same promises")
    parser.add_argument("--big", action="store_true", help="also what needs minutes and 40 GiB of GPU memory")
    groups = dict.fromkeys(part.group for part in PARTS if part.group)
    parser.add_argument(
        "--only",
        default="",
        metavar="A,B",
        help=f"groups: {', '.join(groups)}; parts: {', '.join(part.name for part in PARTS)}",
    )
    parser.add_argument(
        "--seconds", type=float, help=f"wall time of all parts together ({TOTAL_S:g}; with --big {BIG_TOTAL_S:g})"
    )
    parser.add_argument("--keep", action="store_true", help="keep the models and each part's log")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
