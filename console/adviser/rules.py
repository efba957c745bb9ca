"""Rules about load: too much of it for the knobs as they are, or too little use of what there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from console import text
from console.adviser import thresholds as at
from console.adviser.advice import Action, Advice, Look, Open, Turn
from console.adviser.evidence import OWN_LOADS, Evidence, room_for_worker
from console.text import device_label
from console.tui.view import prompts_limit
from engine.backends.base import LoadedModel
from engine.snapshot import RequestRow, Snapshot

# Rules about answers and what they are computed with: cut off, guessed in vain, never found again.


def truncated(evidence: Evidence) -> Iterator[Advice]:
    """Answers end because there was no room for more, not because their clients wanted no more."""
    ended = [row for row in evidence.snapshot.requests if row.state == "finished" and row.finish in ("stop", "length")]
    cuts = [_cut(evidence.snapshot, row) for row in ended if row.finish == "length"]
    for where in ("context", "pages"):
        found = [cut for cut in cuts if cut is not None and cut.by == where]
        if len(found) < max(at.MIN_TRUNCATED, at.TRUNCATED_SHARE * len(ended)):
            continue
        why = f"the context of {found[0].tokens:,} tokens" if where == "context" else "KV pages that ran out"
        yield Advice(
            "truncated",
            f"{len(found)} of the last {len(ended)} answers were cut off by {why}, before max_tokens.",
            f"{len(found)} of {len(ended)} answers cut off by {why}",
            Open("models"),
            where,
        )


class _Cut(NamedTuple):
    by: str
    tokens: int


def _cut(snapshot: Snapshot, row: RequestRow) -> _Cut | None:
    """Return the cause of an answer that ended too early; None where it has its full length, or that is not known."""
    model = _model_of(snapshot, row.model)
    if model is None:
        return None
    context = min(model.max_model_len, model.kv_tokens or model.max_model_len)
    if row.prompt_tokens + row.output_tokens >= context:
        return _Cut("context", context)
    return _Cut("pages", context) if row.max_tokens and row.output_tokens < row.max_tokens else None


def _model_of(snapshot: Snapshot, name: str) -> LoadedModel | None:
    named = (model.status.model for model in snapshot.models if name and model.name == name)
    return next(named, snapshot.status.model)


def drafts_rejected(evidence: Evidence) -> Iterator[Advice]:
    """Most draft tokens are rejected."""
    drafted, accepted = evidence.recent.draft_tokens, evidence.recent.draft_accepted
    if drafted < at.MIN_DRAFT_TOKENS or accepted >= at.MIN_DRAFTS_ACCEPTED * drafted:
        return
    share = text.percent(accepted / drafted)
    yield Advice(
        "drafts_rejected",
        f"Only {share} of {drafted:,} draft tokens of the last minute were accepted: try without speculation.",
        f"Only {share} of draft tokens accepted",
        Open("models"),
    )


def context_unused(evidence: Evidence) -> Iterator[Advice]:
    """The context is many times what any request needed, and KV pages lie idle for it."""
    snapshot = evidence.snapshot
    ended = sum(snapshot.insight.finished.values()) or sum(snapshot.totals.finished.values())
    longest, context = _longest(snapshot), snapshot.status.model.max_model_len if snapshot.status.model else 0
    if ended < at.MIN_ENDED or not longest or context < max(at.MIN_CONTEXT, at.CONTEXT_FACTOR * longest):
        return
    fullest = max((second.kv_usage for second in snapshot.history), default=0.0)
    if fullest > at.CONTEXT_KV:
        return
    yield Advice(
        "context_unused",
        f"No request was longer than {longest:,} of the {context:,} tokens of context, and KV pages were never fuller"
        f" than {text.percent(fullest)}: a shorter context would free memory.",
        f"No request was longer than {longest:,} of {context:,} tokens",
        Open("models"),
    )


def _longest(snapshot: Snapshot) -> int:
    """Tokens of the longest request of the model in view."""
    own = (model.longest_context_tokens for model in snapshot.models if model.status == snapshot.status)
    return next(own, 0) or (snapshot.insight.longest_context_tokens if len(snapshot.models) <= 1 else 0)


def prefix_useless(evidence: Evidence) -> Iterator[Advice]:
    """Prompts share nothing that could be kept."""
    asked = sum(worker.stats.prefix_query_tokens for worker in evidence.snapshot.workers)
    hits = evidence.snapshot.prefix_hit_rate
    if asked < at.MIN_PREFIX_TOKENS or hits is None or hits >= at.PREFIX_SHARE:
        return
    yield Advice(
        "prefix_useless",
        f"Only {hits:.1%} of {text.count(asked)} prompt tokens were in the prefix cache: put the common part of"
        " prompts first.",
        f"Only {hits:.1%} of prompt tokens were in the prefix cache",
    )


def own_load(evidence: Evidence) -> Iterator[Advice]:
    """This program sends requests itself to measure, of which nothing is proposed."""
    own = evidence.own_load
    for source, count in own.most_common(1):
        live = evidence.snapshot.running + evidence.snapshot.queued
        yield Advice(
            "own_load",
            f"{OWN_LOADS[source].capitalize()} sends {count} of {max(live, count)} live requests: nothing is proposed"
            f" from them, nor for {at.WINDOW_S:.0f} s after.",
            f"{count} of {max(live, count)} requests are of {OWN_LOADS[source]}",
        )


# Rules about devices and workers: what holds one of them back.


def device_hot(evidence: Evidence) -> Iterator[Advice]:
    """A device is as hot as it may be."""
    for device in evidence.snapshot.devices:
        if device.temperature_c is not None and device.temperature_c >= at.HOT_C:
            name, degrees = device_label(device), f"{device.temperature_c:.0f} °C"
            yield Advice(
                "device_hot",
                f"{name} is at {degrees}, where GPUs throttle: improve its cooling, or lower its power limit.",
                f"{name} is at {degrees}: improve its cooling",
                subject=device.id,
            )


def power_limit(evidence: Evidence) -> Iterator[Advice]:
    """A device draws all that it may."""
    for device in evidence.snapshot.devices:
        draw, limit, busy = device.power_w, device.power_limit_w, device.utilisation
        if draw is None or not limit or draw < at.POWER_SHARE * limit or (busy or 0.0) < at.POWER_BUSY:
            continue
        name = device_label(device)
        yield Advice(
            "power_limit",
            f"{name} draws {draw:.0f} of max {limit:.0f} W: its power limit sets its speed.",
            f"{name} draws {draw:.0f} of max {limit:.0f} W",
            subject=device.id,
        )


def slow_worker(evidence: Evidence) -> Iterator[Advice]:
    """A worker is slower than its peers, as the engine judges it."""
    for worker in evidence.serving:
        if worker.slowness <= 1.0:
            continue
        found = f"{worker.id}: its steps take {worker.slowness:.1f} times as long as its peers'"
        yield Advice(
            "slow_worker",
            f"{found}. Restart it, or check what else uses its device.",
            found,
            Look(worker.id),
            worker.id,
        )


_GROWING = 1.25
_STEP = 4


def preempted(evidence: Evidence) -> Iterator[Advice]:
    """Requests lose their KV pages to others and are computed again."""
    times, now = evidence.recent.preemptions, evidence.snapshot.max_prompts
    if times < at.MIN_PREEMPTIONS:
        return
    yield Advice(
        "preempted",
        f"KV pages ran out {times} times in the last minute, and requests were recomputed: lower max prompts.",
        f"KV pages ran out {times} times in the last minute",
        Turn("max_prompts", -max(1, now // 8)) if now > 1 else None,
    )


def queue(evidence: Evidence) -> Iterator[Advice]:
    """Requests wait, and not just for a moment."""
    history, places = evidence.last(at.QUEUE_S), evidence.places
    waiting = [second.queued for second in history]
    now = _num_queued(evidence)
    enough = max(2, at.QUEUE_SHARE * places) / (at.QUEUE_EASING if "queue" in evidence.found else 1)
    if not places or not waiting or min(waiting) == 0 or min(fmean(waiting), now) < enough:
        return
    half = len(waiting) // 2
    growing = ", and the queue grows" if fmean(waiting[half:]) >= _GROWING * fmean(waiting[:half]) else ""
    why, action = _way_out(evidence)
    of_model = f" of {evidence.snapshot.status.spec.name}" if evidence.several and evidence.snapshot.status.spec else ""
    yield Advice(
        "queue",
        f"{now} requests{of_model} wait, all {places} slots are in use{growing}: {why}.",
        f"{now} requests{of_model} wait for {places} slots",
        action,
    )


def _num_queued(evidence: Evidence) -> int:
    """Of the model in view, which knobs are turned for."""
    snapshot = evidence.snapshot
    if not evidence.several or snapshot.status.spec is None:
        return snapshot.queued
    return next((model.queued for model in snapshot.models if model.status == snapshot.status), 0)


def _way_out(evidence: Evidence) -> tuple[str, Action | None]:
    """More at a time while there are KV pages for them and each token comes in time; else more workers."""
    snapshot = evidence.snapshot
    if snapshot.kv_usage < at.KV_ROOM and not prompts_limit(snapshot) and not _late(evidence):
        more = _more(evidence)
        fits = f"{snapshot.max_prompts + more} at a time fit"
        return f"KV pages are {text.percent(snapshot.kv_usage)} full, {fits}", Turn("max_prompts", more)
    if (room := room_for_worker(evidence)) is not None:
        return f"{room.name} has {text.size(room.device.free_bytes)} free for another worker", Turn("num_workers", 1)
    return "use another device, or send fewer requests", None


def _more(evidence: Evidence) -> int:
    """How many more prompts each worker should take: as many as wait for it, up to MAX_GROWTH times those it takes now,
    and as far as KV pages would hold them, judging by those in use."""
    now, usage = evidence.snapshot.max_prompts, evidence.snapshot.kv_usage
    waiting = math.ceil(_num_queued(evidence) / len(evidence.serving))
    fitting = int(now * at.KV_FILL / usage) - now if usage > 0 else waiting
    return max(1, min((at.MAX_GROWTH - 1) * now, waiting, fitting))


def _late(evidence: Evidence) -> bool:
    limit, itl = evidence.snapshot.insight.goodput.slo_itl_s, evidence.snapshot.itl.p95
    return limit is not None and itl is not None and itl > limit


def itl_over_slo(evidence: Evidence) -> Iterator[Advice]:
    """Tokens come slower than the operator has promised, or must, however few prompt tokens a step computes."""
    snapshot, floor = evidence.snapshot, evidence.missed_floor
    limit, itl, now = snapshot.insight.goodput.slo_itl_s, snapshot.itl.p95, snapshot.max_prompts
    alone = ""
    if floor is not None:
        alone = f"of {text.plural(floor.answers, 'answer')} take {text.seconds(floor.floor_s)} without any prompt"
    if _late(evidence):
        missed = f"ITL p95 is {text.seconds(itl)}, above the SLO of {text.seconds(limit)}"
        missed += f" (steps {alone})" if alone else ""
    elif floor is not None:
        missed = f"Steps {alone}, above the ITL target of {text.seconds(floor.target_s)}"
    else:
        return
    if floor is not None and floor.answers <= 1:
        faster = "only weights in fewer bits, a smaller model or a faster device shorten it"
        yield Advice("itl_over_slo", f"{missed}: {faster}.", missed, None)
        return
    yield Advice(
        "itl_over_slo",
        f"{missed}: lower max prompts for a shorter ITL.",
        missed,
        Turn("max_prompts", -max(1, now // _STEP)) if now > 1 else None,
    )


def memory_unused(evidence: Evidence) -> Iterator[Advice]:
    """Memory is free that more workers, or more KV pages, would make use of."""
    history, places = evidence.last(at.WINDOW_S), evidence.places
    if not history or not places:
        return
    busy = fmean(second.running for second in history) / places
    if busy < at.BUSY_SHARE or evidence.several:
        return
    if (room := room_for_worker(evidence)) is not None:
        free, need = text.size(room.device.free_bytes), text.size(room.need_bytes)
        yield Advice(
            "memory_unused",
            f"{room.name} has {free} free, and another worker needs {need}, while {text.percent(busy)} of all slots"
            " are in use.",
            f"{room.name} has {free} free for another worker",
            Turn("num_workers", 1),
            room.device.id,
        )
        return
    yield from _pages_short(evidence)


def _pages_short(evidence: Evidence) -> Iterator[Advice]:
    usage = fmean(second.kv_usage for second in evidence.last(at.WINDOW_S))
    used = {device for worker in evidence.serving for device in worker.devices}
    for device in evidence.snapshot.devices:
        large = device.free_bytes >= at.LARGE_FREE_SHARE * device.total_bytes
        if usage >= at.KV_FULL and device.id in used and device.kind != "cpu" and large:
            name, free = device_label(device), text.size(device.free_bytes)
            yield Advice(
                "memory_unused",
                f"KV pages are {text.percent(usage)} full while {name} has {free} free: load with a larger KV cache.",
                f"KV pages are full, and {name} has {free} free",
                Open("models"),
                device.id,
            )
