"""Backends that plan ahead and backends that wait, driven as a worker does, and whether they answer alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from engine.backends.base import BackendRequest, TokenEvent, TokenMask
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec, SamplingParams
from tests.fakes import queued

GREEDY = SamplingParams(temperature=0, max_tokens=14)
SEEDED = SamplingParams(temperature=0.9, seed=4, logprobs=2, max_tokens=14)


@dataclass(frozen=True)
class Asked:
    """A request. after: whose tokens, and how many, it waits for.  stops: tokens that end it.  leaves: how many of its
    own it is cancelled behind.  says: tokens that its prompt goes on with."""

    salt: int
    params: SamplingParams = GREEDY
    prompt_tokens: int = 12
    after: tuple[str, int] | None = None
    stops: frozenset[int] = frozenset()
    leaves: int | None = None
    says: Sequence[int] = ()
    mask: Callable[[], TokenMask] | None = None

    def request(self, name: str) -> BackendRequest:
        prompt = [3 + (7 * at + 31 * self.salt) % 211 for at in range(self.prompt_tokens)]
        return BackendRequest(id=name, prompt_ids=[*prompt, *self.says], params=self.params)

    def ends(self, events: list[TokenEvent]) -> bool:
        """Why an output processor would end it."""
        tokens = [event.token_id for event in events if event.token_id is not None]
        most = min(self.params.max_tokens or 9999, self.leaves or 9999)
        return len(tokens) >= most or not self.stops.isdisjoint(tokens)


def load(folder: Path, runner: type[ModelRunner] = ModelRunner, *, kv_tokens: int = 1024, **spec: Any) -> TorchBackend:
    backend = TorchBackend(runner)
    backend.load(
        ModelSpec(path=folder, name="tiny", dtype="float32", kv_cache_tokens=kv_tokens, **spec),
        max_prompts=6,
        step_tokens=32,
        page_tokens=8,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def answers(backend: TorchBackend, asked: Mapping[str, Asked]) -> dict[str, list[TokenEvent]]:
    """What each is answered, as a worker drives a backend; the accounts are proved after every step."""
    found: dict[str, list[TokenEvent]] = {name: [] for name in asked}
    waiting = dict(asked)
    while waiting or backend.has_work():
        for name, each in list(waiting.items()):
            if each.after is None or len(found[each.after[0]]) >= each.after[1]:
                backend.submit(each.request(name), each.mask() if each.mask is not None else None)
                del waiting[name]
        for event in backend.step():
            events = found[event.request_id]
            if not asked[event.request_id].ends(events):
                events.append(event)
                if event.finish is None and asked[event.request_id].ends(events):
                    backend.cancel(event.request_id)
        backend.check()
    stats = backend.stats()
    assert stats.pages_free == stats.pages_total
    return found


def plainly(folder: Path, asked: Mapping[str, Asked], **spec: Any) -> dict[str, list[TokenEvent]]:
    """The answers where every step is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        queued.over_pages(patch)
        return answers(load(folder, **spec), asked)


def ahead(folder: Path, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> tuple[TorchBackend, queued.Queue]:
    """A backend that plans ahead. Its queue forgets what loading did."""
    runner, queue = queued.use(monkeypatch)
    backend = load(folder, runner, **spec)
    queued.guard(backend, runner)
    queue.log.clear()
    queue.waits = 0
    return backend, queue


def same(found: Mapping[str, list[TokenEvent]], expected: Mapping[str, list[TokenEvent]]) -> None:
    assert {name: [event.token_id for event in each] for name, each in found.items()} == {
        name: [event.token_id for event in each] for name, each in expected.items()
    }
    assert {name: each[-1].finish for name, each in found.items()} == {
        name: each[-1].finish for name, each in expected.items()
    }
    for ours, theirs in zip(chain(*found.values()), chain(*expected.values()), strict=True):
        assert (ours.logprob is None) == (theirs.logprob is None)
        if ours.logprob is not None and theirs.logprob is not None:
            assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-4)
            assert [token for token, _ in ours.logprob.top] == [token for token, _ in theirs.logprob.top]
