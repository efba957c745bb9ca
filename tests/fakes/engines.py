"""Engines for tests: fake backends in threads, devices that stand still, and waiting without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from engine.backends.base import TokenEvent
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest, RequestStream, StreamDelta
from engine.snapshot import DeviceReading, RequestRow, WorkerReading
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.model import fake_spec

GIB = 2**30
PATIENCE_S = 60.0


class StillProbe:
    """A DeviceProbe whose one CPU has `free_bytes` free, always."""

    def __init__(self, free_bytes: int = 8 * GIB) -> None:
        self.readings: tuple[DeviceReading, ...] = (
            DeviceReading(
                id="cpu", name="a CPU", kind="cpu", utilisation=0.5, total_bytes=16 * GIB, free_bytes=free_bytes
            ),
        )

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """The same again."""
        return self.readings


class DyingBackend(FakeBackend):
    """A FakeBackend that takes its worker down in the step `dies_at`, and in every step if `always`."""

    def __init__(self, *, dies_at: int, always: bool = False, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._dies_at = dies_at
        self._always = always

    def step(self) -> Sequence[TokenEvent]:
        """Step, or take the worker down as nothing but a crash does."""
        if self.steps + 1 == self._dies_at or (self._always and self.has_work()):
            raise SystemExit("told to die")
        return super().step()


class Backends:
    """A BackendFactory: gives out `first` in order and then plain ones; `made` is what it gave."""

    def __init__(self, *first: FakeBackend, then: Callable[[], FakeBackend] = FakeBackend) -> None:
        self.made: list[FakeBackend] = []
        self._first: Iterator[FakeBackend] = iter(first)
        self._then = then

    def __call__(self, spec: ModelSpec) -> FakeBackend:
        backend = next(self._first, None) or self._then()
        self.made.append(backend)
        return backend

    def open_gates(self) -> None:
        """Hold no backend up any more."""
        for backend in self.made:
            for gate in (backend.gate, backend.load_gate):
                if gate is not None:
                    gate.open()


def config(**settings: object) -> EngineConfig:
    """Thread workers that restart at once, unless said otherwise."""
    return EngineConfig(**{"worker_host": "thread", "restart_backoff_s": 0.0, **settings})  # type: ignore[arg-type]


@asynccontextmanager
async def started(
    backends: Backends | None = None, *, probe: StillProbe | None = None, **settings: object
) -> AsyncIterator[Engine]:
    """A started engine without a model, closed at the end."""
    backends = backends or Backends()
    engine = Engine(config(**settings), backend_factory=backends, probe=probe or StillProbe())
    await engine.start()
    with checked(engine):
        try:
            yield engine
        finally:
            backends.open_gates()
            await engine.close(drain_s=0.0)


@contextmanager
def checked(engine: Engine) -> Iterator[None]:
    """Prove the engine's accounts after every turn of the running loop."""
    loop = asyncio.get_running_loop()
    turn = loop._run_once  # type: ignore[attr-defined]

    def turn_and_check() -> None:
        turn()
        engine.check()

    loop._run_once = turn_and_check  # type: ignore[attr-defined]
    try:
        yield
    finally:
        loop._run_once = turn  # type: ignore[attr-defined]


@asynccontextmanager
async def serving(
    folder: Path, backends: Backends | None = None, *, spec: ModelSpec | None = None, **settings: object
) -> AsyncIterator[Engine]:
    """A started engine with the fake model loaded on all of its workers."""
    async with started(backends, **settings) as engine:
        await engine.load(spec or fake_spec(folder))
        await all_ready(engine)
        yield engine


def ask(prompt: str | list[int], *, max_tokens: int | None = 8, **fields: object) -> GenerateRequest:
    """A request for `max_tokens` tokens; params other than that come as a whole."""
    prompt_ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(prompt_ids=prompt_ids, params=params, **fields)  # type: ignore[arg-type]


class Answer:
    """Everything a stream gave."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.deltas: list[StreamDelta] = []

    @property
    def last(self) -> StreamDelta:
        """The delta with finish set."""
        return self.deltas[-1]


async def read(stream: RequestStream, patience_s: float = PATIENCE_S) -> Answer:
    """Read a stream to its end."""
    answer = Answer()
    async with asyncio.timeout(patience_s):
        async for delta in stream:
            answer.text += delta.text
            answer.token_ids += delta.token_ids
            answer.deltas.append(delta)
    return answer


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - many things change it, some on other threads
            await asyncio.sleep(0.001)


async def until_idle(backend: FakeBackend, gate: Gate) -> None:
    """Let a backend go on, a step at a time, until it has no work."""

    def step() -> bool:
        gate.allow()
        return not backend.has_work()

    await until(step)


async def all_ready(engine: Engine) -> None:
    """Wait until as many workers as wanted are ready, and no others are left."""
    await until(lambda: [worker.state for worker in engine.publish().workers] == ["ready"] * engine.config.num_workers)


def worker(engine: Engine, worker_id: str) -> WorkerReading:
    """That worker now."""
    return next(each for each in engine.publish().workers if each.id == worker_id)


def row(engine: Engine, request_id: str) -> RequestRow:
    """That request now."""
    return next(each for each in engine.publish().requests if each.id == request_id)
