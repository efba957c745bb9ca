"""Effects of each knob, measured and drawn: the plots of docs/tuning.md.

    python -m tools.performance.tuning_plots                       # every knob, 3 repeats: about four minutes
    python -m tools.performance.tuning_plots --only step_tokens --repeats 5 --out /tmp/plots
    python -m tools.performance.tuning_plots --quick --out /tmp/plots       # whether it works; its numbers are none

On two cores with nothing else running. Repeats of a knob's values are taken by turns, so that a slow minute of the
machine does not hit one value alone. Next to the plots of a knob lies its result as JSON, for `ericllm bench show` and
`ericllm bench plot`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from console.bench.export import plot
from console.bench.kinds.base import Plan
from console.bench.kinds.grid import Grid
from console.bench.kinds.long import Long
from console.bench.kinds.threads import Threads
from console.bench.kinds.users import Users
from console.bench.own_engine import engine_target
from console.bench.result import BenchResult, Column, Key, Row, encode_result, merge_rows
from console.bench.run import run_bench
from console.settings.schema import Settings
from console.settings.sources import changed, load_settings
from engine.backends.common.native_build import CannotBuild, build_library, cache_folder
from engine.backends.torch.native.library import native_isa
from engine.simulation.lengths import fixed

MODEL, REPEATS = "demo", 3
PLACES = 8
DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Turn:
    """One value of a knob. keys: of its row.  settings: what the model is loaded with."""

    keys: Mapping[str, Key]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A knob. plan: what is measured at each turn.  plots: by the name of a plot, the number that it draws.

    turns, keys: none where the plan turns the knob itself.  kept: keys of the plan by which rows differ too.
    """

    plan: Plan
    plots: Mapping[str, str]
    turns: tuple[Turn, ...] = ()
    keys: tuple[Column, ...] = ()
    fixed: tuple[str, ...] = ()


def sweeps() -> dict[str, Sweep]:
    """Every knob that has plots, by its name."""
    return {
        "places": Sweep(
            Grid(workers=(1, 2), max_prompts=(2, 4, 8, 16, 32), requests=48, output_tokens=fixed(48)),
            {"throughput": "output_throughput", "gaps": "median_tpot_ms", "first-tokens": "median_ttft_ms"},
        ),
        "step_tokens": Sweep(
            Long(streams=PLACES, stream_tokens=256),
            {"step-tokens-gaps": "longest_gap_ms", "step-tokens-first-tokens": "long_ttft_ms"},
            turns=tuple(_set("step_tokens", value) for value in (64, 128, 256, 512, 1024, 2048)),
            keys=(_key("step_tokens", "step tokens"),),
        ),
        "threads": Sweep(
            Users(users=(1, PLACES), requests=6, output_tokens=fixed(48)),
            {"threads-gaps": "median_tpot_ms"},
            turns=tuple(_set("threads", value) for value in (1, 2, 3, 4)),
            keys=(_key("users", "users"), _key("threads", "threads")),
            fixed=("users",),
        ),
        "cache_bits": Sweep(
            Users(users=(4 * PLACES,), requests=1, output_tokens=fixed(48)),
            {"cache-bits-throughput": "output_throughput", "cache-bits-gaps": "median_tpot_ms"},
            turns=tuple(_cache(same, bits) for same in ("memory", "places") for bits in (4, 8, 16)),
            keys=(_key("same", "the same"), _key("cache_bits", "bits of a KV cache element")),
        ),
        "draft_tokens": Sweep(
            Threads(clients=(1, 4, 16), guessed=(0, 2, 4, 8), requests=16, output_tokens=fixed(48)),
            {"draft-tokens": "output_throughput"},
        ),
    }


def _key(name: str, title: str) -> Column:
    return Column(name=name, title=title, digits=0)


def _set(knob: str, value: int) -> Turn:
    return Turn({knob: value}, {knob: value})


def _cache(same: str, bits: int) -> Turn:
    """With as many places whatever the bits, or with as many as the memory of PLACES at 16 bits has room for."""
    places = PLACES * 16 // bits if same == "memory" else PLACES
    return Turn({"same": same, "cache_bits": bits}, {"cache_bits": bits, "max_prompts": places})


def shortened(sweep: Sweep) -> Sweep:
    """The least that shows whether it works."""
    plan = sweep.plan if sweep.turns else msgspec.structs.replace(sweep.plan, **sweep.plan.quick)
    return replace(sweep, plan=plan, turns=(*sweep.turns[:1], *sweep.turns[1:][-1:]))


async def measured(sweep: Sweep, settings: Settings, repeats: int) -> BenchResult:
    """A knob's result. Raises EngineError."""
    if not sweep.turns:
        return await _once(msgspec.structs.replace(sweep.plan, repeats=repeats), settings)
    found = [
        (turn, await _once(sweep.plan, changed(settings, turn.settings)))
        for _ in range(repeats)
        for turn in sweep.turns
    ]
    return joined(sweep, found)


def joined(sweep: Sweep, found: Sequence[tuple[Turn, BenchResult]]) -> BenchResult:
    """One result of one for each turn and repeat: a row for each turn, and for each value of the keys that are kept."""
    results = [result for _, result in found]
    rows = [
        Row(keys={name: row.keys[name] for name in sweep.fixed} | dict(turn.keys), values=row.values)
        for turn, result in found
        for row in result.rows
    ]
    turned = {name for turn, _ in found for name in turn.settings}
    return msgspec.structs.replace(
        results[0],
        duration_s=sum(result.duration_s for result in results),
        complete=all(result.complete for result in results),
        settings={name: value for name, value in results[0].settings.items() if name not in turned},
        keys=sweep.keys,
        columns=tuple(_shown(column, sweep) for column in results[0].columns),
        rows=merge_rows(rows),
        published=(),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


def _shown(column: Column, sweep: Sweep) -> Column:
    """In a table there is what is drawn."""
    return msgspec.structs.replace(column, shown=column.name in sweep.plots.values())


async def _once(plan: Plan, settings: Settings) -> BenchResult:
    async with engine_target(settings, lambda text: None) as target:
        return await run_bench(plan, target)


def drawn(name: str, sweep: Sweep, result: BenchResult, folder: Path) -> list[Path]:
    """The files of a knob: its result, and its plots. Raises InvalidRequest where a plot's number was not measured."""
    files = {folder / f"tuning-{name.replace('_', '-')}.json": encode_result(result).decode()}
    files |= {folder / f"tuning-{file}.svg": plot(result, column) for file, column in sweep.plots.items()}
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return list(files)


def main() -> None:
    """The command line."""
    given = _parse()
    with contextlib.suppress(CannotBuild):  # else what is measured first would be torch's kernels
        isa = native_isa()
        if isa is not None:
            build_library(isa, cache_folder())
    given.out.mkdir(parents=True, exist_ok=True)
    for name, sweep in sweeps().items():
        if given.only and name not in given.only:
            continue
        began_s = time.perf_counter()
        result = asyncio.run(
            measured(
                shortened(sweep) if given.quick else sweep,
                load_settings({"model": given.model}),
                1 if given.quick else given.repeats,
            )
        )
        files = drawn(name, sweep, result, given.out)
        sys.stderr.write(f"{name}: {time.perf_counter() - began_s:.0f} s, {', '.join(file.name for file in files)}\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help=f"a folder, a hub id, synthetic:135m (default {MODEL})")
    parser.add_argument("--only", action="append", choices=tuple(sweeps()), help="this knob; may be given again")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"of every value (default {REPEATS})")
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder of the plots (default docs)")
    parser.add_argument("--quick", action="store_true", help="few values, once: whether it works, and no numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
