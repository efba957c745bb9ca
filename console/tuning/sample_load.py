"""SampleLoad: clients for some seconds, so that the effect of a change is seen without a second terminal."""

from __future__ import annotations

import asyncio

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

    left_s: seconds that are left of it, clients: that send; both 0 where none runs, and for any thread to read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self.left_s = 0.0
        self.clients = 0

    async def start(self, model: str, seconds: float) -> None:
        """Begin. Raises EngineBusy while one runs, and what Engine.serving does where no model answers."""
        if self._task is not None and not self._task.done():
            raise EngineBusy("a sample load is running; stop that first", state="load")
        serving = await self._engine.serving(model)
        slots = serving.config.num_workers * serving.config.max_prompts
        self.clients = min(CLIENTS_PER_SLOT * slots, slots + int(MAX_QUEUE_SHARE * self._engine.config.max_queue))
        mix = usual_mix(0).within(min(serving.model.max_model_len, serving.model.kv_tokens))
        ids = [each for each in range(serving.model.vocab_size) if each not in serving.tokenizer.special_ids]
        load = LoadGenerator(self._engine, serving.name, mix, Slo(), ids, source=SOURCE)
        self.left_s = seconds
        self._task = run_detached(self._run(load, seconds))

    async def stop(self) -> None:
        """End it and its requests; returns when that is done. Nothing happens where none runs."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self, load: LoadGenerator, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        try:
            await load.set_clients(self.clients)
            while (left := until - clock()) > 0:
                self.left_s = left
                await asyncio.sleep(min(1.0, left))
        finally:
            self.left_s, self.clients = 0.0, 0
            await load.set_clients(0)
