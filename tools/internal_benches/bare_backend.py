"""The backend without the engine: a loop that submits, steps and counts tokens, in its own process.

`BareLoop` starts it. Run as a program, the module is the loop: it writes "ready", then answers the number of a round
with its timing as JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from types import TracebackType

import msgspec

from console.planning.measuring import Child, say
from engine.backends.base import Backend, BackendRequest
from engine.config import EngineConfig
from engine.errors import EngineError, WorkerFailed
from engine.worker_process.factory import create_backend
from engine.worker_process.loading import limit_torch_threads
from tools.internal_benches.rounds import Rounds, Timing, request_numbers

_READY = b"ready"


class BareLoop:
    """The process of the loop: `async with`, then `round` after `round`."""

    def __init__(self, rounds: Rounds, concurrent: int) -> None:
        self._arguments = (rounds.model.name, str(rounds.model.threads), str(concurrent))
        self._child: Child | None = None

    async def __aenter__(self) -> BareLoop:
        """Start it and load the model. Raises WorkerFailed with the reason."""
        self._child = await Child.start("the bare loop", "tools.internal_benches.bare_backend", *self._arguments)
        if (await self._child.line()).strip() != _READY:
            raise WorkerFailed("unexpected output of the bare loop before it was ready")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        assert self._child is not None
        await self._child.end(kill=True)

    async def round(self, number: int) -> Timing:
        """Run a round. Raises WorkerFailed with the reason."""
        assert self._child is not None
        return msgspec.json.decode(await self._child.ask(b"%d" % number), type=Timing)


def run_round(backend: Backend, requests: Iterator[BackendRequest], concurrent: int) -> Timing:
    """Generate the tokens of all requests, `concurrent` at a time. Raises WorkerFailed where one fails."""
    tokens_left: dict[str, int] = {}
    tokens = 0

    def fill() -> None:
        for request in islice(requests, concurrent - len(tokens_left)):
            backend.submit(request)
            tokens_left[request.id] = request.params.max_tokens or 0

    started_s, cpu_s = time.perf_counter(), time.process_time()
    fill()
    while tokens_left:
        ended = 0
        for event in backend.step():
            if event.token_id is None:
                raise WorkerFailed(f"the backend ended a request: {event.message or event.finish}")
            tokens += 1
            tokens_left[event.request_id] -= 1
            if not tokens_left[event.request_id]:
                backend.cancel(event.request_id)
                del tokens_left[event.request_id]
                ended += 1
        if ended:
            fill()
    return Timing(tokens, time.perf_counter() - started_s, time.process_time() - cpu_s)


def _main(model: str, threads: int, concurrent: int) -> int:
    config = EngineConfig()
    try:
        rounds = Rounds.on(model, threads=threads, count=1)
        backend = create_backend(rounds.model.spec)
        limit_torch_threads(threads)
        backend.load(
            rounds.spec_for(concurrent, threads),
            max_prompts=concurrent,
            step_tokens=config.step_tokens,
            page_tokens=config.page_tokens,
            report=lambda progress: None,
            cancelled=lambda: False,
        )
        say(_READY)
        for line in sys.stdin:
            requests = rounds.backend_requests(request_numbers(int(line), concurrent))
            say(msgspec.json.encode(run_round(backend, requests, concurrent)))
    except EngineError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
