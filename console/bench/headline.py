"""A result in a few words, for a list of results. Pure."""

from __future__ import annotations

from console.bench.result import BenchResult, Column, Row
from console.bench.text import figure as number
from console.bench.text import key_text

_BEST_COUNTS = ("threads", "grid")
"""Benches that look for the best row; of the others the last one, which asks the most, is what they are about."""


def headline(result: BenchResult) -> str:
    """The figure that one looks for first: "1,420.0 tok/s, workers 2, max prompts 16"; "" where there is none."""
    column = next((each for each in result.columns if each.shown and each.better), None)
    row = main_row(result, column) if column is not None else None
    if column is None or row is None:
        return ""
    which = ", ".join(f"{key.title} {key_text(row.keys[key.name])}" for key in result.keys if key.name in row.keys)
    figure = f"{number(row.median(column.name) or 0.0, column)} {column.unit}".rstrip()
    return ", ".join(filter(None, (f"{figure} {column.title}", which if len(result.rows) > 1 else "")))


def main_row(result: BenchResult, column: Column) -> Row | None:
    """The row that a bench is about, of those that have the number; None where none has."""
    rows = [row for row in result.rows if row.known(column.name)]
    if not rows:
        return None
    return _best(rows, column) if result.name in _BEST_COUNTS else rows[-1]


def settings_text(result: BenchResult) -> str:
    """What it was measured with: "1×16, 4 requests, 128+32 tokens, 3 repeats"."""
    told = result.settings
    workers, max_prompts = told.get("num_workers"), told.get("max_prompts")
    places = f"{workers}×{max_prompts}" if isinstance(workers, int) and isinstance(max_prompts, int) else ""
    requests = f"{told['requests']} requests" if "requests" in told else ""
    tokens = f"{told['prompt_tokens']}+{told['output_tokens']} tokens" if "output_tokens" in told else ""
    repeats = f"{result.repeats} repeats" if result.repeats > 1 else ""
    return ", ".join(filter(None, (places, requests, tokens, repeats)))


def _best(rows: list[Row], column: Column) -> Row:
    choose = max if column.better == "higher" else min
    return choose(rows, key=lambda row: row.median(column.name) or 0.0)
