"""`ericllm plan`: simulate a cluster: how many cards, and what happens when a node dies."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from console.bench.progress import Progress, Show
from console.bench.text import span
from console.planning.demand import RequestedDemand, demand_from_flags
from console.planning.report import PlanReport, plan_text
from console.planning.simulations import Simulations
from console.runtime.output import write
from console.settings.schema import Settings, flag_of
from console.settings.values import duration_s, span_s
from engine.cluster.wire import SILENCE_S
from engine.config import EngineConfig
from engine.devices import usable_cores
from engine.errors import InvalidRequest
from engine.metrics.slo import Slo
from engine.simulation.cluster import Cluster, Death, FrontDoor
from engine.simulation.outcome import Summary
from engine.simulation.step_costs import MeasuredModel
from engine.simulation.what_if import (
    FRONT_LOADS,
    MARGINS,
    MAX_WORKERS,
    DeathAnswer,
    Goal,
    RunCases,
    alone_summary,
    front_door_limit,
    near_full_window,
    node_death,
    workers_needed,
)

# The flags of `ericllm plan`.

ASKED = ("cards", "death", "front")
LOADING = (
    *("backend", "dtype", "weights", "max_model_len", "alpha_value", "compress_pos_emb", "num_experts", "lora"),
    *("gpu_split", "gpu_reserve", "tensor_parallel", "tensor_parallel_size"),
    *("cache_bits", "cache_8bit", "attention", "deterministic"),
)
"""Settings of a load that change what a step costs, as `ericllm` takes them."""
_DESCRIPTION = (
    "Simulate a cluster with the engine's own dispatcher and scheduler: cards needed for a load within an SLO, effect "
    "of a node failure at peak load, max load of the front end (API and engine process). Step costs are read from "
    "--costs FILE. Without FILE, or with --measure, the model is measured here first (about 20 s) and the costs are "
    "saved to FILE. Durations: 500ms, 90s, 10m, 2h. Details: docs/planning.md."
)


def parse(argv: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags, and as `named` the names of those that were given; a wrong one ends the program with a line."""
    parser.description = _DESCRIPTION
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="model to measure (default demo)")
    _add_costs(parser.add_argument_group("step costs"))
    _add_loading(parser.add_argument_group("load options of the measured model"))
    _add_demand(parser.add_argument_group("load"))
    _add_cluster(parser.add_argument_group("cluster"))
    _add_questions(parser.add_argument_group("goal and questions"))
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    defaults = {action.dest: action.default for action in parser._actions if action.dest != "help"}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    found = vars(parser.parse_args(argv))
    return argparse.Namespace(**defaults | found, named=frozenset(found))


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--costs", type=Path, metavar="FILE", help="file of step costs; read, or written by --measure")
    group.add_argument("--measure", action="store_true", help="measure again, even if FILE exists")
    group.add_argument(
        "--seconds", type=_positive, default=20.0, metavar="S", help="measurement time in seconds (default 20)"
    )
    group.add_argument(
        "--threads", type=_count, metavar="N", help="CPU threads of the measured worker (default: all cores)"
    )
    group.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="relative speed of the planned cards (default 1)"
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
    group.add_argument(
        "--users", type=_count, metavar="N", help="concurrent users, one request at a time each (default 100)"
    )
    group.add_argument(
        "--think",
        type=_parsed(span_s),
        default=10.0,
        metavar="S",
        help="mean think time of a user between requests (default 10)",
    )
    group.add_argument("--rate", type=_positive, metavar="R", help="requests per second, instead of --users")
    group.add_argument(
        "--burstiness",
        type=_not_negative,
        default=1.0,
        metavar="CV",
        help="coefficient of variation of --rate arrivals; 1: Poisson (default 1)",
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay a CSV with columns at_s, prompt_tokens, output_tokens"
    )
    group.add_argument(
        "--prompt",
        default="512~0.8",
        metavar="T",
        help="prompt tokens: 512, 96-160, 512~0.8 (mean~cv) or normal:512:64 (default 512~0.8)",
    )
    group.add_argument("--output", default="200~0.6", metavar="T", help="answer tokens, same format (default 200~0.6)")
    group.add_argument(
        "--shared",
        type=_not_negative,
        default=0.0,
        metavar="SHARE",
        help="share of prompts with a common prefix, 0 to 1 (default 0)",
    )
    group.add_argument(
        "--shared-tokens", type=_count, default=1024, metavar="N", help="tokens of a common prefix (default 1024)"
    )
    group.add_argument(
        "--prefixes", type=_count, default=16, metavar="N", help="number of different prefixes (default 16)"
    )
    group.add_argument(
        "--duration",
        type=_parsed(span_s),
        metavar="S",
        help="simulated time (default 120s, 60s for high loads; a trace: all of it)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default 0)")


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers", type=_count, metavar="N", help="fixed number of workers, instead of searching for it"
    )
    group.add_argument(
        "--most-workers", type=_count, default=1024, metavar="N", help="max workers to try (default 1024)"
    )
    group.add_argument("--cards-per-worker", type=_count, default=1, metavar="N", help="cards per worker (default 1)")
    group.add_argument(
        "--workers-per-node",
        type=_count,
        default=1,
        metavar="N",
        help="workers per node, which fail together (default 1)",
    )
    group.add_argument(
        "--max-prompts", type=_count, metavar="N", help="max prompts of a worker (default: as measured, or 16)"
    )
    group.add_argument("--step-tokens", type=_count, metavar="N", help="max tokens per step (default: as measured)")
    group.add_argument(
        "--kv-tokens", type=_count, metavar="N", help="KV cache tokens of a worker (default: as measured)"
    )
    group.add_argument("--max-queue", type=int, metavar="N", help="max queued requests (default 1024)")
    group.add_argument("--timeout", type=_parsed(span_s), metavar="S", help="request timeout (default 600; 0: none)")
    group.add_argument(
        "--hop",
        type=_parsed(duration_s),
        default=0.0,
        metavar="S",
        help="one-way network latency to a worker (default 0)",
    )
    group.add_argument(
        "--front-request", type=_parsed(duration_s), metavar="S", help="CPU time of the front end per request"
    )
    group.add_argument(
        "--front-token", type=_parsed(duration_s), metavar="S", help="CPU time of the front end per stream event"
    )
    group.add_argument(
        "--front-slot", type=_parsed(duration_s), metavar="S", help="CPU time of the front end per request and worker"
    )


def _add_questions(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slo-ttft", type=_parsed(duration_s), metavar="S", help="TTFT target, for example 500ms")
    group.add_argument(
        "--slo-itl",
        type=_parsed(duration_s),
        metavar="S",
        help="target for the mean ITL of an answer, for example 50ms",
    )
    group.add_argument(
        "--share",
        type=_positive,
        default=0.95,
        metavar="X",
        help="share of requests that must meet the targets (default 0.95)",
    )
    group.add_argument(
        "--ask",
        action="append",
        choices=ASKED,
        help="cards needed, death of a node, front end limit; can be repeated (default: all)",
    )
    group.add_argument(
        "--die-at", type=_parsed(span_s), metavar="S", help="time of the node failure (default: half the duration)"
    )
    group.add_argument(
        "--detect",
        type=_parsed(span_s),
        default=float(SILENCE_S),
        metavar="S",
        help=f"time to detect the failure (default {SILENCE_S}, as for a power loss; 0: clean shutdown)",
    )
    group.add_argument(
        "--restart", type=_parsed(span_s), default=60.0, metavar="S", help="time until the node is back (default 60)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= max(MAX_WORKERS, 10**9):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _parsed(parse: Callable[[str], object]) -> Callable[[str], object]:
    """The type of a flag: as a setting is parsed, whose complaint ends the program."""

    def parsed(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _not_negative(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number, 0 or more")
    return found


def _positive(text: str) -> float:
    found = _not_negative(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return found


# Flags that were given and would change nothing, which are refused by name.

_LENGTHS = ("prompt", "output", "shared", "shared_tokens", "prefixes", "seed")


def refuse_unused(given: argparse.Namespace) -> None:
    """Raise InvalidRequest for the first flag of `given.named` that the others leave nothing to do."""
    for names, why in _unused(given):
        for name in names:
            if name in given.named:
                flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
                raise InvalidRequest(f"{flag} has no effect: {why}", param=name)
    if given.workers is not None and "cards" in (given.ask or ()):
        raise InvalidRequest(
            "--workers and --ask cards exclude each other: one sets the workers, one searches for them", param="ask"
        )
    if given.trace is not None and "front" in (given.ask or ()):
        raise InvalidRequest("--ask front needs --users or --rate: a trace has a fixed load", param="ask")


def questions(given: argparse.Namespace) -> Collection[str]:
    """Which questions are answered: those that were asked, or all that can be."""
    if given.ask:
        return tuple(given.ask)
    left_out = {"cards"} if given.workers is not None else set[str]()
    return tuple(each for each in ASKED if each not in left_out | ({"front"} if given.trace is not None else set()))


def _unused(given: argparse.Namespace) -> Iterator[tuple[Collection[str], str]]:
    """Flags, and why they would be of no use."""
    if given.costs is not None and not given.measure:
        measured = ("model", "threads", "seconds", *LOADING)
        yield measured, f"{given.costs} has measured costs; --measure replaces them"
    if given.trace is not None:
        yield (*_LENGTHS, "burstiness", "think"), "--trace has its own arrivals and lengths"
    elif given.rate is not None:
        yield ("think",), "--rate has no users"
    else:
        yield ("burstiness",), "it needs --rate"
    if not given.shared:
        yield ("shared_tokens", "prefixes"), "it needs --shared"
    asked = questions(given)
    if given.workers is not None:
        yield ("most_workers", "share"), "--workers sets the number of workers"
    if given.workers is not None:
        yield ("cards_per_worker",), "--workers sets the number of workers; cards are counted by --ask cards"
    if "death" not in asked:
        yield ("die_at", "detect", "restart", "workers_per_node"), "it needs --ask death"


_CROWD = 3.0
"""Times the CPU time of a request alone that one takes among others, whose steps differ more."""
_SEARCHES = 2
"""How often a search simulates two numbers of workers at once."""
_SETTLING = 0.5
"""Of the duration: for how long requests go on to come after a dead node is back."""


def plan(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; returns 0. Raises EngineError for what cannot be measured or simulated."""
    given = parse(argv, parser)
    refuse_unused(given)
    progress = Progress(sys.stderr)
    try:
        with Simulations() as simulations:
            report = _answered(given, progress.show, simulations.run)
    finally:
        progress.end()
    write(_json(report) if given.as_json else plan_text(report), as_json=given.as_json)
    return 0


def expected_s(
    asking: RequestedDemand, cluster: Cluster, alone: Summary, alone_s: float, asked: Collection[str]
) -> float:
    """Return about how many seconds the simulations take here. alone_s: the time that those of `alone` took."""
    request_s = _CROWD * alone_s / max(1, alone.requests)
    offered_per_s = asking.demand(1.0).offered_per_s(alone.e2e_s.mean)
    output_tokens = alone.output_tokens_per_s / max(alone.requests_per_s, 1e-9)
    front_s = cluster.front.request_s + output_tokens * cluster.front.output_s
    times = 1 / max(offered_per_s * front_s, 1e-6)
    full_s = near_full_window(asking.window, asking.duration_s - asking.window.since_s, times).until_s
    repeats = {
        "cards": _SEARCHES * _at_once((1.0, 1.0)) + _at_once(MARGINS[:2]),
        "death": _at_once((2.0, 2.0)),
        "front": ("cards" not in asked) + times * full_s / max(asking.duration_s, 1e-3) * _at_once(FRONT_LOADS),
    }
    return request_s * offered_per_s * asking.duration_s * sum(repeats[each] for each in asked)


def _at_once(demands: Sequence[float]) -> float:
    """Return how long independent simulations take together, as times the demand: the longest one at least."""
    return max(*demands, sum(demands) / usable_cores())


def _answered(given: argparse.Namespace, show: Show, run: RunCases) -> PlanReport:
    asking, asked = demand_from_flags(given), questions(given)
    goal = Goal(slo=Slo(ttft_s=given.slo_ttft, itl_s=given.slo_itl), share=given.share, window=asking.window).validate()
    death = _death(given, asking)
    measured = _measured(given, show)
    cluster = _cluster(given, measured).validate()
    began_s = time.perf_counter()
    alone = alone_summary(cluster, asking.demand(1.0), goal)
    alone_s = time.perf_counter() - began_s
    show(f"simulating, which takes about {span(expected_s(asking, cluster, alone, alone_s, asked))}")
    workers, sized = None, cluster
    if given.workers is None:
        margin = "cards" in asked and not asking.traced
        workers = workers_needed(
            cluster, asking.demand, goal, most=given.most_workers, margin=margin, show=show, run=run, alone=alone
        )
        sized = msgspec.structs.replace(cluster, workers=workers.workers or 1)
    possible = workers is None or workers.workers is not None
    trials = workers.trials if workers is not None else ()
    today = next((each.summary for each in trials if (each.workers, each.demand) == (sized.workers, 1.0)), None)
    return PlanReport(
        measured=measured,
        cluster=sized,
        speed=given.speed,
        cards_per_worker=given.cards_per_worker,
        demand=asking.words,
        longer_share=asking.longer_share(measured.context_tokens),
        goal=goal,
        workers=workers,
        death=_what_dies(sized, asking, goal, death, show, run) if "death" in asked and possible else None,
        front=front_door_limit(sized, asking.demand, goal, show, run, today) if "front" in asked and possible else None,
    )


def _measured(given: argparse.Namespace, show: Show) -> MeasuredModel:
    if given.costs is not None and not given.measure:
        return MeasuredModel.read(given.costs)
    from console.planning.measuring import measure

    config = EngineConfig()
    measured = asyncio.run(
        measure(
            given.model,
            threads=given.threads,
            max_prompts=given.max_prompts or config.max_prompts,
            step_tokens=given.step_tokens or config.step_tokens,
            changes={name: getattr(given, name) for name in LOADING if name in given.named},
            seconds=given.seconds,
            show=show,
        )
    )
    if given.costs is not None:
        measured.write(given.costs)
    return measured


def _cluster(given: argparse.Namespace, measured: MeasuredModel) -> Cluster:
    """As the flags say; what they do not say is as it was measured, or the engine's default."""
    front = {"request_s": given.front_request, "output_s": given.front_token, "slot_s": given.front_slot}
    named = {
        "max_prompts": given.max_prompts or measured.max_prompts or None,
        "max_queue": given.max_queue,
        "timeout_s": given.timeout,
        "workers": given.workers,
    }
    return Cluster(
        costs=measured.costs.slower(1 / given.speed),
        course=measured.fit.course,
        kv_tokens=given.kv_tokens or measured.kv_tokens,
        max_model_len=measured.max_model_len,
        step_tokens=given.step_tokens or measured.step_tokens,
        page_tokens=measured.page_tokens,
        workers_per_node=given.workers_per_node,
        slo_itl_s=given.slo_itl if measured.backend in ("", "torch") else None,
        hop_s=given.hop,
        front=FrontDoor(**{name: cost for name, cost in front.items() if cost is not None}),
        **{name: value for name, value in named.items() if value is not None},
    )


def _death(given: argparse.Namespace, asking: RequestedDemand) -> Death:
    at_s = asking.duration_s / 2 if given.die_at is None else given.die_at
    if asking.traced and at_s > asking.duration_s:
        raise InvalidRequest(
            f"--die-at is {at_s:g} s, and the last request of the trace comes at {asking.duration_s:g} s",
            param="die_at",
        )
    return Death(at_s=at_s, node=0, detected_s=given.detect, restart_s=given.restart)


def _what_dies(
    sized: Cluster, asking: RequestedDemand, goal: Goal, death: Death, show: Show, run: RunCases
) -> DeathAnswer:
    """With requests until well after the node is back, where there can be more of them."""
    longer = asking.lasting(death.back_s + _SETTLING * asking.duration_s)
    return node_death(sized, longer.demand, msgspec.structs.replace(goal, window=longer.window), death, show, run)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
