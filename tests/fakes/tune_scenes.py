"""Some minutes at the knobs: a worker added, prompts raised too far, a load that changed, a knob just turned."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from console.link.tuning import Tried, TuningReport, TuningState
from console.tuning.autotune.record import Verdict
from console.tuning.autotune.space import Setting
from engine.snapshot import Mark, ModelReading, Second, Snapshot
from tests.fakes import scenes

_SECONDS = 420
_TURNS = (
    # seconds ago, knob, before, after, seconds until in effect
    (330, "num_workers", 1, 2, 14),
    (220, "max_prompts", 8, 16, 1),
    (120, "max_prompts", 16, 32, 1),
    (24, "idle_unload_s", 0, 900, 1),
    (6, "num_workers", 2, 3, None),
)
# tokens, ITL p95 and TTFT p95 between them
_GAVE = ((190, 0.021, 0.62), (352, 0.022, 0.34), (505, 0.027, 0.24), (512, 0.046, 0.22), (512, 0.046, 0.22))


def tuned(**changes: Any) -> Snapshot:
    """A busy engine of one model whose knobs were turned five times."""
    marks = tuple(_mark(*turn) for turn in _TURNS)
    snapshot = scenes.busy(
        history=_history(),
        marks=marks,
        target_workers=3,
        max_prompts=32,
        step_tokens=512,
        idle_unload_s=900.0,
        output_tokens_per_s=514.0,
        workers=(scenes.worker(0, max_prompts=32), scenes.worker(1, max_prompts=32), scenes.busy().workers[1]),
    )
    workers = (*snapshot.workers[:2], msgspec.structs.replace(snapshot.workers[2], id="w2"))
    reading = ModelReading(
        key="NeuralHermes-7B#1",
        name="NeuralHermes-7B",
        status=snapshot.status,
        target_workers=3,
        max_prompts=32,
        queued=3,
        running=14,
        step_tokens=512,
        idle_unload_s=900.0,
    )
    return scenes.changed(snapshot, **({"workers": workers, "models": (reading,)} | changes))


def _mark(ago: int, knob: str, before: float, after: float, settles: int | None) -> Mark:
    at = scenes.NOW - ago
    return Mark(
        at=at,
        text=f"{knob} {before:g} → {after:g}",
        knob=knob,
        before=before,
        after=after,
        model="NeuralHermes-7B",
        settled_at=None if settles is None else at + settles,
    )


def _history() -> tuple[Second, ...]:
    seconds = []
    for ago in range(_SECONDS, 0, -1):
        stage = sum(ago <= turn[0] for turn in _TURNS[:3])
        tokens, itl, ttft = _GAVE[stage]
        wave = math.sin(ago / 2.3) * 0.05 + math.sin(ago / 7) * 0.03
        waits = 4 if 100 < ago <= 120 else 0
        seconds.append(
            Second(
                at=scenes.NOW - ago,
                output_tokens=int(tokens * (1 + wave)),
                prompt_tokens=int(tokens * 3),
                running=14,
                queued=3 + waits,
                kv_usage=0.5,
                ttft_p50=ttft / 2,
                ttft_p95=ttft * (1 + wave),
                itl_p50=itl / 2,
                itl_p95=itl * (1 - wave / 2),
            )
        )
    return tuple(seconds)


def changed_load() -> Snapshot:
    """As above, but far more requests came with the third turn."""
    snapshot = tuned()
    history = tuple(
        msgspec.structs.replace(each, running=52, queued=9) if each.at > scenes.NOW - 120 else each
        for each in snapshot.history
    )
    return scenes.changed(snapshot, history=history)


def found(state: TuningState = "running") -> TuningReport:
    """Settings that were tried of a GPU with 24 GiB: several on the front, and one that breaks the SLO."""
    now = Setting(workers=2, max_prompts=32, step_tokens=256, cache_bits=8)
    rows: list[tuple[int, int, int, int, float, float, float, Verdict, str]] = [
        (2, 64, 512, 8, 1812.0, 0.61, 0.068, "broken", "front"),
        (2, 32, 512, 8, 1420.0, 0.38, 0.046, "kept", "best"),
        (2, 32, 512, 16, 1388.0, 0.37, 0.047, "unsure", ""),
        (1, 64, 512, 8, 1204.0, 0.55, 0.052, "broken", ""),
        (2, 16, 512, 16, 902.0, 0.24, 0.031, "kept", "front"),
        (1, 16, 512, 16, 604.0, 0.21, 0.026, "kept", "front"),
        (1, 8, 256, 16, 344.0, 0.26, 0.024, "kept", "front"),
        (1, 2, 128, 16, 96.0, 0.34, 0.019, "kept", "front"),
    ]
    tried = tuple(
        Tried(
            setting=Setting(workers=workers, max_prompts=prompts, step_tokens=step, cache_bits=bits),
            tokens_per_s=rate,
            low=rate * 0.97,
            high=rate * 1.03,
            ttft_s=ttft,
            ttft_low_s=ttft * 0.9,
            ttft_high_s=ttft * 1.1,
            itl_s=itl,
            itl_low_s=itl * 0.96,
            itl_high_s=itl * 1.04,
            goodput_per_s=rate / 90 if verdict != "broken" else 0.4,
            verdict=verdict,
            keeps=verdict != "broken",
            windows=6 if mark == "best" else 2,
            front=mark != "",
            best=mark == "best",
        )
        for workers, prompts, step, bits, rate, ttft, itl, verdict, mark in rows
    )
    return TuningReport(
        state=state,
        model="NeuralHermes-7B",
        slo_ttft_s=0.5,
        slo_itl_s=0.05,
        mix="lengths as of the last 4,120 requests",
        stage="fine",
        now=now if state == "running" else None,
        start=Setting(),
        elapsed_s=192.0,
        budget_s=600.0,
        size=540,
        knobs=("workers", "max_prompts", "step_tokens", "cache_bits"),
        windows=24,
        tried=tried,
        outcome="" if state == "running" else "1,420 tok/s; meets the latency SLO. Settings restored.",
    )
