"""KV pages of a GPU in host memory and on disk: the same answers after a reload, and what restoring saves and costs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec
import torch

from engine.backends.base import BackendRequest
from engine.backends.torch.backend import TorchBackend
from engine.config import DtypeName, ModelSpec, SamplingParams
from tests.gpu.models import BILLION, TINY, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise

_PROMPT_TOKENS, _TOKENS, _ROUNDS = 200, 48, 3
_LONG_TOKENS = 4096


def checks(place: Place) -> Iterable[Row]:
    """The answers of a small model in float32; the milliseconds of a prompt for one of about 1B parameters."""
    torch.backends.cuda.matmul.allow_tf32 = False
    yield from attempt("answers", partial(alike, plain_model(place, TINY, "float32"), "cuda:0"))
    yield from attempt("a long prompt", partial(timed, place))


def alike(folder: Path, device: str, tokens: int = _TOKENS) -> list[Row]:
    """Whether answers are the same when the pages of their prompts come from a tier, all but the last page of each."""
    with tempfile.TemporaryDirectory() as tier:
        spec = _spec(folder, device, "float32", Path(tier))
        computed, _ = _answers(spec, tokens)
        restored, pages = _answers(spec, tokens)
    due = 4 * ((_PROMPT_TOKENS - 1) // 16)
    return [
        promise("pages are restored", pages == due, f"{pages} of {due}"),
        promise("the same tokens as computed", restored == computed),
    ]


def timed(place: Place) -> list[Row]:
    """The milliseconds to the first token of a prompt: without tiers, with one that is written, and read back."""
    with tempfile.TemporaryDirectory() as tier:
        spec = _spec(plain_model(place, BILLION, "bfloat16"), "cuda:0", "bfloat16", Path(tier))
        plain = msgspec.structs.replace(spec, kv_disk_gib=0.0, kv_dir=None)
        without_s, _ = _first_token_s(plain)
        written_s, _ = _first_token_s(spec)
        restored_s, pages = _first_token_s(spec)
    return [
        measured(f"{_LONG_TOKENS} tokens: without tiers", without_s * 1e3, "ms"),
        measured(f"{_LONG_TOKENS} tokens: computed, and copied to a tier", written_s * 1e3, "ms"),
        measured(f"{_LONG_TOKENS} tokens: read back from a tier", restored_s * 1e3, "ms", f"{pages} pages"),
    ]


def _spec(folder: Path, device: str, dtype: DtypeName, tier: Path) -> ModelSpec:
    return ModelSpec(
        path=folder,
        name="model",
        device=device,
        dtype=dtype,
        kv_cache_tokens=4 * (_LONG_TOKENS if dtype == "bfloat16" else 512),
        kv_disk_gib=8.0,
        kv_dir=tier,
        prefix_salt=b"checked",
    )


def _loaded(spec: ModelSpec) -> TorchBackend:
    backend = TorchBackend()
    backend.load(
        spec,
        max_prompts=4,
        step_tokens=2048,
        page_tokens=16,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def _answers(spec: ModelSpec, tokens: int) -> tuple[dict[str, list[int]], int]:
    """What four requests are answered, every second one by a seed, and how many of their pages were restored."""
    backend = _loaded(spec)
    found: dict[str, list[int]] = {}
    try:
        for number in range(4):
            prompt = [(7 * at + 13 * number) % 300 + 3 for at in range(_PROMPT_TOKENS)]
            params = SamplingParams(temperature=number % 2, seed=number, max_tokens=tokens)
            backend.submit(BackendRequest(id=str(number), prompt_ids=prompt, params=params))
            found[str(number)] = []
        while backend.has_work():
            for event in backend.step():
                if event.token_id is not None:
                    found[event.request_id].append(event.token_id)
                if len(found[event.request_id]) == tokens:
                    backend.cancel(event.request_id)
        return found, backend.stats().restored_tokens // 16
    finally:
        backend.unload()


def _first_token_s(spec: ModelSpec) -> tuple[float, int]:
    """The median seconds to the first token of prompts that share no page, and the pages restored of all of them."""
    backend = _loaded(spec)
    took_s = []
    try:
        for salt in range(_ROUNDS):
            prompt = [(7 * at + 13 * salt) % 300 + 3 for at in range(_LONG_TOKENS)]
            began_s = time.perf_counter()
            backend.submit(BackendRequest(id="a", prompt_ids=prompt, params=SamplingParams(temperature=0)))
            while not any(event.token_id is not None for event in backend.step()):
                pass
            took_s.append(time.perf_counter() - began_s)
            backend.cancel("a")
        return statistics.median(took_s), backend.stats().restored_tokens // 16
    finally:
        backend.unload()
