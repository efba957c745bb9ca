"""`ericllm quantize SRC DST --bits 4.65`: an EXL2 folder from a plain one, on any machine."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from console.runtime.output import write
from console.settings.schema import APP_NAME
from console.settings.sources import load_settings
from engine.errors import ModelNotFound
from engine.models.files import home_expanded
from engine.models.resolve import is_hub_id, resolve, resolve_local

if TYPE_CHECKING:
    from engine.backends.torch.quant.quantize import QuantizeProgress, QuantizeSummary

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


def quantize(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; returns 0. Raises EngineError for what cannot be done, KeyboardInterrupt when stopped."""
    given = _parse(argv, parser)
    source, target = _source(given.source), home_expanded(given.target)
    from engine.backends.torch.quant.quantize import quantize_folder

    progress = ProgressLine(sys.stderr)
    with _stopped_by_signals():
        try:
            summary = quantize_folder(
                source,
                target,
                bits=given.bits,
                head_bits=given.head_bits,
                group_size=given.group_size,
                report=progress.show,
            )
        finally:
            progress.end()
    write(summary_text(target, given.head_bits, summary).rstrip("\n"))
    return 0


class ProgressLine:
    """How far it is: one line redrawn on a terminal, elsewhere a line every tenth."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._redraws = stream.isatty()
        self._shown: tuple[str, int] = ("", 0)
        self._drawn_s = float("-inf")

    def show(self, progress: QuantizeProgress) -> None:
        """Draw it, unless it has hardly changed."""
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
        """Leave the line behind."""
        if self._redraws and self._shown[0]:
            self._stream.write("\n")
            self._stream.flush()


def summary_text(target: Path, head_bits: int, summary: QuantizeSummary) -> str:
    """What was made, for a person."""
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


def _parse(argv: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.description = _DESCRIPTION
    parser.add_argument("source", metavar="SRC", help="model to quantise: a folder, or a name as --model takes it")
    parser.add_argument("target", metavar="DST", help="folder to make; it must not exist, or be empty")
    parser.add_argument("--bits", type=float, required=True, help="average bits per weight, 2.0 to 8.0, all counted")
    parser.add_argument("--head-bits", type=int, default=6, help="bits of the output head; 16 keeps it (default 6)")
    parser.add_argument(
        "--group-size", type=int, default=32, help="rows that share a scale: 32, 64 or 128 (default 32, the finest)"
    )
    return parser.parse_args(argv)


def _source(name: str) -> Path:
    """The folder of the model. Raises ModelNotFound."""
    folders = load_settings({}).models_dir
    path = resolve_local(name, folders)
    if path is not None:
        return path
    if is_hub_id(name):
        raise ModelNotFound(f"{name} is not on this machine; '{APP_NAME} --model {name}' downloads it", model=name)
    return resolve(name, folders)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the work as ctrl-c does, so that they leave nothing half made either."""
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
