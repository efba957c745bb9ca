"""The flags of `ericllm plan`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from console.setting_fields import flag_of
from console.setting_values import duration_s, span_s
from console.settings import Settings
from engine.cluster.wire import SILENCE_S
from engine.simulation.questions import MOST_WORKERS

ASKED = ("cards", "death", "front")
LOADING = (
    *("backend", "dtype", "weights", "max_model_len", "alpha_value", "compress_pos_emb", "num_experts", "lora"),
    *("gpu_split", "gpu_reserve", "tensor_parallel", "cache_bits", "cache_8bit", "attention", "deterministic"),
)
"""Settings of a load that change what a step costs, as `ericllm` takes them."""
_DESCRIPTION = (
    "Simulate a cluster from measured step costs, with the engine's own dispatcher and scheduler: how many cards it "
    "takes for so many users or requests a second within an SLO, what happens when a node dies at the peak, and where "
    "the front door saturates. Costs come from --costs FILE; without it, or with --measure, the model's steps are "
    "measured here first, in about a minute, and kept in FILE where one is given. docs/planning.md says what is "
    "simulated and what is not."
)


def parse(argv: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags, and as `named` the names of those that were given; a wrong one ends the program with a line."""
    parser.description = _DESCRIPTION
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="what is measured (default demo)")
    _add_costs(parser.add_argument_group("costs"))
    _add_loading(parser.add_argument_group("the measured model, as 'ericllm' loads it"))
    _add_demand(parser.add_argument_group("demand"))
    _add_cluster(parser.add_argument_group("cluster"))
    _add_questions(parser.add_argument_group("questions"))
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the answers for programs")
    defaults = {action.dest: action.default for action in parser._actions if action.dest != "help"}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    found = vars(parser.parse_args(argv))
    return argparse.Namespace(**defaults | found, named=frozenset(found))


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--costs", type=Path, metavar="FILE", help="measured step costs, read or written")
    group.add_argument("--measure", action="store_true", help="measure, whether FILE is there or not")
    group.add_argument("--seconds", type=_positive, default=60.0, metavar="S", help="to measure for (default 60)")
    group.add_argument("--threads", type=_count, metavar="N", help="CPU threads of the measured worker (default: all)")
    group.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="of the cards against the measured one (default 1)"
    )
    group.add_argument(
        "--validate",
        type=_count,
        metavar="ROUNDS",
        help="answer nothing; compare the simulator with real runs of MODEL on this machine, on three loads",
    )


def _add_loading(group: argparse._ArgumentGroup) -> None:
    for name in LOADING:
        field, flag = Settings.model_fields[name], flag_of(name)
        about = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=about)
        else:
            named = "|".join(map(str, get_args(field.annotation)))
            group.add_argument(f"--{name.replace('_', '-')}", metavar=flag.metavar or named, help=about)


def _add_demand(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--users", type=_count, metavar="N", help="who send one request at a time (default 100)")
    group.add_argument(
        "--think", type=_span, default=10.0, metavar="S", help="a user's mean pause before a request (default 10)"
    )
    group.add_argument("--rate", type=_positive, metavar="R", help="requests a second, in place of users")
    group.add_argument(
        "--burstiness", type=_not_negative, default=1.0, metavar="CV", help="of arrivals: 1 is Poisson (default 1)"
    )
    group.add_argument("--trace", type=Path, metavar="FILE", help="CSV: at_s,prompt_tokens,output_tokens")
    group.add_argument(
        "--prompt", default="512~0.8", metavar="T", help="tokens: 512, 96-160, 512~0.8 (mean~cv), normal:512:64"
    )
    group.add_argument("--output", default="200~0.6", metavar="T", help="tokens of answers, likewise")
    group.add_argument("--shared", type=_not_negative, default=0.0, metavar="SHARE", help="of prompts with a prefix")
    group.add_argument("--shared-tokens", type=_count, default=1024, metavar="N", help="of a prefix (default 1024)")
    group.add_argument("--prefixes", type=_count, default=16, metavar="N", help="how many there are (default 16)")
    group.add_argument(
        "--duration",
        type=_span,
        metavar="S",
        help="for how long requests come, as 90s, 10m or 2h (default 120; of a trace: all of it)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and lengths (default 0)")


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workers", type=_count, metavar="N", help="so many, instead of as many as it takes")
    group.add_argument("--most-workers", type=_count, default=1024, metavar="N", help="to try (default 1024)")
    group.add_argument("--cards-per-worker", type=_count, default=1, metavar="N", help="devices of each (default 1)")
    group.add_argument("--workers-per-node", type=_count, default=1, metavar="N", help="that die together (default 1)")
    group.add_argument(
        "--max-prompts", type=_count, metavar="N", help="at once per worker (default: as measured, or 16)"
    )
    group.add_argument("--step-tokens", type=_count, metavar="N", help="of a step (default: as measured)")
    group.add_argument("--kv-tokens", type=_count, metavar="N", help="of a worker's KV pages (default: as measured)")
    group.add_argument("--max-queue", type=int, metavar="N", help="requests that may wait (default 1024)")
    group.add_argument("--timeout", type=_span, metavar="S", help="of a request (default 600; 0: none)")
    group.add_argument("--hop", type=_seconds, default=0.0, metavar="S", help="from the engine to a worker, one way")
    group.add_argument("--front-request", type=_seconds, metavar="S", help="front door's CPU per request")
    group.add_argument("--front-token", type=_seconds, metavar="S", help="front door's CPU per event of a stream")
    group.add_argument("--front-slot", type=_seconds, metavar="S", help="front door's CPU per worker and request")


def _add_questions(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slo-ttft", type=_seconds, metavar="S", help="first token within, as 500ms")
    group.add_argument("--slo-itl", type=_seconds, metavar="S", help="mean time between an answer's tokens, as 50ms")
    group.add_argument("--share", type=_positive, default=0.95, metavar="X", help="within the SLO (default 0.95)")
    group.add_argument(
        "--ask", action="append", choices=ASKED, help="one of the questions; may be given again (default: all)"
    )
    group.add_argument("--die-at", type=_span, metavar="S", help="a node dies then (default: half the duration)")
    group.add_argument(
        "--detect",
        type=_span,
        default=float(SILENCE_S),
        metavar="S",
        help=f"until that is known (default {SILENCE_S}, of a machine without power; 0 where its system says goodbye)",
    )
    group.add_argument("--restart", type=_span, default=60.0, metavar="S", help="until it is back (default 60)")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= max(MOST_WORKERS, 10**9):
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = duration_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    assert isinstance(found, float)
    return found


def _span(text: str) -> float:
    try:
        return span_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _not_negative(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 0")
    return found


def _positive(text: str) -> float:
    found = _not_negative(text)
    if not found:
        raise argparse.ArgumentTypeError("it must be above 0")
    return found
