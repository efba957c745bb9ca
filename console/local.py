"""LocalLink: the screens' EngineLink over an engine in this process, on a loop of its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from console.link import ApiStatus, ChatDelta, ChatMessage
from console.runtime import LoopThread, Runtime
from engine.config import SamplingParams
from engine.doctor.report import Report
from engine.engine import Engine, GenerateRequest, RequestStream, StreamDelta
from engine.errors import from_info
from engine.estimate import Estimate
from engine.models.catalog import ModelEntry
from engine.snapshot import LogEntry, Snapshot
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")


class LocalLink:
    """Implements EngineLink: calls are marshalled onto the engine's loop, which never waits for a screen."""

    def __init__(self, runtime: Runtime, loop: LoopThread) -> None:
        self._runtime = runtime
        self._loop = loop

    def snapshot(self) -> Snapshot:
        """The latest snapshot; a download under way shows as a loading model."""
        snapshot = self._runtime.engine.snapshot()
        finding = self._runtime.finding()
        if finding is None or snapshot.status.state == "ready":
            return snapshot
        return msgspec.structs.replace(snapshot, status=finding)

    def api_status(self) -> ApiStatus:
        """The HTTP server now."""
        return self._runtime.api_status()

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """Lines logged after the first `after` ones, and the total so far."""
        return self._runtime.engine.log.after(after)

    async def list_models(self) -> Sequence[ModelEntry]:
        """Models on this machine."""
        return await self._call(self._runtime.list_models())

    async def load(self, model: str, *, beside: bool = False) -> None:
        """Load a model; returns when ready."""
        await self._call(self._runtime.load(model, beside=beside, renames=True))

    async def cancel_load(self) -> None:
        """Stop the load or download under way."""
        await self._call(self._runtime.cancel_load())

    async def unload(self, model: str = "") -> None:
        """Drain and unload."""
        await self._call(self._runtime.engine.unload(model))

    async def reconfigure(self, *, workers: int | None = None, max_prompts: int | None = None, model: str = "") -> None:
        """Set knobs live."""
        await self._call(self._runtime.engine.reconfigure(workers=workers, max_prompts=max_prompts, model=model))

    async def restart_worker(self, worker_id: str) -> None:
        """Start a worker again."""
        await self._call(self._runtime.engine.restart_worker(worker_id))

    async def drain_worker(self, worker_id: str) -> None:
        """Let a worker finish and go."""
        await self._call(self._runtime.engine.drain_worker(worker_id))

    async def estimate(self, model: str, *, workers: int | None = None, max_prompts: int | None = None) -> Estimate:
        """What loading a model would take of each device now."""
        knobs = {"num_workers": workers, "max_prompts": max_prompts}
        changes = {name: value for name, value in knobs.items() if value is not None}
        return await self._call(self._runtime.estimate(model, changes))

    async def attach(self, name: str, path: str, model: str = "") -> None:
        """Make an adapter usable."""
        await self._call(self._runtime.attach(name, path, model))

    async def detach(self, name: str, model: str = "") -> None:
        """Forget an adapter."""
        await self._call(self._runtime.engine.detach(name, model))

    async def cancel_request(self, request_id: str) -> None:
        """Cancel one request."""
        self._loop.call_soon(self._runtime.engine.cancel, request_id)

    async def diagnose(self) -> Report:
        """What this machine has and lacks."""
        return await self._call(self._runtime.diagnose())

    async def start_api(self) -> None:
        """Listen."""
        await self._call(self._runtime.start_api())

    async def stop_api(self) -> None:
        """Stop listening."""
        await self._call(self._runtime.stop_api())

    def sampling_defaults(self, model: str = "") -> SamplingParams:
        """What a loaded model's folder suggests; neutral where it says nothing."""
        tokenizer = self._runtime.engine.tokenizer_of(model)
        return SamplingParams() if tokenizer is None else tokenizer.generation_defaults.as_params()

    async def chat(
        self, messages: Sequence[ChatMessage], params: SamplingParams, model: str = ""
    ) -> AsyncIterator[ChatDelta]:
        """Stream an answer; closing the iterator cancels the request."""
        feed = _Feed(asyncio.get_running_loop())
        work = self._loop.submit(_converse(self._runtime.engine, messages, params, model, feed))
        work.add_done_callback(lambda _: feed.close())
        try:
            async for delta in feed:
                yield delta
            await asyncio.wrap_future(work)
        finally:
            work.cancel()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._loop.submit(work))


class _Feed:
    """Deltas from the engine's loop to a screen's: what piles up while the screen is busy is merged into one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: ChatDelta | None = None
        self._closed = False
        self._ready = asyncio.Event()

    def put(self, delta: ChatDelta) -> None:
        """Hand over a delta; called on the engine's loop."""
        self._loop.call_soon_threadsafe(self._merge, delta)

    def close(self) -> None:
        """No more deltas come; called on the engine's loop."""
        self._loop.call_soon_threadsafe(self._end)

    def _merge(self, delta: ChatDelta) -> None:
        if self._pending is not None:
            delta = msgspec.structs.replace(delta, text=self._pending.text + delta.text)
        self._pending = delta
        self._ready.set()

    def _end(self) -> None:
        self._closed = True
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[ChatDelta]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            delta, self._pending = self._pending, None
            if delta is not None:
                yield delta
            elif self._closed:
                return
            if self._closed:
                self._ready.set()


async def _converse(
    engine: Engine, messages: Sequence[ChatMessage], params: SamplingParams, model: str, feed: _Feed
) -> None:
    """Template, submit and forward one chat; runs on the engine's loop."""
    turns = [{"role": turn.role, "content": turn.content} for turn in messages]

    def encode(tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode(tokenizer.apply_chat_template(turns), add_special_tokens=False)

    serving = await engine.serving(model)
    request = GenerateRequest(
        prompt_ids=encode(serving.tokenizer),
        params=params,
        source="chat",
        client="console",
        model=model,
        key=serving.key,
        adapter=serving.adapter,
        encode=encode,
    )
    stream = engine.submit(request)
    try:
        await _forward(stream, feed)
    finally:
        await stream.aclose()


async def _forward(stream: RequestStream, feed: _Feed) -> None:
    loop = asyncio.get_running_loop()
    first_at: float | None = None
    async for delta in stream:
        now = loop.time()
        first_at = now if first_at is None else first_at
        feed.put(_chat_delta(delta, now - first_at))
        if delta.error is not None:
            raise from_info(delta.error)


def _chat_delta(delta: StreamDelta, decoding_s: float) -> ChatDelta:
    rate = (delta.output_tokens - 1) / decoding_s if decoding_s > 0 and delta.output_tokens > 1 else None
    return ChatDelta(
        text=delta.text,
        output_tokens=delta.output_tokens,
        ttft_s=delta.ttft_s,
        tokens_per_s=rate,
        finish=delta.finish,
        prompt_tokens=delta.prompt_tokens,
    )
