"""One part's process: `python -m tests.gpu.child MODULE FOLDER ROWS SECONDS [--quick]`. It writes rows as they come."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import msgspec

from tests.gpu.place import Place
from tests.gpu.report import attempt


def main(arguments: list[str]) -> None:
    """Run `checks` of a module; an exception in it becomes its last row."""
    module, folder, found, seconds, *quick = arguments
    place = Place(Path(folder), quick=bool(quick), end_s=time.monotonic() + float(seconds))
    with Path(found).open("wb", buffering=0) as rows:
        for row in attempt(module, lambda: importlib.import_module(module).checks(place)):
            rows.write(msgspec.json.encode(row) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
