"""Where the result of a bench goes: into the history, and into files of several kinds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from console.bench.csv_file import csv_text
from console.bench.history import BenchHistory
from console.bench.result import BenchResult, encoded
from console.bench.svg import plot
from console.settings import APP_NAME, state_dir
from engine.errors import EngineError, InvalidRequest
from engine.files import replace_file

_WRITTEN: Mapping[str, Callable[[BenchResult], bytes]] = {
    "json": encoded,
    "csv": lambda result: csv_text(result).encode(),
    "svg": lambda result: plot(result).encode(),
}
"""What a file of each kind holds."""


def refuse_unwritable(files: Mapping[str, Path]) -> None:
    """Raise InvalidRequest where one of them could not be written, as far as that is known before there is a result."""
    for kind, file in files.items():
        if why := _why_unwritable(file):
            raise InvalidRequest(f"{file} cannot be written: {why}", param=kind)


def _why_unwritable(file: Path) -> str:
    """ "" where nothing is known against it; folders that are not there are made."""
    try:
        if file.is_dir():
            return "it is a folder"
        folder = next(each for each in file.absolute().parents if each.exists())
        if not folder.is_dir():
            return f"{folder} is no folder"
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"nothing may be written to {folder}"


def remember(result: BenchResult) -> str:
    """Keep it in the user's history; what came of that, as a sentence."""
    try:
        return f"kept as number {BenchHistory(state_dir()).add(result)} ('{APP_NAME} bench history')"
    except EngineError as error:
        return f"{APP_NAME}: {error.message}"


def write_files(result: BenchResult, files: Mapping[str, Path]) -> Sequence[str]:
    """Write them, each whatever became of the others; why some could not be, as sentences."""
    failed = []
    for kind, file in files.items():
        try:
            replace_file(file, _WRITTEN[kind](result))
        except OSError as error:
            failed.append(f"{file} cannot be written: {error.strerror or error}")
        except EngineError as error:
            failed.append(f"{file} is not written: {error.message}")
    return failed
