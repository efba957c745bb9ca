"""Time between tokens while long prompts are read: with ITL targets, with unchanging step tokens, and in other engines.

Streams go on for ever, each with a new answer as soon as one is complete; a long prompt comes every few seconds, or as
soon as the one before is read. Settings and engines take turns in every round, and only one engine's processes run at a
time; medians of the rounds are printed. Gaps are those between two chunks of an answer at its client, over HTTP but
where the engine has no server. A long prompt counts by the share of the time from sending it to its first token that
lies within the seconds measured. `python -m tools.benchmarks.itl_target --help`
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import platformdirs

from engine.metrics.distributions import percentiles
from tools.benchmarks.driver import start
from tools.benchmarks.engine_process import EngineFailed, EngineProcess
from tools.benchmarks.engines import ROWS, Row, chosen
from tools.benchmarks.places import NotPrepared, Places
from tools.benchmarks.protocol import Done, Load, Ready, done
from tools.benchmarks.runners.server import completions

TARGETS_MS, STATIC = (30.0, 60.0, 120.0), (32, 64, 128, 256, 512)
PEERS = ("openvino", "vllm", "llamacpp")
_ROOM_REQUESTS = 2


class Contender(NamedTuple):
    """An engine with a setting: a line of the report."""

    name: str
    row: Row
    setting: str = ""


class Engines:
    """Rows in processes of their own, stopped between their turns. One that fails says so once, and is left out."""

    def __init__(self, places: Places, shape: str, load: Load) -> None:
        self._places, self._shape, self._load = places, shape, load
        self._running: dict[str, EngineProcess] = {}
        self._failed: set[str] = set()

    def under_load(self, contender: Contender) -> Done | None:
        """None where it fails."""
        row = contender.row
        if row.key in self._failed:
            return None
        try:
            engine = self._running.get(row.key) or self._started(row)
            found = engine.do(replace(self._load, setting=contender.setting))
            engine.pause()
        except (EngineFailed, NotPrepared, OSError) as error:
            print(f"{contender.name}: {error}", flush=True)
            self._failed.add(row.key)
            if failed := self._running.pop(row.key, None):
                failed.close()
            return None
        return found

    def _started(self, row: Row) -> EngineProcess:
        load = self._load
        self._places.python(row, lambda text: print(text, file=sys.stderr))
        requests = load.streams + _ROOM_REQUESTS
        engine = start(self._places, self._shape, row, requests, load.max_tokens, load.kv_tokens)
        self._running[row.key] = engine
        return engine

    def close(self) -> None:
        """End them."""
        for engine in self._running.values():
            engine.close()


def contenders(targets_ms: Sequence[float], static: Sequence[int], peers: Sequence[Row]) -> list[Contender]:
    """This engine with each setting, over HTTP, and others."""
    ours = next(row for row in ROWS if row.key == "ours-http")
    settings = {f"step={tokens}": f"step tokens {tokens}" for tokens in static}
    settings |= {f"itl={target:g}": f"target {target:g} ms" for target in targets_ms}
    others = [Contender(f"{row.engine}, {row.weights}", row) for row in peers]
    return [*(Contender(name, ours, setting) for setting, name in settings.items()), *others]


def p99_ms(found: Sequence[Done]) -> float:
    """Median of the rounds' 99th percentiles of gaps; infinite where no stream went on."""
    return _gap_ms(found, 0.99)


def _gap_ms(found: Sequence[Done], share: float) -> float:
    gaps = [percentiles(each.itl_s, share)[0] for each in found]
    return 1e3 * statistics.median(math.inf if gap is None else gap for gap in gaps)


def prompt_rate(found: Sequence[Done]) -> float:
    """Median of the rounds' prompt tokens per second."""
    return statistics.median(each.prompt_tokens / each.seconds for each in found)


def verdict(target_ms: float, found: Sequence[Done], static: Sequence[Sequence[Done]]) -> str:
    """In words: is the target within the gaps' 99th percentile, and which share of the best unchanging step tokens that
    keep it are prompt tokens read at."""
    keeping = [prompt_rate(each) for each in static if p99_ms(each) <= target_ms]
    share = f"{prompt_rate(found) / max(keeping):.0%} of the best step tokens that keep it" if keeping else ""
    place = "within it" if p99_ms(found) <= target_ms else "above it"
    return f"target {target_ms:g} ms: p99 {p99_ms(found):.1f} ms is {place}; {share or 'no step tokens keep it'}"


def measure(
    contenders: Sequence[Contender], rounds: int, under_load: Callable[[Contender], Done | None]
) -> dict[str, list[Done]]:
    """Return each one's rounds, by name; a line is printed for each."""
    found: defaultdict[str, list[Done]] = defaultdict(list)
    for _ in range(rounds):
        for contender in contenders:
            if (seen := under_load(contender)) is not None:
                found[contender.name].append(seen)
                print(_line(contender.name, [seen]), flush=True)
    return dict(found)


def _line(name: str, found: Sequence[Done]) -> str:
    gaps = statistics.median(len(each.itl_s) / each.seconds for each in found)
    ttft = [seconds for each in found for seconds in each.ttft_s]
    first = f"{statistics.median(ttft):.1f} s" if ttft else "not within the seconds"
    return (
        f"{name:<40} ITL p50 {_gap_ms(found, 0.5):6.1f} ms, p99 {p99_ms(found):6.1f} ms, {gaps:6.1f} gaps/s, "
        f"{prompt_rate(found):7.1f} prompt tok/s, TTFT of long prompts {first}"
    )


async def _of_url(url: str, model: str, load: Load) -> Done:
    async with completions(url.rstrip("/").removesuffix("/v1"), model) as ask:
        return await done(Ready("", ask=ask), load)


def main() -> None:
    """Measure a synthetic shape in each engine, or what serves already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="measure the server at this address alone, which has OpenAI's /v1/completions")
    parser.add_argument("--model", default="model", help="the name of its model there")
    parser.add_argument("--shape", choices=("135m", "0.5b"), default="135m")
    parser.add_argument("--targets", type=float, nargs="*", default=TARGETS_MS, help="in milliseconds")
    parser.add_argument("--static", type=int, nargs="*", default=STATIC, help="step tokens to compare with")
    parser.add_argument("--peers", nargs="*", default=PEERS, metavar="ROW", help="keys of tools/benchmarks/engines.py")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one long prompt to the next")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each setting in each round")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds before those")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=platformdirs.user_cache_path("ericllm") / "bench")
    given = parser.parse_args()
    load = Load(
        streams=given.streams,
        prompt_tokens=given.prompt,
        every_s=given.every,
        seconds=given.seconds,
        warm_up_s=given.warm_up,
    )
    if given.url:
        print(_line(given.url, [asyncio.run(_of_url(given.url, given.model, load)) for _ in range(given.rounds)]))
        return
    try:
        peers = chosen(given.peers) if given.peers else ()
    except ValueError as error:
        parser.error(str(error))
    all_of_them = contenders(given.targets, given.static, peers)
    engines = Engines(Places(given.cache), given.shape, load)
    try:
        found = measure(all_of_them, given.rounds, engines.under_load)
    finally:
        engines.close()
    print("\nmedians")
    for name, seen in found.items():
        print(_line(name, seen))
    static = [seen for name, seen in found.items() if name.startswith("step tokens ")]
    for target in given.targets:
        if paced := found.get(f"target {target:g} ms"):
            print(verdict(target, paced, static))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine is left behind, stopped
    main()
