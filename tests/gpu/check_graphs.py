"""Decodes that are recorded against the same ones launched kernel by kernel; and guesses of a draft model on CUDA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.base import BackendRequest
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec, SamplingParams
from tests.gpu.models import TINY, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise

TOLERANCE = 6e-2
"""Largest difference of a logit in float16: kernels of another size of batch may sum in another order."""

_PAGE_TOKENS = 16
_PROMPT_TOKENS, _STEPS = 40, 24
_TOKENS = 128


def checks(place: Place) -> Iterable[Row]:
    """Rows for each number of sequences, then for a draft model."""
    folder = plain_model(place, TINY, "float16")
    for sequences in (1, 3, 8, 21):
        yield from attempt(f"{sequences} sequences", partial(recorded, folder, "cuda:0", sequences))
    yield from attempt("draft model", partial(guessed, plain_model(place, TINY, "float32"), "cuda:0"))


def recorded(folder: Path, device: str, sequences: int) -> list[Row]:
    """Whether so many sequences' decodes are recorded, give the same logits, and how long they take."""
    spec = ModelSpec(path=folder, name="tiny", device=device, dtype="float16")
    runner = ModelRunner.load(folder, spec, report=lambda progress: None, cancelled=lambda: False)
    try:
        each = -(-(_PROMPT_TOKENS + _STEPS) // _PAGE_TOKENS)
        runner.allocate_kv(sequences * each, _PAGE_TOKENS, report=lambda progress: None)
        plain, plain_s = _decode(runner, sequences, each)
        runner.record_decodes(sequences)
        if missing := _unrecorded(runner, sequences):
            detail = f"no recording of {', '.join(map(str, missing))} sequences; attention: {runner.attention.reason}"
            return [promise(f"{sequences} sequences are recorded", False, detail)]
        again, again_s = _decode(runner, sequences, each)
    finally:
        runner.unload()
    worst = max(float((one - other).abs().max()) for one, other in zip(plain, again, strict=True))
    return [
        promise(f"{sequences} sequences: logits", worst <= TOLERANCE, f"largest difference, at most {TOLERANCE:g}"),
        measured(f"{sequences} sequences: launched", plain_s * 1e3, "ms a step"),
        measured(f"{sequences} sequences: recorded", again_s * 1e3, "ms a step"),
    ]


def _unrecorded(runner: ModelRunner, sequences: int) -> list[int]:
    """The sizes of decodes, up to so many sequences, that there is no recording of."""
    graphs = runner._graphs
    if graphs is None:
        return [sequences]
    return sorted(set(graphs.buckets.batches) - {bucket.batch for bucket in graphs.recorded_buckets})


def _decode(runner: ModelRunner, sequences: int, each: int) -> tuple[list[Tensor], float]:
    """Logits of some steps that feed fixed tokens, and the median seconds of one."""
    pages = [list(range(number * each, (number + 1) * each)) for number in range(sequences)]
    prompts = [[(7 * at + 13 * number) % 300 + 3 for at in range(_PROMPT_TOKENS)] for number in range(sequences)]
    runner.forward([ChunkInput(ids, 0, own, sample=True) for ids, own in zip(prompts, pages, strict=True)])
    found, took_s = [], []
    for step in range(_STEPS):
        began_s = time.perf_counter()
        chunks = [ChunkInput([5 + step], _PROMPT_TOKENS + step, own, sample=True) for own in pages]
        found.append(runner.forward(chunks).cpu().clone())
        took_s.append(time.perf_counter() - began_s)
    return found, statistics.median(took_s)


def guessed(folder: Path, device: str) -> list[Row]:
    """Whether greedy answers are the same with a draft model, the model itself, and how many guesses held."""
    torch.backends.cuda.matmul.allow_tf32 = False
    plain, guessing = (_answers(folder, device, draft) for draft in (None, folder))
    stats = guessing[1]
    return [
        promise("draft model: greedy tokens in float32", plain[0] == guessing[0]),
        promise("draft model: it guessed", stats[0] > 0),
        measured("draft model: guesses that held", stats[1] / max(1, stats[0]), "of each"),
    ]


def _answers(folder: Path, device: str, draft: Path | None) -> tuple[list[Sequence[int]], tuple[int, int]]:
    backend = TorchBackend()
    spec = ModelSpec(path=folder, name="tiny", device=device, dtype="float32", kv_cache_tokens=4096, draft_model=draft)
    backend.load(
        spec,
        max_prompts=16,
        step_tokens=512,
        page_tokens=_PAGE_TOKENS,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    try:
        found: dict[str, list[int]] = {}
        for number in range(3):
            prompt = [(7 * at + 13 * number) % 300 + 3 for at in range(_PROMPT_TOKENS)]
            params = SamplingParams(temperature=0, max_tokens=_TOKENS)
            backend.submit(BackendRequest(id=str(number), prompt_ids=prompt, params=params))
            found[str(number)] = []
        while backend.has_work():
            for event in backend.step():
                if event.token_id is not None:
                    found[event.request_id].append(event.token_id)
                if len(found[event.request_id]) >= _TOKENS:
                    backend.cancel(event.request_id)
        stats = backend.stats()
        return [found[name][:_TOKENS] for name in sorted(found)], (stats.draft_tokens, stats.draft_accepted)
    finally:
        backend.unload()
