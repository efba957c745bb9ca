"""The steps of a model on this machine, measured in a process of its own, and the costs that are fitted to them.

Run as a program, with a MeterOrder as JSON, it is that process: it loads the model, says what it is, and then answers
each line, the seconds that it may take, with the steps that it measured, as JSON.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import msgspec

from console.bench.progress import Show
from console.runtime.estimate import estimate_for
from console.runtime.loading import local_folder, model_spec
from console.settings.sources import load_settings
from engine.backends.base import BackendRequest, SequenceStats
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.devices import cpu_name, usable_cores
from engine.errors import EngineError, UnsupportedModel, WorkerFailed
from engine.models.config_json import read_config
from engine.simulation.step_costs import MeasuredModel, StepSample, StepShape, fit_steps
from engine.system.child_process import python_command
from engine.worker_process.factory import create_backend
from engine.worker_process.loading import Replica, load_replica
from engine.worker_process.outbox import Outbox
from engine.worker_process.process import worker_environment
from engine.worker_process.protocol import Codec, Load, StepBatch
from engine.worker_process.requests import Requests

# A module in a child process that answers each line on stdin with a line on stdout.


class Child:
    """The process. name: for error messages, as "the server"."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, module: str, *arguments: str) -> Child:
        """Run a module with arguments."""
        process = await asyncio.create_subprocess_exec(
            *python_command("-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=worker_environment(),
        )
        return cls(name, process)

    async def line(self) -> bytes:
        """The next line of its output. Raises WorkerFailed, with the last line of stderr, where it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line:
            return line
        _, stderr = await self._process.communicate()
        last = (stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise WorkerFailed(f"{self._name} ended: {last}")

    async def ask(self, line: bytes) -> bytes:
        """Send a line and return the answer. Raises WorkerFailed as `line` does."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        return await self.line()

    async def end(self, *, kill: bool) -> None:
        """Close its stdin, at which it exits, and wait. kill: kill it first."""
        assert self._process.stdin is not None
        if kill and self._process.returncode is None:
            self._process.kill()
        self._process.stdin.close()
        await self._process.communicate()


def say(line: bytes) -> None:
    """Write an answer, in the child."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


# The model, as measurements load it: its configuration and the CPU threads it gets.


@dataclass(frozen=True, slots=True)
class LocalModel:
    """name: as the user wrote it.  spec: without threads and KV pages.  threads: of all workers together."""

    name: str
    spec: ModelSpec
    vocab_size: int
    threads: int


def local_model(name: str, *, threads: int | None, changes: Mapping[str, Any] = MappingProxyType({})) -> LocalModel:
    """Find a model. threads: the machine's cores where None.  changes: settings of its load, which override environment
    variables and config.toml.

    Raises ModelNotFound, UnsupportedModel or another EngineError.
    """
    settings = load_settings({"model": name, **changes})
    path = local_folder(settings)
    spec = model_spec(settings, name, path)
    vocab_size = read_config(path).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise UnsupportedModel(f"config.json of {spec.name} does not give the model's vocab_size")
    return LocalModel(name, spec, vocab_size, threads or usable_cores())


# The steps of a backend, as the loop of a worker does them.

_DECODE_STEPS = 6
_BETWEEN_STEPS = 2
"""Of answers alone, before a piece of a prompt: as under load, where a prompt comes in the midst of answers."""
_PIECES = (8, 32, 64, 128, 192, 384)
_PREFILLS = (96, 512, 1536)


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """Measured points: answers at once up to max_prompts, contexts up to longest_tokens, steps of step_tokens."""

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


_ROUNDS = 3
MAX_CONTEXT_TOKENS = 3072
WITHOUT_GUESSES = MappingProxyType({"draft_model": None, "ngram_draft": False, "draft_tokens": None})
"""Settings of a load: a step that guesses is none of those that are simulated."""


class MeterOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement of the child. changes: settings of the load."""

    model: str
    design: Design
    threads: int
    changes: dict[str, Any]


class MeasuredWorker:
    """`async with`, then `steps` as often as wanted. changes: settings of the load, before those that are saved.

    Raises EngineError where the model cannot be loaded.
    """

    def __init__(
        self, model: str, design: Design, threads: int, changes: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        order = MeterOrder(model=model, design=design, threads=threads, changes=dict(changes) | dict(WITHOUT_GUESSES))
        self._order = msgspec.json.encode(order).decode()
        self._child: Child | None = None
        self.loaded = Loaded(device="", dtype="", max_model_len=0)

    async def __aenter__(self) -> MeasuredWorker:
        """Start it and load the model."""
        self._child = await Child.start("the measured worker", "console.planning.measuring", self._order)
        try:
            self.loaded = msgspec.json.decode(await self._child.line(), type=Loaded)
        except BaseException:
            await self._child.end(kill=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        assert self._child is not None, "it was entered before"
        await self._child.end(kill=True)

    async def steps(self, seconds: float) -> list[StepSample]:
        """Steps over the design, as many points as fit into about `seconds`."""
        assert self._child is not None, "it is to be entered first"
        return msgspec.json.decode(await self._child.ask(b"%g" % seconds), type=list[StepSample])


async def measure(
    model: str,
    *,
    threads: int | None,
    max_prompts: int,
    step_tokens: int,
    changes: Mapping[str, object],
    seconds: float,
    show: Show,
) -> MeasuredModel:
    """Step costs of a model here, in about `seconds` after its load. changes: settings of that. Raises
    EngineError."""
    local = local_model(model, threads=threads, changes={**changes, **WITHOUT_GUESSES})
    page_tokens = EngineConfig().page_tokens
    design = Design(
        max_prompts=max_prompts, step_tokens=step_tokens, page_tokens=page_tokens, longest_tokens=MAX_CONTEXT_TOKENS
    )
    kv_tokens = _kv_tokens(model, design, changes)
    samples: list[StepSample] = []
    show(f"loading {model}")
    async with MeasuredWorker(model, design, local.threads, changes) as worker:
        await worker.steps(0)  # the first steps of a process are slower
        for number in range(_ROUNDS):
            show(f"measuring steps, round {number + 1} of {_ROUNDS}: {len(samples)} samples")
            samples += await worker.steps(seconds / _ROUNDS)
        loaded = worker.loaded
    return MeasuredModel(
        model=local.spec.name,
        device=loaded.device,
        machine=cpu_name(),
        threads=local.threads,
        max_model_len=loaded.max_model_len,
        kv_tokens=kv_tokens,
        page_tokens=page_tokens,
        step_tokens=step_tokens,
        fit=fit_steps(samples),
        max_prompts=max(sample.shape.decodes for sample in samples),
        context_tokens=max(sample.shape.context_tokens // max(1, sample.shape.decodes) for sample in samples),
        backend=local.spec.backend,
        dtype=loaded.dtype,
        weights=local.spec.weights,
        cache_bits=local.spec.cache_bits,
    )


def _kv_tokens(model: str, design: Design, changes: Mapping[str, object]) -> int:
    """Return what the KV pages of a worker would hold if it served here, with all the memory that is free now; the
    measurement itself holds no more than it needs."""
    asked = {"max_prompts": design.max_prompts, "step_tokens": design.step_tokens, "num_workers": 1}
    found = estimate_for(load_settings({"model": model, **asked, **changes, **WITHOUT_GUESSES}))
    return found.placements[0].kv_tokens if found.fits else design.kv_tokens


# The process that measures.


def _serve(order: MeterOrder) -> int:
    try:
        local = local_model(order.model, threads=order.threads, changes=order.changes)
        replica = _loaded(local, order.design)
        meter, model = StepMeter(replica, order.design, seed=0), replica.model
        here = Loaded(device=model.devices[0], dtype=model.dtype, max_model_len=model.max_model_len)
        say(msgspec.json.encode(here))
        for line in sys.stdin:
            say(msgspec.json.encode(meter.measure(float(line))))
    except EngineError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


def _loaded(local: LocalModel, design: Design) -> Replica:
    """The model as a worker loads it. Raises EngineError."""
    load = Load(
        spec=msgspec.structs.replace(local.spec, threads=local.threads, kv_cache_tokens=design.kv_tokens),
        max_prompts=design.max_prompts + 1,
        step_tokens=design.step_tokens,
        page_tokens=design.page_tokens,
        threads=local.threads,
    )
    return load_replica(load, create_backend, report=lambda progress: None, cancelled=lambda: False)


if __name__ == "__main__":
    sys.exit(_serve(msgspec.json.decode(sys.argv[1], type=MeterOrder)))
