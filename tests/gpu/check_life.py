"""What loading and unloading cost, and how each thing that can go wrong ends, for both backends on a GPU."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from engine.backends.base import Backend, BackendRequest, LoadedModel, LoadProgress
from engine.backends.torch_device import clear_workspaces
from engine.config import BackendName, ModelSpec, SamplingParams
from engine.errors import ContextLengthExceeded, EngineError, InsufficientMemory, LoadCancelled
from engine.worker_process.factory import create_backend
from tests.gpu.models import BILLION, exl2_model, exl3_model, plain_model, weights_bytes
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise, skipped

UNLOAD_SLACK_BYTES = 64 << 20
_LOADS = 3
_MIB = 1 << 20
_READ_BYTES = 8 << 20
_TOO_MANY_TOKENS = 1 << 31


def checks(place: Place) -> Iterator[Row]:
    """The same rows for exllamav2 on EXL2 weights, for torch on bfloat16 ones, and for exllamav3 on EXL3 ones."""
    yield from backend_checks(_spec(exl2_model(place, BILLION), "exllamav2"))
    yield from backend_checks(_spec(plain_model(place, BILLION, "bfloat16"), "torch"))
    if importlib.util.find_spec("exllamav3") is None:
        yield skipped("exllamav3", "it is not installed")
        return
    yield from backend_checks(_spec(exl3_model(place, BILLION), "exllamav3"))


def backend_checks(spec: ModelSpec) -> Iterator[Row]:
    """Load time, memory after unload, and three errors, with a backend of the name in `spec`."""
    name = spec.backend
    yield from attempt(f"{name}: load time", lambda: _load_time(spec))
    yield from attempt(f"{name}: unload gives memory back", lambda: _unload(spec))
    yield from attempt(f"{name}: cancelled load", lambda: _cancelled(spec))
    yield from attempt(f"{name}: out of memory at load", lambda: _out_of_memory(spec))
    yield from attempt(f"{name}: a request too long", lambda: _too_long(spec))


def raises(name: str, expected: type[EngineError], action: Callable[[], object]) -> Row:
    """Whether `action` ends in `expected`, with its sentence."""
    try:
        action()
    except expected as error:
        return promise(name, True, f"{error.code}: {error.message}")
    except Exception as error:
        return promise(name, False, f"{type(error).__name__} instead of {expected.__name__}: {error}")
    return promise(name, False, f"nothing was raised, {expected.__name__} was due")


def read_seconds(folder: Path) -> float:
    """Seconds to read a folder's weights and do nothing with them."""
    started = time.perf_counter()
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while stream.read(_READ_BYTES):
                pass
    return time.perf_counter() - started


def load(backend: Backend, spec: ModelSpec, cancelled: Callable[[], bool] = lambda: False) -> LoadedModel:
    """Load with the settings that every check here uses."""
    return backend.load(
        spec, max_prompts=8, step_tokens=512, page_tokens=16, report=lambda progress: None, cancelled=cancelled
    )


def _spec(folder: Path, backend: BackendName) -> ModelSpec:
    return ModelSpec(
        path=folder,
        name=folder.name,
        backend=backend,
        max_model_len=2048,
        kv_cache_tokens=8192,
        device="auto" if backend == "exllamav2" else "cuda:0",
    )


def _load_time(spec: ModelSpec) -> Iterable[Row]:
    """Seconds per phase of a second load, when kernels are imported and the files are cached, and of plain reading."""
    backend = create_backend(spec)
    load(backend, spec)
    backend.unload()
    read_s = read_seconds(spec.path)
    phases: dict[str, float] = {}
    last = [time.perf_counter()]

    def report(progress: LoadProgress) -> None:
        now = time.perf_counter()
        phases[progress.phase] = phases.get(progress.phase, 0.0) + now - last[0]
        last[0] = now

    started = time.perf_counter()
    backend.load(spec, max_prompts=8, step_tokens=512, page_tokens=16, report=report, cancelled=lambda: False)
    load_s = time.perf_counter() - started
    backend.unload()
    size = weights_bytes(spec.path) / _MIB
    spent = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())
    yield measured(f"{spec.backend}: load", load_s, "s", f"{size:.0f} MiB; seconds by phase: {spent}")
    yield measured(f"{spec.backend}: reading the files alone", read_s, "s", f"{size / read_s:.0f} MiB/s")


def _unload(spec: ModelSpec) -> Iterable[Row]:
    """Memory in use after several loads and unloads, against after the first: the CUDA context came with that."""
    backend = create_backend(spec)
    used = []
    for _ in range(_LOADS):
        load(backend, spec)
        _answer(backend, tokens=16)
        backend.unload()
        used.append(_used_bytes())
    stayed = used[-1] - used[0]
    held = torch.cuda.memory_reserved()
    yield promise(
        f"{spec.backend}: unload gives memory back",
        max(stayed, held) <= UNLOAD_SLACK_BYTES,
        f"of the device {stayed / _MIB:.0f} MiB stayed after {_LOADS} loads; torch holds {held / _MIB:.0f} MiB",
        value=max(stayed, held) / _MIB,
        unit="MiB",
    )


def _cancelled(spec: ModelSpec) -> Iterable[Row]:
    """Cancel once weights are being read; the backend loads again afterwards."""
    backend = create_backend(spec)
    load(backend, spec)
    backend.unload()
    before = _used_bytes()
    asked = iter(range(1 << 30))
    yield raises(
        f"{spec.backend}: cancelled load", LoadCancelled, lambda: load(backend, spec, lambda: next(asked) >= 2)
    )
    stayed = _used_bytes() - before
    yield promise(
        f"{spec.backend}: a cancelled load leaves nothing",
        stayed <= UNLOAD_SLACK_BYTES,
        value=stayed / _MIB,
        unit="MiB",
    )
    load(backend, spec)
    _answer(backend, tokens=4)
    backend.unload()
    yield promise(f"{spec.backend}: loads again after a cancelled load", True)


def _out_of_memory(spec: ModelSpec) -> Iterable[Row]:
    """More KV pages than any card holds."""
    backend = create_backend(spec)
    before = _used_bytes()
    huge = msgspec.structs.replace(spec, kv_cache_tokens=_TOO_MANY_TOKENS)
    yield raises(f"{spec.backend}: out of memory at load", InsufficientMemory, lambda: load(backend, huge))
    stayed = _used_bytes() - before
    yield promise(
        f"{spec.backend}: running out leaves nothing", stayed <= UNLOAD_SLACK_BYTES, value=stayed / _MIB, unit="MiB"
    )


def _too_long(spec: ModelSpec) -> Iterable[Row]:
    """A prompt beyond the context, and a good one after it."""
    backend = create_backend(spec)
    model = load(backend, spec)
    try:
        prompt = [5] * (model.max_model_len + 1)
        params = SamplingParams(temperature=0.0, max_tokens=4, seed=1)
        request = BackendRequest(id="long", prompt_ids=prompt, params=params)
        yield raises(f"{spec.backend}: a request too long", ContextLengthExceeded, lambda: backend.submit(request))
        tokens = _answer(backend, tokens=4)
        yield promise(f"{spec.backend}: answers after a request too long", tokens == 4, f"{tokens} tokens of 4")
    finally:
        backend.unload()


def _answer(backend: Backend, *, tokens: int) -> int:
    """Tokens that came of a short request."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, seed=1, ignore_eos=True)
    backend.submit(BackendRequest(id="short", prompt_ids=[5, 6, 7, 8], params=params))
    got = 0
    while backend.has_work() and got < tokens:
        got += sum(event.token_id is not None for event in backend.step())
    backend.cancel("short")
    return got


def _used_bytes() -> int:
    """Bytes of the device in use by anybody, after collecting what nobody refers to, cuBLAS's workspaces too."""
    gc.collect()
    clear_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free
