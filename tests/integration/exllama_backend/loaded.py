"""The backends over the ExLlama libraries, loaded and asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.base import BackendRequest
from engine.backends.exllama.generator_backend import GeneratorBackend
from engine.config import ModelSpec
from tests.contract.driving import Drive
from tests.fakes.exllama import FakeExllama
from tests.fakes.exllama3 import RealExllama3


def load(fakes: FakeExllama | RealExllama3, *, max_prompts: int = 8, **spec: object) -> GeneratorBackend:
    backend = fakes.backend()
    backend.load(
        ModelSpec(path=Path("model"), name="fake", **spec),  # type: ignore[arg-type]
        max_prompts=max_prompts,
        step_tokens=64,
        page_tokens=8,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


Make = Callable[..., FakeExllama | RealExllama3]


def answer(fakes: FakeExllama | RealExllama3, request: BackendRequest) -> list[int]:
    return Drive(load(fakes), request).to_end()[request.id]


def flat(*likely: tuple[int, float]) -> Callable[[Sequence[int], int], Tensor]:
    """A model that gives these tokens these probabilities, always."""

    def logits(ids: Sequence[int], vocab_size: int) -> Tensor:
        row = torch.full((vocab_size,), -60.0)
        for token_id, probability in likely:
            row[token_id] = math.log(probability)
        return row

    return logits
