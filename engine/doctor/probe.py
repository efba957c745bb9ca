"""`python -m engine.doctor.probe NAME [ARGUMENT]`: import one library and describe it, as one JSON object on stdout.

Whatever a library prints, natively too, goes to stderr: stdout is taken away before anything is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import msgspec

from engine.doctor.facts import Package
from engine.doctor.inspection import backend_doctors, first_line


def probe_package(name: str) -> Package:
    """Import any library: its version, or why that fails."""
    try:
        module = importlib.import_module(name)
    except Exception as error:
        return Package(installed=True, error=first_line(error))
    return Package(installed=True, version=str(getattr(module, "__version__", "")))


def find_probe(name: str) -> Callable[..., msgspec.Struct]:
    """Return the probe of any package, or that of a backend's doctor."""
    return probe_package if name == "package" else backend_doctors()[name].probe


def main(name: str, *arguments: str) -> None:
    """Write the answer to what stdout was."""
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, msgspec.json.encode(find_probe(name)(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
