"""The engine's side of a worker, as a test wants it: commands out, events in, in order, with a limit to patience."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from engine.backends.base import BackendRequest
from engine.config import ModelSpec, SamplingParams
from engine.worker_process.hosts import WorkerExit, WorkerHost
from engine.worker_process.protocol import Event, Hello, Load, Loaded, RequestOutput, StepBatch, Submit
from tests.fakes.backend import PATIENCE_S, FakeBackend, Gate
from tests.fakes.model import EOS_ID

T = TypeVar("T")
PROMPT_IDS = list(b"hello")
"""What submit_command asks unless told."""


def load_command(folder: Path, max_prompts: int = 4) -> Load:
    """Load the fake model that lies in `folder`."""
    spec = ModelSpec(path=folder, name="fake")
    return Load(spec=spec, max_prompts=max_prompts, step_tokens=64, page_tokens=16, threads=1)


def submit_command(
    request_id: str, prompt: str = "hello", generated: str = "", *, adapter: str = "", **params: object
) -> Submit:
    """Submit a prompt; params as in SamplingParams, max_tokens 8 unless told."""
    sampling = SamplingParams(**{"max_tokens": 8, "seed": 0, **params})  # type: ignore[arg-type]
    request = BackendRequest(
        id=request_id,
        prompt_ids=list(prompt.encode()),
        generated=list(generated.encode()),
        params=sampling,
        end_token_ids=() if sampling.ignore_eos else (EOS_ID,),
        adapter=adapter,
    )
    return Submit(request=request)


class Probe:
    """Listens to one host. Everything it waits for comes within PATIENCE_S, or the test fails."""

    def __init__(self, host: WorkerHost) -> None:
        self.host = host
        self.events: list[Event] = []
        self.exits: list[WorkerExit] = []
        self._arrived: asyncio.Queue[Event | WorkerExit] = asyncio.Queue()

    async def start(self) -> Probe:
        """Start the host and wait for its Hello."""
        await self.host.start(self._on_event, self._on_exit)
        await self.wait_for(Hello)
        return self

    def send(self, *commands: object) -> None:
        """Send commands."""
        for command in commands:
            self.host.send(command)  # type: ignore[arg-type]

    async def wait_for(self, kind: type[T]) -> T:
        """The next event of this kind (WorkerExit is one too), skipping others."""
        while True:
            async with asyncio.timeout(PATIENCE_S):
                event = await self._arrived.get()
            if isinstance(event, kind):
                return event

    async def load(self, folder: Path, max_prompts: int = 4) -> Loaded:
        """Load the fake model."""
        self.send(load_command(folder, max_prompts))
        return await self.wait_for(Loaded)

    async def outputs(self, *request_ids: str) -> AsyncIterator[RequestOutput]:
        """Outputs as they come, until all these requests have finished."""
        live = set(request_ids)
        while live:
            for output in (await self.wait_for(StepBatch)).outputs:
                yield output
                if output.finish is not None:
                    live.discard(output.request_id)

    async def answer(self, request_id: str) -> tuple[str, RequestOutput]:
        """The whole text of one request, and its last output."""
        text = ""
        async for output in self.outputs(request_id):
            if output.request_id == request_id:
                text += output.text
                last = output
        return text, last

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self._arrived.put_nowait(event)

    def _on_exit(self, reason: WorkerExit) -> None:
        self.exits.append(reason)
        self._arrived.put_nowait(reason)


StartWorker = Callable[[FakeBackend], Awaitable[Probe]]
"""Starts a worker around a backend."""


async def step_until(probe: Probe, gate: Gate, *, decoding: int, waiting: int = 0) -> StepBatch:
    """Let steps through one by one until that many requests are on their way; the batch that says so."""
    while True:
        gate.allow(1)
        batch = await probe.wait_for(StepBatch)
        if (batch.stats.decoding, batch.stats.waiting) == (decoding, waiting):
            await asyncio.to_thread(gate.wait_until_reached)
            return batch
