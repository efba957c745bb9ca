"""SampleLoad: clients for some seconds, so that the effect of a change is seen without a second terminal."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from console.tuning.autotune.traffic import LoadGenerator, usual_mix
from engine.engine import Engine
from engine.errors import EngineBusy
from engine.metrics.slo import Slo
from engine.system.tasks import run_detached

SOURCE = "sample"
CLIENTS_PER_SLOT = 2
"""So that half of the requests wait: more slots then show in tok/s, and fewer in TTFT."""
MAX_QUEUE_SHARE = 0.5
"""Of the queue's places: other clients are not turned away for a sample."""


class SampleLoad:
    """Short prompts and answers, behind all other requests; one load at a time. On the engine's loop.

    left_s: seconds that are left of it, clients: that send; both 0 where none does, and for any thread to read. At its
    end nothing more is sent, and the last requests end by themselves: none of them counts as cancelled.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self.left_s = 0.0
        self.clients = 0

    async def start(self, model: str, seconds: float) -> None:
        """Begin. Raises EngineBusy while one runs, and what Engine.serving does where no model answers."""
        if self._task is not None and not self._task.done():
            remedy = "Stop it first" if self.clients else "It ends with its last requests"
            raise EngineBusy(f"A sample load is running. {remedy}.", state="load")
        serving = await self._engine.serving(model)
        slots = serving.config.num_workers * serving.config.max_prompts
        self.clients = min(CLIENTS_PER_SLOT * slots, slots + int(MAX_QUEUE_SHARE * self._engine.config.max_queue))
        mix = usual_mix(0).within(min(serving.model.max_model_len, serving.model.kv_tokens))
        ids = [each for each in range(serving.model.vocab_size) if each not in serving.tokenizer.special_ids]
        load = LoadGenerator(self._engine, serving.name, mix, Slo(), ids, source=SOURCE)
        self.left_s, self._over = seconds, asyncio.Event()
        self._task = run_detached(self._run(load, seconds))

    def finish(self) -> None:
        """End it now instead of after its time. Nothing happens where none runs."""
        self.left_s, self.clients = 0.0, 0
        self._over.set()

    async def stop(self) -> None:
        """Cancel it and its requests; returns when that is done. Nothing happens where none runs."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self, load: LoadGenerator, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        try:
            await load.set_clients(self.clients)
            while not self._over.is_set() and (left := until - clock()) > 0:
                self.left_s = left
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(1.0, left)):
                        await self._over.wait()
            self.left_s, self.clients = 0.0, 0
            await load.finish()
        finally:
            self.left_s, self.clients = 0.0, 0
            await load.set_clients(0)
