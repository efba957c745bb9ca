"""Backends that guess ahead, and what they answer: for tests of guesses from a text and from a draft model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.backends.base import BackendRequest, TokenEvent
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.speculation.speculation import Speculation
from engine.backends.torch.speculation.step_time import StepTime
from engine.config import ModelSpec, SamplingParams


class SteadyTime(StepTime):
    """Steps that take the same time however many rows they have."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._each_s = seconds

    has_samples = True  # type: ignore[assignment]
    row_s = 0.0  # type: ignore[assignment]

    def seconds(self, rows: int) -> float:
        """The same."""
        return self._each_s

    def break_even_probability(self, rows: int, tokens: float) -> float:
        """Every draft pays."""
        return 0.0


def eager(backend: TorchBackend, *, most: int | None = None, lookup: bool = False) -> TorchBackend:
    """Have a loaded backend guess wherever it can, as if that cost nothing: how fast the machine is decides nothing."""
    backend._speculation = Speculation(
        ngram=lookup,
        draft=backend._draft,
        max_drafts=most,
        time=SteadyTime(1.0),
        passes=SteadyTime(0.0),
        clock=lambda: 0.0,
    )
    return backend


def load(
    folder: Path, *, kv_tokens: int = 4096, max_prompts: int = 16, page_tokens: int = 8, **changes: Any
) -> TorchBackend:
    """A tiny model, with steps of 128 tokens."""
    backend = TorchBackend()
    spec = ModelSpec(path=folder, name="tiny", dtype="float32", kv_cache_tokens=kv_tokens, **changes)
    backend.load(
        spec,
        max_prompts=max_prompts,
        step_tokens=128,
        page_tokens=page_tokens,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def answers(
    backend: TorchBackend, prompts: Mapping[str, Sequence[int]], params: Mapping[str, SamplingParams], limit: int
) -> dict[str, list[TokenEvent]]:
    """What each prompt is answered, checked after every step."""
    found: dict[str, list[TokenEvent]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        backend.submit(BackendRequest(id=name, prompt_ids=prompt, params=params[name]))
    while backend.has_work():
        for event in backend.step():
            if len(found[event.request_id]) < limit:
                found[event.request_id].append(event)
        backend.check()
        for name, events in found.items():
            if len(events) >= limit:
                backend.cancel(name)
    return found


def ids(events: Mapping[str, Sequence[TokenEvent]]) -> dict[str, list[int | None]]:
    """The tokens alone."""
    return {name: [event.token_id for event in each] for name, each in events.items()}
