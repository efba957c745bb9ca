"""Rules about load: too much of it for the knobs as they are, or too little use of what there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from console.adviser import thresholds as at
from console.adviser.advice import Action, Advice, Open, Turn
from console.adviser.evidence import Evidence, room_for_worker
from console.in_view import prompts_limit
from console.widgets import text
from console.widgets.names import reading_name

_GROWING = 1.25
_STEP = 4


def preempted(evidence: Evidence) -> Iterator[Advice]:
    """Requests lose their KV pages to others and are computed again."""
    times, now = evidence.recent.preemptions, evidence.snapshot.max_prompts
    if times < at.LEAST_PREEMPTIONS:
        return
    yield Advice(
        "preempted",
        f"KV pages ran out {times} times within a minute, and requests had to start over: fewer at a time lose less.",
        f"KV pages ran out {times} times within a minute",
        Turn("max_prompts", -max(1, now // 8)) if now > 1 else None,
    )


def queue(evidence: Evidence) -> Iterator[Advice]:
    """Requests wait, and not just for a moment."""
    history, places = evidence.last(at.QUEUE_S), evidence.places
    waiting = [second.queued for second in history]
    now = _queued(evidence)
    if not places or not waiting or min(waiting) == 0 or min(fmean(waiting), now) < max(2, at.QUEUE_SHARE * places):
        return
    half = len(waiting) // 2
    growing = ", ever more" if fmean(waiting[half:]) >= _GROWING * fmean(waiting[:half]) else ""
    why, action = _way_out(evidence)
    yield Advice(
        "queue",
        f"{now} requests wait for {places} places that are all taken{growing}: {why}.",
        f"{now} requests wait for {places} places",
        action,
    )


def _queued(evidence: Evidence) -> int:
    """Of the model in view, which knobs are turned for."""
    snapshot = evidence.snapshot
    if not evidence.several or snapshot.status.spec is None:
        return snapshot.queued
    return next((model.queued for model in snapshot.models if model.status == snapshot.status), 0)


def _way_out(evidence: Evidence) -> tuple[str, Action | None]:
    """More at a time while there are KV pages for them and each token comes in time; else more workers."""
    snapshot = evidence.snapshot
    if snapshot.kv_usage < at.KV_ROOM and not prompts_limit(snapshot) and not _late(evidence):
        return f"KV pages are {text.percent(snapshot.kv_usage)} full, more fit", Turn("max_prompts", _more(evidence))
    if (room := room_for_worker(evidence)) is not None:
        return f"{room.name} has {text.size(room.device.free_bytes)} free for another worker", Turn("workers", 1)
    return "it takes another device, or fewer requests", None


def _more(evidence: Evidence) -> int:
    """How many more prompts each worker should take: up to half as many again, as far as somebody waits for the places
    and KV pages would hold them, judging by those that are full now."""
    now, usage = evidence.snapshot.max_prompts, evidence.snapshot.kv_usage
    waiting = math.ceil(_queued(evidence) / len(evidence.serving))
    held = int(now * at.KV_FILL / usage) - now if usage > 0 else waiting
    return max(1, min(now // 2, waiting, held))


def _late(evidence: Evidence) -> bool:
    limit, itl = evidence.snapshot.insight.goodput.slo_itl_s, evidence.snapshot.itl.p95
    return limit is not None and itl is not None and itl > limit


def itl_over_slo(evidence: Evidence) -> Iterator[Advice]:
    """Tokens come slower than the operator has promised."""
    snapshot = evidence.snapshot
    limit, itl = snapshot.insight.goodput.slo_itl_s, snapshot.itl.p95
    if limit is None or itl is None or not _late(evidence):
        return
    now = snapshot.max_prompts
    missed = f"ITL p95 is {text.seconds(itl)}, over the {text.seconds(limit)} that were set"
    yield Advice(
        "itl_over_slo",
        f"{missed}: with fewer prompts at a time each token comes sooner.",
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
            f"{room.name} has {free} free, and another worker takes {need}, while {text.percent(busy)} of all places"
            " are taken.",
            f"{room.name} has {free} free for another worker",
            Turn("workers", 1),
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
            name, free = reading_name(device), text.size(device.free_bytes)
            yield Advice(
                "memory_unused",
                f"KV pages are {text.percent(usage)} full while {name} has {free} free: load with a larger KV cache.",
                f"KV pages are full, and {name} has {free} free",
                Open("models"),
                device.id,
            )
