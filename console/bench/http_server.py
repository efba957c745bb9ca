"""The server that is measured: engine and API as `ericllm --headless` has them, but with a worker that costs nothing.

`ServerProcess` starts it; run as a program, the module is the server: it says where it listens, and then answers each
line that it is sent, a `Pace`, with a `Reading`, both as JSON.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import msgspec

from console.api.server import ApiServer
from console.api.settings import ApiSettings
from console.bench.child import Child, say
from console.bench.engines import all_ready
from console.bench.plan import Plan, plan_for
from console.bench.zero_cost_worker import InstantWorkers
from console.runtime.logs import logging_to
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.system.runtime import reduce_gc_pauses

_CONTEXT_TOKENS = 1 << 16
_MAX_PROMPTS = 1024


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """How the server is started. core: the only one that it may use, None for any. profile: a file for cProfile's
    account of its main thread, "" for none. access_log: a file for one, "" for none."""

    model: str
    core: int | None = None
    profile: str = ""
    access_log: str = ""


class Pace(msgspec.Struct, frozen=True):
    """How the worker goes on: a step every `step_s` seconds, 0 as fast as its tokens are taken."""

    step_s: float


class Reading(msgspec.Struct, frozen=True):
    """CPU seconds that the process has used so far."""

    cpu_s: float


class ServerProcess:
    """The server as seen from outside: `async with`, then `url`, and `go_on` between what is measured."""

    def __init__(self, order: Order) -> None:
        self.port = 0
        self._order = order
        self._child: Child | None = None

    async def __aenter__(self) -> ServerProcess:
        """Start it, and wait until it listens. Raises WorkerFailed with the reason."""
        order = msgspec.json.encode(self._order).decode()
        self._child = await Child.start("the server", "console.bench.http_server", order)
        try:
            self.port = int(await self._child.line())
        except BaseException:
            await self._child.end(kill=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it: by itself, for it may have a profile to write."""
        assert self._child is not None
        await self._child.end(kill=kind is not None)

    async def go_on(self, pace: Pace) -> Reading:
        """From now on at that pace; what the process has used until now. Raises WorkerFailed where it has ended."""
        assert self._child is not None
        return msgspec.json.decode(await self._child.ask(msgspec.json.encode(pace)), type=Reading)


async def _serve(order: Order, folder: Path) -> None:
    plan = plan_for(order.model, threads=1, rounds=1)
    workers = InstantWorkers(plan.vocab_size)
    config = EngineConfig(num_workers=1, max_prompts=_MAX_PROMPTS, max_queue=_MAX_PROMPTS)
    engine = Engine(config, new_host=workers)
    with logging_to(engine.log, folder):
        await engine.start()
        server = ApiServer(engine, ApiSettings(port=0, access_log=order.access_log or None))
        try:
            await _load(engine, plan)
            await server.start()
            reduce_gc_pauses()
            say(b"%d" % server.status().port)
            await _obey(workers)
        finally:
            await server.stop(drain_s=0.0)
            await engine.close(drain_s=0.0)


async def _load(engine: Engine, plan: Plan) -> None:
    await engine.load(msgspec.structs.replace(plan.spec, threads=1, kv_cache_tokens=_CONTEXT_TOKENS))
    await all_ready(engine, 1)


async def _obey(workers: InstantWorkers) -> None:
    """Until stdin ends."""
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        workers.pace_s = msgspec.json.decode(line, type=Pace).step_s
        say(msgspec.json.encode(Reading(time.process_time())))


def _main(order: Order) -> int:
    if order.core is not None:
        os.sched_setaffinity(0, {order.core})
    profile = cProfile.Profile() if order.profile else None
    try:
        with tempfile.TemporaryDirectory(prefix="ericllm-bench-") as folder:
            if profile is not None:
                profile.enable()
            asyncio.run(_serve(order, Path(folder)))
    except EngineError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    finally:
        if profile is not None:
            profile.disable()
            profile.dump_stats(order.profile)
    return 0


if __name__ == "__main__":
    sys.exit(_main(msgspec.json.decode(sys.argv[1], type=Order)))
