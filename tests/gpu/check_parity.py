"""The torch backend on CUDA against itself on the CPU: logits of a mixed batch, in each dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.runner import ModelRunner
from engine.config import DtypeName, ModelSpec
from tests.gpu.answers import prompts
from tests.gpu.models import TINY, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, promise

TOLERANCES: dict[DtypeName, float] = {"float32": 1e-3, "float16": 6e-2, "bfloat16": 4e-1}
"""Largest difference of a logit from the CPU's in float32, of logits whose deviation is 1.5. The CPU's own
half precisions are off by half of these; a wrong mask or position is off by more than 1."""

_PAGE_TOKENS = 16
_LENGTHS = (1, 17, 200, 257)


def checks(place: Place) -> Iterable[Row]:
    """A row for each dtype; matrix products in full float32 for that one."""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = plain_model(place, TINY, "float32")
    reference = list(logits(folder, "cpu", "float32"))
    for dtype in TOLERANCES:
        yield from attempt(dtype, partial(_check, folder, dtype, reference))


def _check(folder: Path, dtype: DtypeName, reference: Sequence[Tensor]) -> list[Row]:
    return [row(dtype, reference, list(logits(folder, "cuda:0", dtype)))]


def logits(folder: Path, device: str, dtype: DtypeName) -> Iterator[Tensor]:
    """float32 logits on the CPU of one batch of prompts, then of two steps that go on with a fixed token each."""
    spec = ModelSpec(path=folder, name="tiny", device=device, dtype=dtype)
    runner = ModelRunner.load(folder, spec, report=lambda progress: None, cancelled=lambda: False)
    try:
        known = [list(ids[:length]) for ids, length in zip(prompts(8, TINY.vocab)[-4:], _LENGTHS, strict=True)]
        pages = _pages(known)
        runner.allocate_kv(sum(map(len, pages)), _PAGE_TOKENS, report=lambda progress: None)
        computed = [0] * len(known)
        for step in range(3):
            chunks = [
                ChunkInput(ids[done:], done, own, sample=True)
                for ids, done, own in zip(known, computed, pages, strict=True)
            ]
            yield runner.forward(chunks).float().cpu()
            computed = [len(ids) for ids in known]
            for number, ids in enumerate(known):
                ids.append(5 + 7 * number + step)
    finally:
        runner.unload()


def _pages(known: Sequence[Sequence[int]]) -> list[list[int]]:
    """Pages for each sequence and two more tokens, those of different sequences interleaved."""
    needed = [(len(ids) + 2) // _PAGE_TOKENS + 1 for ids in known]
    pages: list[list[int]] = [[] for _ in known]
    number = 0
    for round_ in range(max(needed)):
        for own, need in zip(pages, needed, strict=True):
            if round_ < need:
                own.append(number)
                number += 1
    return pages


def row(dtype: DtypeName, expected: Sequence[Tensor], got: Sequence[Tensor]) -> Row:
    """Whether every logit is within the tolerance of `dtype`."""
    tolerance = TOLERANCES[dtype]
    worst = max((float((a - b).abs().max()) for a, b in zip(expected, got, strict=True)), default=float("inf"))
    spread = float(torch.stack([one.std() for one in expected]).mean())
    return promise(
        f"logits in {dtype}",
        worst <= tolerance,
        f"largest difference, at most {tolerance:g}; the logits' deviation is {spread:.2f}",
        value=worst,
        unit="",
    )
