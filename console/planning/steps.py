"""Measures steps of a backend, as the loop of a worker does them. See console.planning.meter for the process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping

import msgspec

from console.bench.plan import Plan
from engine.backends.base import BackendRequest, SequenceStats
from engine.config import SamplingParams
from engine.simulation.step_costs import StepSample, StepShape
from engine.worker.factory import create_backend
from engine.worker.loading import Replica, load_replica
from engine.worker.outbox import Outbox
from engine.worker.protocol import Codec, Load, StepBatch
from engine.worker.requests import Requests

_DECODE_STEPS = 6
_BETWEEN_STEPS = 2
"""Of answers alone, before a piece of a prompt: as under load, where a prompt comes in the midst of answers."""
_PIECES = (8, 32, 64, 128, 192, 384)
_PREFILLS = (96, 512, 1536)


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: answers at once up to max_prompts, contexts up to longest_tokens, steps of step_tokens."""

    max_prompts: int
    step_tokens: int
    page_tokens: int
    longest_tokens: int

    def points(self) -> Iterator[tuple[int, int]]:
        """How many answers go on at once, and with how much context: cheap points first."""
        rows, most = [], 1
        while most < self.max_prompts:
            rows.append(most)
            most *= 2
        contexts = [each for each in _PREFILLS if each <= self.longest_tokens // 2] or [self.longest_tokens // 2]
        yield from ((count, tokens) for tokens in contexts for count in (*rows, self.max_prompts))

    @property
    def kv_tokens(self) -> int:
        """KV pages that the largest point takes, pieces and answers included."""
        context = max(tokens for _, tokens in self.points())
        return (self.max_prompts + 2) * (context + self.step_tokens + 4 * self.page_tokens)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The child's first line."""

    device: str
    dtype: str
    max_model_len: int


class StepMeter:
    """Steps a worker through the points of a design, and notes what each step computed and took.

    A step counts as the worker's loop has it: the backend, the text of what came, and the message about it.
    """

    def __init__(self, replica: Replica, design: Design, seed: int) -> None:
        self._replica = replica
        self._design = design
        self._random = random.Random(seed)
        self._outbox = Outbox()
        self._requests = Requests(replica, self._outbox, lambda: None)
        self._codec = Codec()
        self._made = 0

    def measure(self, seconds: float) -> list[StepSample]:
        """Steps of all points, as long as the time allows; of the first point in any case."""
        until = time.perf_counter() + seconds
        samples: list[StepSample] = []
        for count, context in self._design.points():
            samples += self._point(count, context, until)
            if time.perf_counter() >= until:
                break
        return samples

    def _point(self, count: int, context: int, until: float) -> list[StepSample]:
        """Prompts of `context` tokens until `count` answers go on; some steps of those; and then steps with a piece of
        another prompt each."""
        answers = [self._submit(context) for _ in range(count)]
        samples: list[StepSample] = []
        while any(each.computed_tokens < each.known_tokens - 1 for each in self._sequences().values()):
            samples.append(self._step())
        samples += [self._step() for _ in range(_DECODE_STEPS)]
        for tokens in _PIECES if count < self._design.max_prompts else ():
            if tokens + count > self._design.step_tokens or time.perf_counter() >= until:
                break
            samples += [self._step() for _ in range(_BETWEEN_STEPS)]
            extra = self._submit(tokens)
            samples.append(self._step())
            self._requests.forget(extra)
        for answer in answers:
            self._requests.forget(answer)
        return samples

    def _submit(self, tokens: int) -> str:
        self._made += 1
        request = BackendRequest(
            id=str(self._made),
            prompt_ids=self._random.choices(range(self._replica.model.vocab_size), k=tokens),
            params=SamplingParams(temperature=0.0, max_tokens=self._design.longest_tokens, ignore_eos=True, seed=0),
        )
        self._requests.submit(request)
        return request.id

    def _step(self) -> StepSample:
        before = self._sequences()
        began_s = time.perf_counter()
        events = self._replica.backend.step()
        answers = self._requests.take(events)
        batch = StepBatch(
            outputs=self._outbox.take(),
            stats=self._replica.backend.stats(),
            answers=answers,
            prefix=self._replica.backend.prefix_changes(),
        )
        self._codec.frame(batch)
        took_s = time.perf_counter() - began_s
        return StepSample(shape=StepShape.of(_chunks(before, self._sequences())), seconds=took_s)

    def _sequences(self) -> dict[str, SequenceStats]:
        return {each.request_id: each for each in self._replica.backend.stats().sequences}


def _chunks(before: Mapping[str, SequenceStats], after: Mapping[str, SequenceStats]) -> Iterator[tuple[int, int]]:
    """Which tokens of which sequences were computed between two looks."""
    for name, sequence in after.items():
        start = before[name].computed_tokens if name in before else 0
        if sequence.computed_tokens > start:
            yield start, sequence.computed_tokens - start


def loaded(plan: Plan, design: Design) -> Replica:
    """The model as a worker loads it. Raises EngineError."""
    load = Load(
        spec=msgspec.structs.replace(plan.spec, threads=plan.threads, kv_cache_tokens=design.kv_tokens),
        max_prompts=design.max_prompts + 1,
        step_tokens=design.step_tokens,
        page_tokens=design.page_tokens,
        threads=plan.threads,
    )
    return load_replica(load, create_backend, report=lambda progress: None, cancelled=lambda: False)
