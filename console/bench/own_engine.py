"""An engine of its own for a bench: opened for it, and closed after it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from console.bench.engine_target import EngineTarget
from console.bench.engines import all_ready
from console.bench.load_text import load_text
from console.bench.progress import Show, Showing
from console.logs import logging_to
from console.runtime import Runtime
from console.settings import Settings
from console.sources import changed
from engine.backends.torch.native.available import instruction_set_here
from engine.backends.torch.native.build import CannotBuild, build_library, cache_folder, kept_library
from engine.devices import computable
from engine.models.inspect import inspect
from engine.models.resolve import is_synthetic, resolve_local
from engine.snapshot import DeviceReading

MAX_QUEUE = 1_000_000
_LOOK_S = 0.2


@asynccontextmanager
async def engine_target(settings: Settings, show: Showing) -> AsyncIterator[EngineTarget]:
    """An engine with the model of the settings, loaded as they say, without API; a synthetic model is made for it, and
    removed afterwards if it was, also where this is cancelled meanwhile. Raises EngineError."""
    name = settings.model
    made = is_synthetic(name) and resolve_local(name, ()) is None
    quiet = changed(settings, {"api": False, "timeout": 0, "max_queue": MAX_QUEUE})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ericllm-bench-")))
        if made:
            stack.callback(_remove, name)
        runtime = await Runtime.open(quiet, log_dir=folder, state_dir=folder)
        stack.enter_context(logging_to(runtime.engine.log, None, verbose=False, stderr=False))
        stack.push_async_callback(runtime.close, drain_s=0)
        await runtime.start()
        note = "" if _has_gpu(await runtime.engine.devices()) else await compile_kernels(show)
        async with _watched(runtime, name, show):
            await runtime.load(name)
            await all_ready(runtime.engine, runtime.engine.config.num_workers)

        async def reload(changes: Mapping[str, object]) -> None:
            await runtime.load(name, changes=changes)

        yield EngineTarget(runtime.engine, reload, note=note)


@asynccontextmanager
async def _watched(runtime: Runtime, name: str, show: Showing) -> AsyncIterator[None]:
    """While a model is loaded, with how far it is."""

    async def watch() -> None:
        while True:
            show(*load_text(name, (runtime.finding() or runtime.engine.status).progress))
            await asyncio.sleep(_LOOK_S)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def compile_kernels(show: Show) -> str:
    """Have the native kernels compiled before a load, which waits for the compiler only so long and then computes
    without them. Returns what a reader of the numbers must know where they cannot be had, else ""."""
    isa, folder = instruction_set_here(), cache_folder()
    if isa is None or kept_library(isa, folder) is not None:
        return ""
    show("compiling the native kernels, which is done once")
    try:
        await asyncio.to_thread(build_library, isa, folder)
    except CannotBuild as error:
        return f"What the native kernels would compute was computed by torch's: {error}."
    return ""


def _has_gpu(devices: Sequence[DeviceReading]) -> bool:
    return any(device.kind == "cuda" for device in computable(devices))


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


def _remove(name: str) -> None:
    """What was made for the bench alone."""
    path = resolve_local(name, ())
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
