"""Tensor parallelism of the torch backend over two GPUs, with NCCL: the answers of one, and how a lost rank ends."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from engine.backends.base import BackendRequest, LoadedModel
from engine.backends.torch.backend import TorchBackend
from engine.config import DtypeName, ModelSpec, SamplingParams
from engine.errors import WorkerFailed
from tests.gpu.answers import agreement, ask, prompts
from tests.gpu.models import BILLION, TINY, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise, skipped

_TOKENS, _PROMPTS, _STEPS = 64, 4, 64
_EXACT_NATS, _HALF_NATS = 0.001, 0.05
"""How far log-probabilities of float32 and of bfloat16 may lie apart where sums have another order."""


def checks(place: Place) -> Iterable[Row]:
    """Where there are two GPUs: a small model in float32, one of about 1B parameters in bfloat16."""
    if torch.cuda.device_count() < 2:
        yield skipped("two ranks", "this machine has one GPU")
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    yield from attempt("answers, float32", partial(alike, plain_model(place, TINY, "float32"), "float32"))
    billion = plain_model(place, BILLION, "bfloat16")
    yield from attempt("answers, bfloat16", partial(alike, billion, "bfloat16"))
    yield from attempt("a lost rank", partial(lost, plain_model(place, TINY, "float32")))
    yield from attempt("decodes", partial(timed, billion))


def alike(folder: Path, dtype: DtypeName, device: str = "auto", tokens: int = _TOKENS) -> list[Row]:
    """Whether two ranks answer as one device."""
    asked = prompts(_PROMPTS, 300)
    one, two = (ask(_spec(folder, dtype, device, size), asked, tokens, page_tokens=16) for size in (1, 2))
    found = agreement(one, two)
    tolerance = _EXACT_NATS if dtype == "float32" else _HALF_NATS
    return [promise(f"two ranks against one, {dtype}", found.within(tolerance, tokens // 2), str(found))]


def lost(folder: Path, device: str = "auto") -> list[Row]:
    """Whether a killed rank ends the worker with its name, within a step."""
    backend, model = _loaded(_spec(folder, "float32", device, 2))
    (pid,) = model.rank_pids
    try:
        backend.submit(BackendRequest(id="a", prompt_ids=[3, 4], params=SamplingParams(temperature=0)))
        backend.step()
        os.kill(pid, signal.SIGKILL)
        try:
            for _ in range(_STEPS):
                backend.step()
        except WorkerFailed as error:
            return [promise("a killed rank ends the worker", "SIGKILL" in error.message, error.message)]
        return [promise("a killed rank ends the worker", False, f"{_STEPS} steps went on")]
    finally:
        backend.unload()


def timed(folder: Path) -> list[Row]:
    """Milliseconds of a decode of one request, on one GPU, where it is a CUDA graph, and over two."""
    rows = []
    for size in (1, 2):
        backend, _ = _loaded(_spec(folder, "bfloat16", "auto", size))
        try:
            backend.submit(BackendRequest(id="a", prompt_ids=[3, 4], params=SamplingParams(temperature=0)))
            took_s = []
            for _ in range(_STEPS):
                began_s = time.perf_counter()
                backend.step()
                took_s.append(time.perf_counter() - began_s)
        finally:
            backend.unload()
        rows.append(measured(f"a decode with {size} ranks", statistics.median(took_s[_STEPS // 2 :]) * 1e3, "ms"))
    return rows


def _spec(folder: Path, dtype: DtypeName, device: str, size: int) -> ModelSpec:
    device = "cuda:0" if device == "auto" and size == 1 else device
    return ModelSpec(
        path=folder, name="model", device=device, dtype=dtype, kv_cache_tokens=8192, tensor_parallel_size=size
    )


def _loaded(spec: ModelSpec) -> tuple[TorchBackend, LoadedModel]:
    backend = TorchBackend()
    model = backend.load(
        spec,
        max_prompts=4,
        step_tokens=512,
        page_tokens=16,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend, model
