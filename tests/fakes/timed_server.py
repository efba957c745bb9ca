"""A server in a process of its own that tells what its event loop was held up by: run as a program, with a folder and
the tokens that a model's context has.

It says its port, and then answers each line of stdin with `Held` as JSON, of the time since the last, until stdin ends.
/health says what processor time it has spent by then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import functools
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from aiohttp import web

from console.api.server import ApiServer
from console.api.settings import ApiSettings
from console.api.status_endpoints import Operations
from console.bench.engine_target import all_ready
from engine.config import EngineConfig
from engine.engine import Engine
from engine.system.tasks import reduce_gc_pauses
from tests.fakes.health_probe import CPU_HEADER
from tests.fakes.model import fake_spec

_STATUS = Path("/proc/self/status")


class Held(msgspec.Struct, frozen=True):
    """callback_s: processor time of the longest callback of the loop, and which that was.

    job_s: the same of the longest piece of work in a thread.  peak_bytes: most memory that the process had.
    """

    callback_s: float
    callback: str
    job_s: float
    peak_bytes: int


class Meter:
    """What took longest since it was last read."""

    def __init__(self) -> None:
        self._callback_s, self._callback, self._job_s = 0.0, "", 0.0

    def read(self) -> Held:
        """And begin anew."""
        held = Held(self._callback_s, self._callback, self._job_s, _peak())
        self._callback_s, self._callback, self._job_s = 0.0, "", 0.0
        Path("/proc/self/clear_refs").write_text("5")
        return held

    def timed_handle(self, run: Callable[[asyncio.Handle], None]) -> Callable[[asyncio.Handle], None]:
        """Handle._run, which runs a callback of the loop."""

        def run_handle(handle: asyncio.Handle) -> None:
            began_s = time.thread_time()
            run(handle)
            if (took_s := time.thread_time() - began_s) > self._callback_s:
                self._callback_s, self._callback = took_s, repr(handle)

        return run_handle

    def timed_job(self, run: Callable[[Any], None]) -> Callable[[Any], None]:
        """_WorkItem.run, which does a piece of work in a thread."""

        def run_job(job: Any) -> None:
            began_s = time.thread_time()
            run(job)
            del job  # it refers to its error, whose traceback refers to this frame
            self._job_s = max(self._job_s, time.thread_time() - began_s)

        return run_job


_Health = Callable[[Operations, web.Request], Awaitable[web.Response]]


def _with_cpu_time(answer: _Health) -> _Health:
    """Operations._health, whose answers say what the process has spent."""

    @functools.wraps(answer)  # which has the route's description, too
    async def health(operations: Operations, request: web.Request) -> web.Response:
        response = await answer(operations, request)
        response.headers[CPU_HEADER] = str(time.process_time())
        return response

    return health


async def _serve(folder: Path, context: int, meter: Meter) -> None:
    engine = Engine(EngineConfig(num_workers=1))
    server = ApiServer(engine, ApiSettings(port=0))
    await engine.start()
    try:
        await engine.load(fake_spec(folder, max_model_len=context))
        await all_ready(engine, 1)
        await server.start()
        reduce_gc_pauses()
        _say(b"%d" % server.status().port)
        commands = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        while await commands.readline():
            _say(msgspec.json.encode(meter.read()))
    finally:
        await server.stop(drain_s=0.0)
        await engine.close(drain_s=0.0)


def _peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    os.environ["ERICLLM_BACKEND_FACTORY"] = "tests.fakes.backend_factories:forgetful"
    measured, work_item = Meter(), concurrent.futures.thread._WorkItem
    with (
        patch.object(asyncio.Handle, "_run", measured.timed_handle(asyncio.Handle._run)),
        patch.object(work_item, "run", measured.timed_job(work_item.run)),
        patch.object(Operations, "_health", _with_cpu_time(Operations._health)),
    ):
        asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), measured))
