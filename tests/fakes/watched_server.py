"""A server in a process of its own that tells what it holds: run as a program, with the folder of a model.

It says its port, and then answers each line of stdin with a `Holding` as JSON, until stdin ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections import Counter
from pathlib import Path

import aiohttp.web
import msgspec
import psutil

from console.api.http.traffic import Call
from console.api.requests.generation import Generation
from console.api.requests.stream import ChunkStream
from console.api.server import ApiServer
from console.api.settings import ApiSettings
from console.bench.engine_target import all_ready
from console.runtime.logs import logging_to
from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine, RequestStream
from engine.requests.request import Request

LIVING = (
    Request,
    RequestStream,
    Generation,
    ChunkStream,
    Call,
    aiohttp.web.RequestHandler,
    aiohttp.web.Request,
    asyncio.Task,
)
"""What lives as long as a request, a connection or a piece of work does."""


class Holding(msgspec.Struct, frozen=True):
    """What the server and its worker hold after a look for garbage.

    living: instances of each of LIVING.  descriptors, rss_bytes: of the server, and of its worker.
    live: the engine's requests.  under_way: HTTP's.  clients: connections.  errors: lines in the log that are such.
    """

    living: dict[str, int]
    descriptors: tuple[int, int]
    rss_bytes: tuple[int, int]
    live: int
    under_way: int
    clients: int
    pages_used: int
    requests: int
    errors: list[str]


async def _serve(model: Path, max_prompts: int) -> None:
    engine = Engine(EngineConfig(num_workers=1, max_prompts=max_prompts, max_queue=2048))
    server = ApiServer(engine, ApiSettings(port=0))
    with logging_to(engine.log, None):
        await engine.start()
        try:
            await engine.load(ModelSpec(path=model, name="tiny", kv_cache_tokens=256 * max_prompts))
            await all_ready(engine, 1)
            await server.start()
            _say(b"%d" % server.status().port)
            commands = asyncio.StreamReader()
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
            while await commands.readline():
                _say(msgspec.json.encode(_holding(engine, server)))
        finally:
            await server.stop(drain_s=0.0)
            await engine.close(drain_s=0.0)


def _holding(engine: Engine, server: ApiServer) -> Holding:
    gc.collect()
    living = Counter(kind.__name__ for each in gc.get_objects() for kind in LIVING if isinstance(each, kind))
    snapshot = engine.publish()
    worker = snapshot.workers[0]
    assert worker.pid is not None
    processes = psutil.Process(), psutil.Process(worker.pid)
    return Holding(
        living=dict(living),
        descriptors=(processes[0].num_fds(), processes[1].num_fds()),
        rss_bytes=(processes[0].memory_info().rss, processes[1].memory_info().rss),
        live=sum(row.state != "finished" for row in snapshot.requests),
        under_way=server.report().under_way,
        clients=server.status().connections,
        pages_used=worker.stats.pages_total - worker.stats.pages_free,
        requests=server.report().requests,
        errors=[entry.message for entry in engine.log.after(0)[1] if entry.level >= logging.ERROR],
    )


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
