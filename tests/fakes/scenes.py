"""Snapshots that tell a story: busy GPUs, a CPU alone, nothing loaded, a load under way, a load that failed.

Everything is a function of fixed numbers, so that pictures of a screen never change by themselves.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from engine.backends.base import BackendStats, LoadedModel, LoadProgress
from engine.config import ModelSpec
from engine.errors import ErrorInfo
from engine.requests.causes import describe_all
from engine.snapshot import (
    DeviceReading,
    Mark,
    ModelStatus,
    Percentiles,
    RequestRow,
    Second,
    Snapshot,
    Totals,
    WorkerReading,
)

NOW = 1_780_063_331.0  # 2026-05-29 14:02:11 UTC
GIB = 1024**3
MIB = 1024**2


def spec(name: str = "NeuralHermes-7B") -> ModelSpec:
    """The model of every scene that has one."""
    return ModelSpec(path=Path("/models") / name, name=name)


def loaded_model(**changes: Any) -> LoadedModel:
    """A 7B model on one GPU."""
    values: dict[str, Any] = {
        "backend": "torch",
        "architecture": "MistralForCausalLM",
        "dtype": "bfloat16",
        "devices": ("cuda:0",),
        "vocab_size": 32_000,
        "max_model_len": 8192,
        "kv_tokens": 65_536,
        "page_tokens": 16,
        "weights_bytes": int(9.4 * GIB),
        "kv_bytes": int(6.1 * GIB),
        "parameters": 7_241_732_096,
    }
    return LoadedModel(**(values | changes))


def gpu(index: int, **changes: Any) -> DeviceReading:
    """A 24 GiB card, two thirds full."""
    values: dict[str, Any] = {
        "id": f"cuda:{index}",
        "name": "NVIDIA GeForce RTX 3090",
        "kind": "cuda",
        "utilisation": 0.87,
        "total_bytes": 24 * GIB,
        "weights_bytes": int(9.4 * GIB),
        "kv_bytes": int(6.1 * GIB),
        "work_bytes": int(1.2 * GIB),
        "others_bytes": int(1.5 * GIB),
        "free_bytes": int(5.8 * GIB),
        "temperature_c": 71.0,
        "power_w": 312.0,
        "power_limit_w": 350.0,
    }
    return DeviceReading(**(values | changes))


def cpu(**changes: Any) -> DeviceReading:
    """The machine itself, holding the demo model."""
    values: dict[str, Any] = {
        "id": "cpu",
        "name": "CPU (2 cores)",
        "kind": "cpu",
        "utilisation": 0.42,
        "total_bytes": 16 * GIB,
        "weights_bytes": 22 * MIB,
        "kv_bytes": 96 * MIB,
        "work_bytes": 310 * MIB,
        "others_bytes": int(5.2 * GIB),
        "free_bytes": 16 * GIB - 22 * MIB - 96 * MIB - 310 * MIB - int(5.2 * GIB),
    }
    return DeviceReading(**(values | changes))


def worker(index: int, **changes: Any) -> WorkerReading:
    """A worker in the middle of its work."""
    values: dict[str, Any] = {
        "id": f"w{index}",
        "state": "ready",
        "devices": (f"cuda:{index}",),
        "pid": 4100 + index,
        "active": 7,
        "max_prompts": 8,
        "tokens_per_s": 304.0,
        "stats": BackendStats(decoding=6, prefilling=1, pages_total=4096, pages_free=1065, pages_cached=700),
        "kv_tokens": 65_536,
    }
    return WorkerReading(**(values | changes))


def history(seconds: int = 180, *, peak_tokens: int = 612, devices: int = 2) -> tuple[Second, ...]:
    """A load that swells, falls back for a moment when a knob moves, and goes on higher; each device a little less."""
    rows = []
    for index in range(seconds):
        wave = 0.5 + 0.32 * math.sin(index / 21) + 0.1 * math.sin(index / 3.7)
        level = max(0.04, wave * (0.62 if index < seconds * 0.6 else 1.06))
        rows.append(
            Second(
                at=NOW - seconds + index,
                output_tokens=int(peak_tokens * level),
                prompt_tokens=int(1900 * level),
                running=round(14 * level),
                queued=max(0, round(9 * level - 4)),
                kv_usage=min(1.0, 0.2 + 0.55 * level),
                device_utilisation=tuple(
                    min(1.0, (0.3 + 0.6 * level) / (1 + 0.2 * device)) for device in range(devices)
                ),
                device_memory=tuple((0.76, 0.17)[device % 2] if index > 40 else 0.06 for device in range(devices)),
                ttft_p50=0.05 + 0.04 * level,
                ttft_p95=0.12 + 0.2 * level,
                itl_p50=0.009 + 0.006 * level,
                itl_p95=0.02 + 0.012 * level,
                limit="max_prompts" if 9 * level > 4.5 else "none",
            )
        )
    return tuple(rows)


def requests(live: int = 17, finished: int = 13) -> tuple[RequestRow, ...]:
    """Some waiting, one in prefill, most decoding, the rest done in every way a request can be."""
    rows = []
    for index in range(live):
        sources = ("api", "chat", "api", "api")
        queued, prefill = index >= live - 3, index == live - 4
        state = "queued" if queued else "prefill" if prefill else "decode"
        prompt = 180 + 97 * index
        rows.append(
            RequestRow(
                id=f"req-{index:04x}{index * 2654435761 % 65536:04x}",
                source=sources[index % 4],
                state=state,  # type: ignore[arg-type]
                worker=None if queued else f"w{index % 2}",
                prompt_tokens=prompt,
                computed_tokens=0 if queued else prompt // 2 if prefill else prompt,
                cached_tokens=0 if queued else prompt // 3,
                output_tokens=0 if queued or prefill else 400 - 23 * index,
                max_tokens=512,
                age_s=1.5 + index * 0.8,
                queued_s=0.9 + (index - live + 3) * 0.4 if queued else 0.012 * index,
                ttft_s=None if queued or prefill else 0.061 + 0.009 * index,
                itl_s=None if queued or prefill else 0.0131 + 0.0004 * index,
                tokens_per_s=None if queued or prefill else 76.0 - index,
            )
        )
    endings = ("stop", "stop", "length", "cancelled", "error")
    for index in range(finished):
        rows.append(
            RequestRow(
                id=f"req-f{index:03x}",
                source="api",
                state="finished",
                worker=f"w{index % 2}",
                prompt_tokens=310 + 11 * index,
                computed_tokens=310 + 11 * index,
                output_tokens=128 + 7 * index,
                max_tokens=128 + 7 * index if endings[index % 5] == "length" else 512,
                age_s=6.0 + index,
                queued_s=0.004 * index,
                ttft_s=0.074,
                itl_s=0.0142,
                tokens_per_s=68.4,
                finish=endings[index % 5],  # type: ignore[arg-type]
            )
        )
    return tuple(rows)


def ready_status(name: str = "NeuralHermes-7B", **changes: Any) -> ModelStatus:
    """A model that serves."""
    return ModelStatus(state="ready", spec=spec(name), model=loaded_model(**changes), since_s=3600.0)


def busy(**changes: Any) -> Snapshot:
    """Two GPUs, one worker busy and one loading, thirty requests, two knobs moved."""
    values: dict[str, Any] = {
        "at": NOW,
        "uptime_s": 8120.0,
        "status": ready_status(),
        "target_workers": 2,
        "max_prompts": 8,
        "max_queue": 1024,
        "devices": (
            gpu(0),
            gpu(
                1,
                utilisation=0.64,
                weights_bytes=int(3.1 * GIB),
                kv_bytes=0,
                work_bytes=int(0.6 * GIB),
                others_bytes=int(0.4 * GIB),
                free_bytes=int(19.9 * GIB),
                temperature_c=58.0,
                power_w=188.0,
            ),
        ),
        "workers": (
            worker(0),
            worker(
                1,
                state="loading",
                active=0,
                tokens_per_s=0.0,
                progress=LoadProgress(phase="weights", done=int(3.1 * GIB), total=int(9.4 * GIB)),
                stats=BackendStats(),
                restarts=1,
            ),
        ),
        "requests": requests(),
        "queued": 3,
        "running": 14,
        "output_tokens_per_s": 612.0,
        "prompt_tokens_per_s": 1900.0,
        "kv_usage": 0.71,
        "prefix_hit_rate": 0.62,
        "ttft": Percentiles(p50=0.080, p95=0.310, p99=0.512),
        "itl": Percentiles(p50=0.014, p95=0.031, p99=0.052),
        "e2e": Percentiles(p50=3.1, p95=9.8, p99=14.2),
        "history": history(),
        "marks": (Mark(at=NOW - 72, text="max_prompts 4 → 8"), Mark(at=NOW - 25, text="workers 1 → 2")),
        "totals": Totals(prompt_tokens=1_904_220, output_tokens=611_034, requests=4120),
        "log_total": 3,
        "why": describe_all({"slot": 48.2, "decode": 20.0, "prompts": 6.0, "prefill": 4.0}, {"max_prompts": 8}),
    }
    return Snapshot(**(values | changes))


def cpu_idle(**changes: Any) -> Snapshot:
    """The demo model on a machine without a GPU, nobody asking."""
    values: dict[str, Any] = {
        "at": NOW,
        "uptime_s": 40.0,
        "status": ready_status(
            "demo", architecture="LlamaForCausalLM", devices=("cpu",), parameters=8_400_000, max_model_len=1024
        ),
        "target_workers": 1,
        "max_prompts": 16,
        "max_queue": 1024,
        "devices": (cpu(),),
        "workers": (
            worker(
                0,
                devices=("cpu",),
                active=0,
                max_prompts=16,
                tokens_per_s=0.0,
                stats=BackendStats(pages_total=1024, pages_free=1024),
            ),
        ),
        "history": tuple(Second(at=NOW - 40 + i, device_utilisation=(0.1,)) for i in range(40)),
    }
    return Snapshot(**(values | changes))


def empty(**changes: Any) -> Snapshot:
    """Just started, no model."""
    values: dict[str, Any] = {
        "at": NOW,
        "target_workers": 1,
        "max_prompts": 16,
        "max_queue": 1024,
        "devices": (cpu(weights_bytes=0, kv_bytes=0, work_bytes=0, free_bytes=16 * GIB - int(5.2 * GIB)),),
    }
    return Snapshot(**(values | changes))


def loading(**changes: Any) -> Snapshot:
    """The first load, a third of the weights read."""
    progress = LoadProgress(phase="weights", done=int(3.1 * GIB), total=int(9.4 * GIB))
    values: dict[str, Any] = {
        "status": ModelStatus(state="loading", spec=spec(), progress=progress, since_s=4.0),
        "workers": (
            worker(
                0,
                state="loading",
                devices=("cpu",),
                active=0,
                tokens_per_s=0.0,
                progress=progress,
                stats=BackendStats(),
            ),
        ),
    }
    return empty(**(values | changes))


def failed(message: str = "the model needs 14.2 GiB on cuda:0, which is short by 2,310 MiB") -> Snapshot:
    """A load that could not end well."""
    error = ErrorInfo(code="insufficient_memory", message=message)
    return empty(status=ModelStatus(state="failed", spec=spec(), error=error))


def eight_gpus() -> Snapshot:
    """A full machine."""
    return busy(
        devices=tuple(gpu(i, utilisation=0.3 + 0.08 * i, temperature_c=60.0 + 2 * i) for i in range(8)),
        workers=tuple(worker(i, active=i) for i in range(8)),
        target_workers=8,
        history=history(devices=8),
    )


def changed(snapshot: Snapshot, **changes: Any) -> Snapshot:
    """`snapshot` with some fields replaced."""
    return msgspec.structs.replace(snapshot, **changes)
