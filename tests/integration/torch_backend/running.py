"""The torch backend with a tiny model, loaded, asked and run to the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.backends.base import BackendRequest, LoadedModel, LoadProgress, TokenEvent
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.runner import ModelRunner
from engine.config import CacheBits, ModelSpec, SamplingParams

TOKENS = 24
GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=11, temperature=1.2, top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1)
PARAMS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])


def load(
    path: Path,
    *,
    kv_tokens: int = 2048,
    max_prompts: int = 8,
    step_tokens: int = 256,
    page_tokens: int = 8,
    max_input_len: int | None = None,
    cache_bits: CacheBits = 16,
    runner_type: type[ModelRunner] = ModelRunner,
) -> TorchBackend:
    backend = TorchBackend(runner_type)
    spec = ModelSpec(
        path=path,
        name="tiny",
        dtype="float32",
        kv_cache_tokens=kv_tokens,
        max_input_len=max_input_len,
        cache_bits=cache_bits,
    )
    load_spec(backend, spec, max_prompts=max_prompts, step_tokens=step_tokens, page_tokens=page_tokens)
    return backend


def load_spec(
    backend: TorchBackend,
    spec: ModelSpec,
    *,
    max_prompts: int = 4,
    step_tokens: int = 64,
    page_tokens: int = 8,
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> LoadedModel:
    return backend.load(
        spec,
        max_prompts=max_prompts,
        step_tokens=step_tokens,
        page_tokens=page_tokens,
        report=report,
        cancelled=cancelled,
    )


def prompt(salt: int, length: int = 20) -> list[int]:
    return [(17 * position + 31 * salt) % 300 + 3 for position in range(length)]


def ask(name: str, tokens: list[int], params: SamplingParams = GREEDY, generated: Sequence[int] = ()) -> BackendRequest:
    return BackendRequest(id=name, prompt_ids=tokens, params=params, generated=list(generated))


class Run:
    """Drives a backend as the worker loop does: keeps tokens, ends requests at `limit`, checks after every step."""

    def __init__(self, backend: TorchBackend, *requests: BackendRequest, limit: int = TOKENS) -> None:
        self.backend = backend
        self.limit = limit
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.message: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        for request in requests:
            self.add(request)

    def add(self, request: BackendRequest) -> None:
        self.backend.submit(request)
        self.tokens[request.id] = list(request.generated)

    def step(self) -> Sequence[TokenEvent]:
        events = self.backend.step()
        self.backend.check()
        for event in events:
            assert event.request_id not in self.finish
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
            if event.cached_tokens is not None:
                assert event.request_id not in self.cached
                self.cached[event.request_id] = event.cached_tokens
            if event.finish is not None:
                self.finish[event.request_id], self.message[event.request_id] = event.finish, event.message
            elif len(self.tokens[event.request_id]) == self.limit:
                self.backend.cancel(event.request_id)
        return events

    def to_end(self) -> dict[str, list[int]]:
        for _ in range(5000):
            if not self.backend.has_work():
                assert self.backend.stats().pages_free == self.backend.stats().pages_total
                return self.tokens
            self.step()
        raise AssertionError("the backend did not come to an end")


def alone(path: Path, request: BackendRequest) -> list[int]:
    return Run(load(path), request).to_end()[request.id]
