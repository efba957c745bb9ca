"""`python -m tools.exl2_writer SRC DST --bits 4.65`: an EXL2 model from an unquantised one, without a GPU."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from console.runtime.loading import local_folder
from console.runtime.output import write
from console.settings.schema import APP_NAME
from console.settings.sources import load_settings
from engine.models.files import home_expanded
from tools.command import exit_code
from tools.exl2_writer.quantize import QuantizeProgress, QuantizeSummary, quantize_folder

NOT_CALIBRATED = (
    "Every weight was rounded to nearest. Nothing was calibrated on text, so below about 4 bits per weight "
    "expect worse answers than from a calibrated EXL2 of the same size."
)
_DESCRIPTION = (
    "Make an EXL2 model of an unquantised one, mixing bit widths to meet the target. Rounds to nearest and does not "
    "calibrate: quick, and it needs no GPU, but below about 4 bits quality suffers."
)
_PHASES = {"measure": "measuring", "write": "writing"}
_REDRAW_S = 0.2
_LINE_EVERY_PERCENT = 10


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    arguments = _parse(argv)
    return exit_code(lambda: _quantize(arguments))


def _quantize(arguments: argparse.Namespace) -> None:
    source = local_folder(load_settings({"model": arguments.source}))
    target = home_expanded(arguments.target)
    progress = ProgressLine(sys.stderr)
    with _stopped_by_signals():
        try:
            summary = quantize_folder(
                source,
                target,
                bits=arguments.bits,
                head_bits=arguments.head_bits,
                group_size=arguments.group_size,
                report=progress.show,
            )
        finally:
            progress.end()
    write(summary_text(target, arguments.head_bits, summary).rstrip("\n"))


class ProgressLine:
    """Progress: one line that is redrawn on a terminal, elsewhere a line every ten percent."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._redraws = stream.isatty()
        self._shown: tuple[str, int] = ("", 0)
        self._drawn_s = float("-inf")

    def show(self, progress: QuantizeProgress) -> None:
        """Draw progress, unless it is nearly unchanged."""
        percent = 100 * progress.done // progress.total
        if self._redraws:
            now_s = self._clock()
            if progress.done < progress.total and now_s - self._drawn_s < _REDRAW_S:
                return
            self._drawn_s = now_s
        elif (progress.phase, percent // _LINE_EVERY_PERCENT) == self._shown:
            return
        self._shown = (progress.phase, percent // _LINE_EVERY_PERCENT)
        text = f"{_PHASES[progress.phase]} {percent:3}% of {_count(progress.total)} weights"
        self._stream.write(f"\r{text:60}" if self._redraws else f"{text}\n")
        self._stream.flush()

    def end(self) -> None:
        """End the line."""
        if self._redraws and self._shown[0]:
            self._stream.write("\n")
            self._stream.flush()


def summary_text(target: Path, head_bits: int, summary: QuantizeSummary) -> str:
    """The result as text."""
    total = sum(summary.width_weights.values())
    rows = [
        f"  {width:3} bits  {_count(weights):>8} weights  {weights / total:6.1%}"
        f"   relative error {summary.width_errors[width]:.2%}"
        for width, weights in summary.width_weights.items()
    ]
    return "\n".join(
        (
            f"{target}: {summary.bits_per_weight:.3f} bits per weight, head {head_bits} bits, "
            f"{summary.file_bytes / 1e6:,.1f} MB of weights",
            *rows,
            f"  worst layer  {summary.worst_layer}, relative error {summary.worst_error:.2%}",
            NOT_CALIBRATED,
            f"Try it: {APP_NAME} --model {shlex.quote(str(target.absolute()))}\n",
        )
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.exl2_writer", description=_DESCRIPTION)
    parser.add_argument("source", metavar="SRC", help="model to quantise: a folder, or a name as --model takes it")
    parser.add_argument("target", metavar="DST", help="folder to make; it must not exist, or be empty")
    parser.add_argument("--bits", type=float, required=True, help="average bits per weight, 2.0 to 8.0, all counted")
    parser.add_argument("--head-bits", type=int, default=6, help="bits of the output head; 16 keeps it (default 6)")
    parser.add_argument(
        "--group-size", type=int, default=32, help="rows that share a scale: 32, 64 or 128 (default 32, the finest)"
    )
    return parser.parse_args(argv)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP as Ctrl+C, so that they leave no partial model either."""
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(kind, signal.default_int_handler) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def _count(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
