"""The server under test: engine and API as `ericllm --headless` has them, but with a worker that costs nothing.

`ServerProcess` starts it. Run as a program, the module is the server: it writes its port, then answers each line it
reads, a `Pace`, with a `Reading`, both as JSON.
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
from console.bench.engine_target import all_ready
from console.planning.measuring import Child, LocalModel, local_model, say
from console.runtime.logs import logging_to
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.system.tasks import reduce_gc_pauses
from tools.internal_benches.zero_cost_worker import InstantWorkers

_CONTEXT_TOKENS = 1 << 16
_MAX_PROMPTS = 1024


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """core: CPU affinity, None for all cores.  profile: file for the cProfile of its main thread, "" for none.
    access_log: its file, "" for none."""

    model: str
    core: int | None = None
    profile: str = ""
    access_log: str = ""


class Pace(msgspec.Struct, frozen=True):
    """The worker's pace: a step every `step_s` seconds, 0 as fast as its tokens are read."""

    step_s: float


class Reading(msgspec.Struct, frozen=True):
    """CPU seconds used by the process so far."""

    cpu_s: float


class ServerProcess:
    """The server process: `async with`, then `port`, and `set_pace` before and after each measurement."""

    def __init__(self, options: ServerOptions) -> None:
        self.port = 0
        self._options = options
        self._child: Child | None = None

    async def __aenter__(self) -> ServerProcess:
        """Start it and wait until it listens. Raises WorkerFailed with the reason."""
        options = msgspec.json.encode(self._options).decode()
        self._child = await Child.start("the server", "tools.internal_benches.http_server", options)
        try:
            self.port = int(await self._child.line())
        except BaseException:
            await self._child.end(kill=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; it exits by itself, as it may have a profile to write."""
        assert self._child is not None
        await self._child.end(kill=kind is not None)

    async def set_pace(self, pace: Pace) -> Reading:
        """Set the worker's pace; return the CPU used until now. Raises WorkerFailed where the server has ended."""
        assert self._child is not None
        return msgspec.json.decode(await self._child.ask(msgspec.json.encode(pace)), type=Reading)


async def _serve(options: ServerOptions, folder: Path) -> None:
    local = local_model(options.model, threads=1)
    workers = InstantWorkers(local.vocab_size)
    config = EngineConfig(num_workers=1, max_prompts=_MAX_PROMPTS, max_queue=_MAX_PROMPTS)
    engine = Engine(config, new_host=workers)
    with logging_to(engine.log, folder):
        await engine.start()
        server = ApiServer(engine, ApiSettings(port=0, access_log=options.access_log or None))
        try:
            await _load(engine, local)
            await server.start()
            reduce_gc_pauses()
            say(b"%d" % server.status().port)
            await _run_commands(workers)
        finally:
            await server.stop(drain_s=0.0)
            await engine.close(drain_s=0.0)


async def _load(engine: Engine, local: LocalModel) -> None:
    await engine.load(msgspec.structs.replace(local.spec, threads=1, kv_cache_tokens=_CONTEXT_TOKENS))
    await all_ready(engine, 1)


async def _run_commands(workers: InstantWorkers) -> None:
    """Run until stdin ends."""
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        workers.pace_s = msgspec.json.decode(line, type=Pace).step_s
        say(msgspec.json.encode(Reading(time.process_time())))


def _main(options: ServerOptions) -> int:
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    profile = cProfile.Profile() if options.profile else None
    try:
        with tempfile.TemporaryDirectory(prefix="ericllm-bench-") as folder:
            if profile is not None:
                profile.enable()
            asyncio.run(_serve(options, Path(folder)))
    except EngineError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    finally:
        if profile is not None:
            profile.disable()
            profile.dump_stats(options.profile)
    return 0


if __name__ == "__main__":
    sys.exit(_main(msgspec.json.decode(sys.argv[1], type=ServerOptions)))
