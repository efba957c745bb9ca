"""A worker that costs nothing: it runs on the engine's loop, and the text of each token is the time it was made at."""

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
    """Factory of their hosts, for `Engine`. pace_s: seconds between steps; 0: a step in every turn of the loop, so that
    each reader gets its token before the next one."""

    def __init__(self, vocab_size: int) -> None:
        self.pace_s = 0.0
        self.vocab_size = vocab_size

    def __call__(self, worker_id: str, spec: ModelSpec) -> InstantHost:
        return InstantHost(self)


class InstantHost:
    """A WorkerHost that gives each request a token in each step: `time.monotonic_ns` as text."""

    def __init__(self, workers: InstantWorkers) -> None:
        self.pid: int | None = None
        self._workers = workers
        self._tokens_left: dict[str, int] = {}
        self._started: set[str] = set()
        self._next: asyncio.Handle | None = None

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """WorkerHost: ready immediately."""
        self._loop = asyncio.get_running_loop()
        self._on_event, self._on_exit = on_event, on_exit
        self._loop.call_soon(on_event, Hello(pid=os.getpid()))

    def send(self, command: Command) -> None:
        """WorkerHost: other commands have no effect here."""
        match command:
            case Load():
                self._loop.call_soon(self._on_event, Loaded(model=self._model(command), load_s=0.0))
            case Submit(request=request):
                self._tokens_left[request.id] = request.params.max_tokens or 0
                self._step_soon()
            case Cancel(request_id=request_id):
                self._tokens_left.pop(request_id, None)
            case Shutdown():
                self._end()

    async def stop(self, timeout_s: float) -> None:
        """WorkerHost: end immediately."""
        self._end()

    def kill(self) -> None:
        """WorkerHost: end immediately."""
        self._end()

    def _end(self) -> None:
        self._tokens_left.clear()
        on_exit, self._on_exit = self._on_exit, lambda _: None
        on_exit(WorkerExit(code=0))

    def _step_soon(self) -> None:
        if self._next is None:
            pace_s = self._workers.pace_s
            self._next = self._loop.call_later(pace_s, self._step) if pace_s else self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._next = None
        if not self._tokens_left:
            return
        stamp = f"{time.monotonic_ns()} "
        outputs = [self._output(request_id, stamp) for request_id in self._tokens_left]
        self._tokens_left = {request_id: left for request_id, left in self._tokens_left.items() if left > 0}
        self._started &= self._tokens_left.keys()
        self._on_event(StepBatch(outputs=outputs, stats=BackendStats(decoding=len(outputs)), answers=len(outputs)))
        if self._tokens_left:
            self._step_soon()

    def _output(self, request_id: str, stamp: str) -> RequestOutput:
        self._tokens_left[request_id] = left = self._tokens_left[request_id] - 1
        first = request_id not in self._started
        self._started.add(request_id)
        return RequestOutput(
            request_id=request_id,
            token_ids=[TOKEN_ID],
            text=stamp,
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
