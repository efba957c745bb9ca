"""Driving a backend as the worker loop does, whichever backend it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engine.backends.base import Backend, BackendRequest, BackendStats, LoadedModel, LoadProgress, TokenEvent
from engine.config import ModelSpec, SamplingParams

TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, seed=0)
SEEDED = SamplingParams(seed=11, temperature=1.2, top_p=0.95, repetition_penalty=1.1, max_tokens=TOKENS)
COUNTERS = (
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "prompt_tokens_computed",
    "preemptions",
    "steps",
    "draft_tokens",
    "draft_accepted",
)


@dataclass(frozen=True)
class Subject:
    """A backend under test.

    create: a new one, with nothing loaded.  spec: what to load.  fail_next_step: the next step raises this inside.
    """

    create: Callable[[], Backend]
    spec: ModelSpec
    fail_next_step: Callable[[Exception], None]

    def load(
        self,
        backend: Backend,
        *,
        max_prompts: int = 8,
        report: Callable[[LoadProgress], None] = lambda progress: None,
        cancelled: Callable[[], bool] = lambda: False,
        **spec: object,
    ) -> LoadedModel:
        """Load the spec, with these fields of it replaced."""
        return backend.load(
            msgspec.structs.replace(self.spec, **spec),
            max_prompts=max_prompts,
            step_tokens=64,
            page_tokens=8,
            report=report,
            cancelled=cancelled,
        )

    def loaded(self, *, max_prompts: int = 8, **spec: object) -> Backend:
        """A new backend that holds the model."""
        backend = self.create()
        self.load(backend, max_prompts=max_prompts, **spec)
        return backend

    def alone(self, request: BackendRequest) -> list[int]:
        """The answer of a new backend that does nothing else."""
        return Drive(self.loaded(), request).to_end()[request.id]


def prompt(salt: int, length: int = 20) -> list[int]:
    """Tokens that every model here has."""
    return [(17 * position + 31 * salt) % 250 + 3 for position in range(length)]


def ask(name: str, tokens: list[int], params: SamplingParams = GREEDY, **fields: object) -> BackendRequest:
    """A request."""
    return BackendRequest(id=name, prompt_ids=tokens, params=params, **fields)  # type: ignore[arg-type]


def params(**fields: object) -> SamplingParams:
    """Greedy ones, with these fields replaced."""
    return msgspec.structs.replace(GREEDY, **fields)


class Drive:
    """Keeps what a backend says of each request, ends them at max_tokens, and checks everything after every step."""

    def __init__(self, backend: Backend, *requests: BackendRequest) -> None:
        self.backend = backend
        self.tokens: dict[str, list[int]] = {}
        self.events: dict[str, list[TokenEvent]] = {}
        self.finish: dict[str, str] = {}
        self._limits: dict[str, int] = {}
        self._stats = backend.stats()
        for request in requests:
            self.add(request)

    def add(self, request: BackendRequest) -> None:
        """Submit a request."""
        self.backend.submit(request)
        self.tokens[request.id] = list(request.generated)
        self.events[request.id] = []
        self._limits[request.id] = request.params.max_tokens or TOKENS

    def cancel(self, name: str) -> None:
        """Cancel a request as its client would."""
        self.backend.cancel(name)
        self._limits.pop(name, None)
        self.check()

    def step(self) -> Sequence[TokenEvent]:
        """One step. Tokens past a request's end are dropped, as the loop drops them."""
        events = self.backend.step()
        for event in events:
            if event.request_id not in self._limits:
                continue
            self._take(event)
        self.check()
        return events

    def to_end(self) -> dict[str, list[int]]:
        """Steps until nothing is left; the tokens of each answer, and every page free."""
        for _ in range(5000):
            if not self.backend.has_work():
                stats = self.backend.stats()
                assert stats.pages_free == stats.pages_total > 0
                assert not self._limits
                return self.tokens
            self.step()
        raise AssertionError("the backend did not come to an end")

    def until(self, condition: Callable[[BackendStats], bool]) -> BackendStats:
        """Steps until the stats are as wanted."""
        for _ in range(5000):
            if condition(self.backend.stats()):
                return self.backend.stats()
            self.step()
        raise AssertionError("the backend never came to it")

    def check(self) -> None:
        """The accounts, counters that only grow, and gauges that add up."""
        self.backend.check()
        before, self._stats = self._stats, self.backend.stats()
        for counter in COUNTERS:
            assert getattr(self._stats, counter) >= getattr(before, counter), counter
        live = self._stats.waiting + self._stats.prefilling + self._stats.decoding
        assert live == len(self._stats.sequences) == len(self._limits)
        assert {sequence.request_id for sequence in self._stats.sequences} == self._limits.keys()
        assert all(
            0 <= each.cached_tokens <= each.computed_tokens <= each.known_tokens for each in self._stats.sequences
        )

    def _take(self, event: TokenEvent) -> None:
        name = event.request_id
        self.events[name].append(event)
        if event.token_id is not None:
            self.tokens[name].append(event.token_id)
        if event.finish is not None:
            self.finish[name] = event.finish
            del self._limits[name]
        elif len(self.tokens[name]) == self._limits[name]:
            self.backend.cancel(name)
            del self._limits[name]
