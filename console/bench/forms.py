"""The benches as a console offers them: a few settings of each, and what cannot be put to a model that serves."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence

from console.bench.descriptions import BENCH_DESCRIPTIONS
from console.bench.flags import description, plan_from, written
from console.bench.kinds import PLANS, Plan
from console.bench.kinds.base import BenchPart
from console.link.benches import BenchField, BenchForm, BenchOrder
from engine.errors import InvalidRequest
from engine.models.files import home_expanded
from engine.simulation.lengths import TRACE

FIELDS: Mapping[str, tuple[str, ...]] = {
    "latency": ("prompts", "prompt_tokens", "output_tokens", "repeats"),
    "users": ("users", "requests", "prompt_tokens", "output_tokens", "repeats"),
    "threads": ("clients", "requests", "prompt_tokens", "output_tokens", "trace", "repeats"),
    "grid": ("workers", "max_prompts", "concurrent", "requests", "prompt_tokens", "output_tokens", "repeats"),
    "serve": ("rates", "requests", "prompt_tokens", "output_tokens", "trace", "slo_ttft", "slo_tpot", "repeats"),
    "prefix": ("requests", "concurrent", "prefix_tokens", "prefix_groups", "prompt_tokens", "repeats"),
    "long": ("streams", "long_tokens", "prompt_tokens", "repeats"),
    "load": (),
}
REFUSED: Mapping[str, str] = {
    "load": "This bench unloads the model, and here it serves others: 'ericllm bench load MODEL' does it beside them.",
}
NO_SERVER: Mapping[str, str] = {name: f"{plan.no_server}." for name, plan in PLANS.items() if plan.no_server}
_TITLES = {
    "output_tokens": "answer tokens",
    "long_tokens": "long prompt",
    "prefix_groups": "beginnings",
    "prefix_tokens": "shared tokens",
    "slo_ttft": "TTFT at most",
    "slo_tpot": "TPOT at most",
    "concurrent": "clients",
}
_OF_A_TRACE = "; 'trace' takes the trace's"
_LENGTHS = ("prompt_tokens", "output_tokens")
MOST_TOKENS = 500_000
"""Of the prompts of one row: they are made on the engine's own loop, where nobody else is served meanwhile."""
MOST_TRACE_BYTES = 64 << 20
"""Of a trace's file: reading a larger one would hold up others for as long."""


def forms() -> Sequence[BenchForm]:
    """All benches, in the order of the command line."""
    return [_form(name, plan) for name, plan in PLANS.items()]


def _form(name: str, plan: type[Plan]) -> BenchForm:
    full, quick = plan(), plan(**plan.quick)
    fields = tuple(
        BenchField(
            name=field,
            title=_TITLES.get(field, field.replace("_", " ")),
            hint=description(plan, field).removesuffix(_OF_A_TRACE),
            quick=written(getattr(quick, field)),
            full=written(getattr(full, field)),
            traced=str(TRACE) if "trace" in FIELDS[name] and field in _LENGTHS else "",
        )
        for field in FIELDS[name]
    )
    return BenchForm(
        bench=name,
        measures=BENCH_DESCRIPTIONS[name],
        fields=fields,
        refused=REFUSED.get(name, ""),
        no_server=NO_SERVER.get(name, ""),
    )


def ordered(order: BenchOrder) -> Plan:
    """The plan that was ordered. Raises InvalidRequest, its param the setting."""
    if order.bench not in PLANS:
        raise InvalidRequest(f"there is no bench {order.bench}; there are {', '.join(PLANS)}", param="bench")
    refused = (REFUSED if order.server is None else NO_SERVER).get(order.bench)
    if refused is not None:
        raise InvalidRequest(refused, param="bench")
    for name in order.settings:
        if name not in FIELDS[order.bench]:
            raise InvalidRequest(f"{name} of bench {order.bench} is for the command line alone", param=name)
    return plan_from(PLANS[order.bench], order.settings, quick=order.quick)


def check_size(plan: Plan, parts: Sequence[BenchPart], prompt_tokens: int, max_queue: int) -> None:
    """Raise InvalidRequest where others could not be served for it. prompt_tokens: of one request, at most."""
    at_once = _at_once(plan)
    if at_once > max_queue:
        raise InvalidRequest(
            f"{at_once:,} requests at once would fill the queue, which takes {max_queue:,}, and others would be turned "
            "away; ask for fewer, or raise max_queue",
            param="requests",
        )
    most = max((part.requests for part in parts), default=0) * prompt_tokens
    if most > MOST_TOKENS:
        raise InvalidRequest(
            f"a row has prompts of {most:,} tokens, and making more than {MOST_TOKENS:,} would hold up those who are "
            "being served; ask for fewer, or use the command line",
            param="requests",
        )


def check_trace(path: str) -> None:
    """Raise InvalidRequest for a file that cannot be read while others are served; what is not there is not said."""
    file = home_expanded(path)
    try:
        found = file.stat()
    except OSError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRequest(f"{file} is no file", param="trace")
    if found.st_size > MOST_TRACE_BYTES:
        raise InvalidRequest(
            f"{file} has {found.st_size >> 20:,} MiB, and reading more than {MOST_TRACE_BYTES >> 20} would hold up "
            "those who are being served; take a part of it, or use the command line",
            param="trace",
        )


def _at_once(plan: Plan) -> int:
    """The most requests that it has under way at a time."""
    limit = getattr(plan, "max_concurrent", 0)
    if limit:
        return int(limit)
    several = [value for name in ("users", "clients") for value in getattr(plan, name, ())]
    single = [getattr(plan, name) for name in ("concurrent", "streams") if hasattr(plan, name)]
    known = [*several, *single]
    return max(known) if known else int(getattr(plan, "requests", 1))
