"""A worker that costs nothing: it lives on the engine's own loop and makes up its answers.

What it says is when it said so, so that whoever reads a token knows how long it took from the worker to there.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from engine.backends.base import BackendStats, LoadedModel
from engine.config import ModelSpec
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.protocol import (
    Cancel,
    Command,
    Event,
    Hello,
    Load,
    Loaded,
    RequestOutput,
    Shutdown,
    StepBatch,
    Submit,
)

TOKEN_ID = 1


class InstantWorkers:
    """Makes hosts of such workers, as `Engine` takes them. pace_s: how often all of them step; 0: in every turn of the
    loop, so that each reader has had its token before the next one comes."""

    def __init__(self, vocab_size: int) -> None:
        self.pace_s = 0.0
        self.vocab_size = vocab_size

    def __call__(self, worker_id: str, spec: ModelSpec) -> InstantHost:
        return InstantHost(self)


class InstantHost:
    """A WorkerHost whose every request gets a token in each step, which is the time as `time.monotonic_ns` tells it."""

    def __init__(self, workers: InstantWorkers) -> None:
        self.pid: int | None = None
        self._workers = workers
        self._left: dict[str, int] = {}
        self._begun: set[str] = set()
        self._next: asyncio.Handle | None = None

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """WorkerHost: it runs at once."""
        self._loop = asyncio.get_running_loop()
        self._on_event, self._on_exit = on_event, on_exit
        self._loop.call_soon(on_event, Hello(pid=os.getpid()))

    def send(self, command: Command) -> None:
        """WorkerHost: obey; what else a worker can be told means nothing here."""
        match command:
            case Load():
                self._loop.call_soon(self._on_event, Loaded(model=self._model(command), load_s=0.0))
            case Submit(request=request):
                self._left[request.id] = request.params.max_tokens or 0
                self._step_soon()
            case Cancel(request_id=request_id):
                self._left.pop(request_id, None)
            case Shutdown():
                self._end()

    async def stop(self, timeout_s: float) -> None:
        """WorkerHost: it ends at once."""
        self._end()

    def kill(self) -> None:
        """WorkerHost: it ends at once."""
        self._end()

    def _end(self) -> None:
        self._left.clear()
        on_exit, self._on_exit = self._on_exit, lambda _: None
        on_exit(WorkerExit(code=0))

    def _step_soon(self) -> None:
        if self._next is None:
            pace_s = self._workers.pace_s
            self._next = self._loop.call_later(pace_s, self._step) if pace_s else self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._next = None
        if not self._left:
            return
        said = f"{time.monotonic_ns()} "
        outputs = [self._output(request_id, said) for request_id in self._left]
        self._left = {request_id: left for request_id, left in self._left.items() if left > 0}
        self._begun &= self._left.keys()
        self._on_event(StepBatch(outputs=outputs, stats=BackendStats(decoding=len(outputs)), answers=len(outputs)))
        if self._left:
            self._step_soon()

    def _output(self, request_id: str, said: str) -> RequestOutput:
        self._left[request_id] = left = self._left[request_id] - 1
        first = request_id not in self._begun
        self._begun.add(request_id)
        return RequestOutput(
            request_id=request_id,
            token_ids=[TOKEN_ID],
            text=said,
            finish=None if left > 0 else "length",
            cached_tokens=0 if first else None,
        )

    def _model(self, load: Load) -> LoadedModel:
        kv_tokens = load.spec.kv_cache_tokens or load.page_tokens * load.max_prompts
        return LoadedModel(
            backend="none",
            architecture="none",
            dtype="none",
            devices=("cpu",),
            vocab_size=self._workers.vocab_size,
            max_model_len=kv_tokens,
            kv_tokens=kv_tokens,
            page_tokens=load.page_tokens,
            weights_bytes=0,
            kv_bytes=0,
            parameters=0,
        )
