"""The HTTP dialects that a bench speaks, by the names that --dialect takes: a module here describes one or two as data,
and is found by itself."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from console.bench.dialects.base import Dialect

__all__ = ["DIALECTS", "Dialect"]


def find_dialects() -> Mapping[str, Dialect]:
    """Return every `Dialect` that a module of this package holds, by its name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    rows = {row for module in modules for row in vars(module).values() if isinstance(row, Dialect)}
    return {row.name: row for row in sorted(rows, key=lambda row: (row.order, row.name))}


DIALECTS: Mapping[str, Dialect] = find_dialects()
