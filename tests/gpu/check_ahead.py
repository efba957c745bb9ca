"""Steps planned while the one before runs against steps that are waited for: the same answers, and what each takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from msgspec import structs

from engine.backends.base import BackendRequest
from engine.backends.torch.backend import TorchBackend
from engine.config import DtypeName, ModelSpec, SamplingParams
from tests.gpu.models import BILLION, TINY, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise

_PROMPT_TOKENS, _TOKENS, _ROUNDS = 40, 96, 3
_PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=2.0, min_p=0.001),  # which leaves more than the best few hundred tokens
)


def checks(place: Place) -> Iterable[Row]:
    """The answers of a small model in float32; the milliseconds of one of about 1B parameters in bfloat16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    yield from attempt("answers", partial(alike, plain_model(place, TINY, "float32"), "cuda:0"))
    for sequences in (1, 32):
        yield from attempt(f"{sequences} sequences", partial(timed, place, sequences))


def alike(folder: Path, device: str, tokens: int = _TOKENS, dtype: DtypeName = "float32") -> list[Row]:
    """Whether greedy and seeded answers are the same, and steps were planned ahead at all."""
    backend = _loaded(folder, device, dtype, 8)
    try:
        planned = backend._runner is not None and backend._runner.readback is not None
        ahead, waiting = (_answers(backend, 8, tokens, ahead=each)[0] for each in (True, False))
    finally:
        backend.unload()
    return [promise("steps are planned ahead", planned), promise("the same tokens as without", ahead == waiting)]


def timed(place: Place, sequences: int) -> list[Row]:
    """The median step of so many sequences, both ways by turns."""
    backend = _loaded(plain_model(place, BILLION, "bfloat16"), "cuda:0", "bfloat16", sequences)
    try:
        _answers(backend, sequences, _TOKENS, ahead=True)
        took_s: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(_ROUNDS):
            for ahead, each in took_s.items():
                each.append(_answers(backend, sequences, _TOKENS, ahead=ahead)[1])
    finally:
        backend.unload()
    ahead_s, waiting_s = (statistics.median(each) for each in took_s.values())
    return [
        measured(f"{sequences} sequences: waited for", waiting_s * 1e3, "ms a step"),
        measured(f"{sequences} sequences: planned ahead", ahead_s * 1e3, "ms a step"),
    ]


def _loaded(folder: Path, device: str, dtype: DtypeName, sequences: int) -> TorchBackend:
    backend = TorchBackend()
    backend.load(
        ModelSpec(path=folder, name="model", device=device, dtype=dtype, kv_cache_tokens=sequences * 256),
        max_prompts=sequences,
        step_tokens=2048,
        page_tokens=16,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def _answers(backend: TorchBackend, sequences: int, tokens: int, *, ahead: bool) -> tuple[dict[str, list[int]], float]:
    """What so many requests are answered, by `_PARAMS` in turn, and the median seconds from one step's tokens to the
    next one's."""
    runner = backend._runner
    assert runner is not None
    readback = runner.readback
    runner.readback = readback if ahead else None
    found: dict[str, list[int]] = {}
    took_s = []
    try:
        for number in range(sequences):
            prompt = [(7 * at + 13 * number) % 300 + 3 for at in range(_PROMPT_TOKENS)]
            params = structs.replace(_PARAMS[number % len(_PARAMS)], seed=number, max_tokens=tokens)
            backend.submit(BackendRequest(id=str(number), prompt_ids=prompt, params=params))
            found[str(number)] = []
        while backend.has_work():
            began_s = time.perf_counter()
            for event in backend.step():
                if event.token_id is not None:
                    found[event.request_id].append(event.token_id)
                if len(found[event.request_id]) == tokens:
                    backend.cancel(event.request_id)
            took_s.append(time.perf_counter() - began_s)
    finally:
        runner.readback = readback
    return found, statistics.median(took_s)
