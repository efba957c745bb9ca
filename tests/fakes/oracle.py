"""transformers as the oracle for our own model, and the shortest way to run ours: no scheduler, one page table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec

PAGE_TOKENS = 8
NUM_PAGES = 256


def ignore_progress(progress: LoadProgress) -> None:
    """A `report` for loads whose progress is not looked at."""


def never() -> bool:
    """A `cancelled` for loads that run through."""
    return False


def load_runner(folder: Path, **spec: Any) -> ModelRunner:
    """Our runner on the CPU in float32 (unless `spec` says otherwise), with pages for short prompts."""
    settings = ModelSpec(**{"path": folder, "name": "tiny", "dtype": "float32", "device": "cpu"} | spec)
    runner = ModelRunner.load(folder, settings, report=ignore_progress, cancelled=never)
    runner.allocate_kv(NUM_PAGES, PAGE_TOKENS, report=ignore_progress)
    return runner


@dataclass
class Running:
    """One sequence under way in a runner: its tokens, how many are computed, and its pages."""

    tokens: list[int]
    pages: list[int]
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    adapter: str = ""

    def chunk(self, length: int | None = None) -> ChunkInput:
        """The next `length` known tokens (all that are left, if None); the last one's logits are wanted."""
        end = len(self.tokens) if length is None else self.computed + length
        tokens = self.tokens[self.computed : end]
        return ChunkInput(tokens, self.computed, self.pages, sample=True, adapter=self.adapter)


class Driver:
    """Feeds sequences to a runner in whatever chunks a test wants. Pages are dealt out of order on purpose."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._free = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(5)).tolist()

    def add(self, prompt: Sequence[int], *, room: int = 64, adapter: str = "") -> Running:
        """A sequence of `prompt` with pages for `room` further tokens, under an adapter that is attached."""
        count = -(-(len(prompt) + room) // PAGE_TOKENS)
        pages = [self._free.pop() for _ in range(count)]
        found = self._runner.adapters.find(adapter)
        return Running(list(prompt), pages, adapter=found.key if found is not None else "")

    def feed(self, *parts: tuple[Running, int | None]) -> Tensor:
        """One step over (sequence, tokens to feed); returns logits [parts, vocab] and keeps each row."""
        chunks = [sequence.chunk(length) for sequence, length in parts]
        logits = self._runner.forward(chunks)
        for (sequence, _), chunk, row in zip(parts, chunks, logits, strict=True):
            sequence.computed = chunk.end
            sequence.logits.append(row)
        return logits

    def greedy(self, sequences: Sequence[Running], steps: int) -> None:
        """Decode `steps` tokens for all at once; prompts must be known but need not be computed yet."""
        for _ in range(steps):
            logits = self.feed(*((sequence, None) for sequence in sequences))
            for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
                sequence.tokens.append(token)


def reference_logits(folder: Path, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' logits [len(ids), vocab] for one sequence, in float32 with eager attention unless told."""
    model = _reference(folder, dtype)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0].float()
    return logits


def reference_greedy(folder: Path, prompt: Sequence[int], steps: int) -> list[int]:
    """prompt + `steps` greedy tokens by transformers, end tokens ignored."""
    model = _reference(folder, torch.float32)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    ids: list[int] = out[0].tolist()
    return ids


def _reference(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    multimodal = hasattr(AutoConfig.from_pretrained(folder), "text_config")
    kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
