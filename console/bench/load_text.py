"""How far a load is, in words: what is done now, and how much of that."""

from __future__ import annotations

from collections.abc import Mapping

from engine.backends.base import LoadPhase, LoadProgress

_GIB, _MIB = 1 << 30, 1 << 20
_DOING: Mapping[LoadPhase, str] = {
    "download": "downloading",
    "make": "making the weights",
    "inspect": "inspecting",
    "kernels": "compiling kernels",
    "wait": "waiting for another worker",
    "weights": "reading weights",
    "kv_cache": "allocating KV pages",
    "warm_up": "warming up",
}


def load_text(name: str, progress: LoadProgress | None) -> tuple[str, str]:
    """("loading demo: reading weights", "1.2 of 4.0 GiB"); the second is "" where nothing can be told."""
    if progress is None:
        return f"loading {name}", ""
    doing = f"loading {name}: {_DOING[progress.phase]}"
    if progress.total <= 0:
        return doing, ""
    if progress.unit != "bytes":
        return doing, f"{progress.done} of {progress.total}"
    scale, unit = (_GIB, "GiB") if progress.total >= _GIB else (_MIB, "MiB")
    return doing, f"{progress.done / scale:.1f} of {progress.total / scale:.1f} {unit}"
