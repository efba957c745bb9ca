"""An engine of its own for a bench: opened for it, and closed after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from console.bench.engine_target import EngineTarget, all_ready
from console.bench.progress import Showing
from console.runtime.logs import logging_to
from console.runtime.runtime import Runtime
from console.settings.load_options import LoadOptions
from console.settings.schema import Settings
from console.settings.sources import changed
from engine.backends.base import LoadedModel, LoadPhase, LoadProgress
from engine.models.inspect import inspect
from engine.models.resolve import resolve_local

# How far a load is, in words: what is done now, and how much of that.

_GIB, _MIB = 1 << 30, 1 << 20
_DOING: Mapping[LoadPhase, str] = {
    "download": "downloading",
    "inspect": "inspecting",
    "kernels": "compiling kernels",
    "wait": "waiting for another worker",
    "weights": "reading weights",
    "kv_cache": "allocating KV pages",
    "warm_up": "warming up",
}


def load_text(name: str, progress: LoadProgress | None) -> tuple[str, str]:
    """("loading demo: reading weights", "1.2 of 4.0 GiB"); the second is "" where it is unknown."""
    if progress is None:
        return f"loading {name}", ""
    doing = f"loading {name}: {_DOING[progress.phase]}"
    if progress.total <= 0:
        return doing, ""
    if progress.unit != "bytes":
        return doing, f"{progress.done} of {progress.total}"
    scale, unit = (_GIB, "GiB") if progress.total >= _GIB else (_MIB, "MiB")
    return doing, f"{progress.done / scale:.1f} of {progress.total / scale:.1f} {unit}"


MAX_QUEUE = 1_000_000
_LOOK_S = 0.2


@asynccontextmanager
async def engine_target(settings: Settings, show: Showing, *, library_prompts: int = 0) -> AsyncIterator[EngineTarget]:
    """An engine with the model of the settings, loaded as they say, without API. library_prompts: see EngineConfig.
    Raises EngineError."""
    name = settings.model
    quiet = changed(settings, {"api": False, "timeout": 0, "max_queue": MAX_QUEUE})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ericllm-bench-")))
        runtime = await Runtime.open(quiet, log_dir=folder, state_dir=folder, library_prompts=library_prompts)
        stack.enter_context(logging_to(runtime.engine.log, None))
        stack.push_async_callback(runtime.close, drain_s=0)
        await runtime.start()
        async with _watched(runtime, name, show):
            await runtime.load(name)
            await all_ready(runtime.engine, runtime.engine.config.num_workers)

        async def reload(changes: Mapping[str, object]) -> None:
            await runtime.load(name, changes=LoadOptions(**changes))

        yield EngineTarget(runtime.engine, reload, note=kernels_note(runtime.engine.status.model))


@asynccontextmanager
async def _watched(runtime: Runtime, name: str, show: Showing) -> AsyncIterator[None]:
    """While a model is loaded, with how far it is."""

    async def watch() -> None:
        while True:
            show(*load_text(name, (runtime.download_status() or runtime.engine.status).progress))
            await asyncio.sleep(_LOOK_S)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def kernels_note(model: LoadedModel | None) -> str:
    """A sentence for who reads the numbers, where torch computed what the native kernels for a CPU would; else ""."""
    if model is None or model.native is not False:
        return ""
    return f"The native kernels were not used: {model.attention_reason}."


def known_context(settings: Settings) -> int | None:
    """Tokens that the model of the settings takes at most, where that is known before it is loaded. Raises EngineError
    for a model that there cannot be."""
    if settings.max_model_len is not None:
        return settings.max_model_len
    folder = resolve_local(settings.model, settings.models_dir) if settings.model else None
    if folder is None or settings.alpha_value is not None or settings.compress_pos_emb is not None:
        return None
    found = inspect(folder)
    return None if found.problem else found.context_tokens or None
