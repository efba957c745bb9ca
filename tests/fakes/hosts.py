"""A worker's host that a test plays: it says what the test wants and remembers what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.backends.base import BackendStats, LoadedModel
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.protocol import (
    Command,
    Event,
    Hello,
    Loaded,
    RequestOutput,
    RequestStarted,
    StepBatch,
    Submit,
)

MODEL = LoadedModel(
    backend="fake",
    architecture="FakeForCausalLM",
    dtype="float32",
    devices=("cpu",),
    vocab_size=257,
    max_model_len=4096,
    kv_tokens=4096,
    page_tokens=16,
    weights_bytes=1,
    kv_bytes=1,
    parameters=1,
)


class PlayedHost:
    """WorkerHost. `say` is an event of the worker's, `end` its end; `killed` whether the engine killed it."""

    def __init__(self) -> None:
        self.pid: int | None = 4711
        self.commands: list[Command] = []
        self.killed = False
        self._over = asyncio.Event()

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """It runs, and says nothing yet."""
        self._on_event, self._on_exit = on_event, on_exit

    def send(self, command: Command) -> None:
        """Keep it."""
        self.commands.append(command)

    async def stop(self, timeout_s: float) -> None:
        """It ends as it is told."""
        self.end(WorkerExit(code=0))
        await self._over.wait()

    def kill(self) -> None:
        """Its end follows, as that of a process does."""
        self.killed = True
        asyncio.get_running_loop().call_soon(self.end, WorkerExit(signal="SIGKILL", log_tail="last words"))

    def say(self, *events: Event) -> None:
        """Events of the worker's."""
        for event in events:
            self._on_event(event)

    def load(self) -> None:
        """The worker has loaded its model."""
        self.say(Hello(pid=4711), Loaded(model=MODEL, load_s=0.1))

    def take(self) -> None:
        """The worker begins with everything that was submitted to it so far."""
        self.say(*(RequestStarted(request_id=each.request.id) for each in self.commands if isinstance(each, Submit)))

    def step(self, *outputs: RequestOutput, step_s: float = 0.01) -> None:
        """The worker did a step."""
        self.say(StepBatch(outputs=list(outputs), stats=BackendStats(), step_s=step_s))

    def end(self, reason: WorkerExit) -> None:
        """The worker's end, told once."""
        if not self._over.is_set():
            self._over.set()
            self._on_exit(reason)
