"""Output tokens per second of one GGUF file over HTTP, here and in llama.cpp's own server, interleaved:
python -m tools.performance.gguf_http FILE. Both have all cores; every prompt is new, and no answer ends early."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import platformdirs

from tools.benchmarks.engine_process import EngineProcess
from tools.benchmarks.engines import OURS, ROWS, SERVER
from tools.benchmarks.machine import usable_cores
from tools.benchmarks.places import Places
from tools.benchmarks.protocol import Given, max_tokens, work_of

_WARM_UP = -1


def main(given: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5, help="of each number of clients (default: 5)")
    parser.add_argument("--prompt", type=int, default=128, help="about how many tokens prompts have (default: 128)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument(
        "--server",
        choices=("xllamacpp", "llamacpp"),
        default="xllamacpp",
        help="the wheel's, or the one compiled here (default: xllamacpp)",
    )
    arguments = parser.parse_args(given)
    places = Places(platformdirs.user_cache_path("ericllm") / "bench")
    venv = next(row for row in ROWS if row.venv == arguments.server)
    python = str(places.python(venv, lambda text: print(text, file=sys.stderr)))
    tokens = max_tokens(arguments.prompt, arguments.tokens)
    ways = {"ours": (OURS, "http"), "llama.cpp": (SERVER, arguments.server)}
    with ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for name, (runner, mode) in ways.items():
            work = Given(arguments.file.resolve(), max(arguments.clients), tokens, usable_cores(), mode, python)
            command = [sys.executable, "-m", f"tools.benchmarks.runners.{runner}", *work.arguments()]
            engines[name] = EngineProcess(command, {}, places.log("gguf", name))
            stack.callback(engines[name].close)
        print(f"{arguments.file.name}, {usable_cores()} threads, {arguments.prompt} tokens in, {arguments.tokens} out")
        for clients in arguments.clients:
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for round_ in range(_WARM_UP, arguments.rounds):
                order = list(engines) if round_ % 2 else list(reversed(engines))
                for name in order:
                    turn = work_of(clients, round_, prompt_tokens=arguments.prompt, output_tokens=arguments.tokens)
                    rates[name].append(engines[name].do(turn).rate)
                    engines[name].pause()
            medians = {name: statistics.median(found[1:]) for name, found in rates.items()}
            text = "  ".join(f"{name} {median:.1f} tok/s" for name, median in medians.items())
            print(f"{clients:3} clients: {text}  ratio {medians['ours'] / medians['llama.cpp']:.2f}", flush=True)


if __name__ == "__main__":
    main()
