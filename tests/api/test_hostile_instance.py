"""An instance that means harm to who looks at it: each console gets one sentence, and none stands still or grows."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from aiohttp import web

from console.link.chat import ChatDelta, ChatMessage, DeltaFeed
from console.link.frames import Frame, FrameEvent, to_plain
from console.link.remote import chat, http
from console.link.remote.frame_reader import Connection
from console.link.remote.http import OutOfReach, address_of
from console.link.remote.link import RemoteLink
from console.link.rpc import as_link
from console.runtime.loops import LoopThread
from engine.config import SamplingParams
from engine.errors import EngineError
from tests.fakes import scenes
from tests.fakes.bounds import within_bounds

MIB = 2**20
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
HI = [ChatMessage(role="user", content="hi")]


def frame() -> Any:
    """A frame as JSON has it; its log has as many lines as are fetched: none."""
    return msgspec.json.decode(msgspec.json.encode(to_plain(Frame(snapshot=scenes.busy()))))


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def whole(body: bytes, status: int = 200, **headers: str) -> Answer:
    """An answer with this body."""

    async def answer(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=body, headers=named)

    return answer


def packed(start: bytes) -> Answer:
    """An answer that unpacks to `start` and 64 MiB of zeros."""
    packer = zlib.compressobj(wbits=31)
    parts = [packer.compress(start), *(packer.compress(bytes(MIB)) for _ in range(64)), packer.flush()]
    return whole(b"".join(parts), Content_Encoding="gzip")


def endless(start: bytes, chunk: bytes, status: int = 200) -> Answer:
    """An answer that never ends."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        with suppress(ConnectionError):  # the console has had enough
            await response.write(start)
            while True:
                await response.write(chunk)
        return response

    return answer


@asynccontextmanager
async def attached(*, host: str = "127.0.0.1", **answers: Answer) -> AsyncIterator[RemoteLink]:
    """A link to a server with these answers: `events`, `logs`, `call` for all other calls, `chat`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        path = request.path
        name = (
            "events"
            if path == "/admin/events"
            else "logs"
            if path.endswith("engine.logs")
            else "chat"
            if path.startswith("/v1/")
            else "call"
        )
        return await answers.get(name, whole(b"{}", 404))(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    loop = LoopThread("remote")
    link = RemoteLink(address_of(f"{host}:{site.port}"), loop=loop, hz=10)
    try:
        yield link
    finally:
        await asyncio.to_thread(link.close)
        loop.stop()
        await runner.cleanup()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not met():  # noqa: ASYNC110 - another thread does it
            await asyncio.sleep(0.005)


async def lost(link: RemoteLink) -> str:
    """Why connection lost: one clean line."""
    await until(lambda: link.standing().reach in ("lost", "refused"))
    said = link.standing().reason
    assert said.isprintable()
    assert len(said) < 1000
    return said


def doubling() -> bytes:
    """A frame with one second of history, and changes of 60 bytes that double it."""
    first = frame()
    first["snapshot"]["history"] = first["snapshot"]["history"][:1]
    changes = [{"snapshot": {"history": [0, [[0, 2**n], [0, 2**n]]]}} for n in range(24)]
    return event({"full": first}) + b"".join(event({"delta": change}) for change in changes)


def with_field(path: tuple[str, ...], value: object) -> bytes:
    """The event of a frame with this value at a path."""
    first = frame()
    inner = first
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return event({"full": first})


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (endless(b"data: ", b"x" * 2**16), "sends more than 16 MiB before an event ends"),
        (endless(b"", b": nothing new\n" * 5000), "sends more than 16 MiB before an event ends"),
        (endless(b"", b"\n" * 2**16), "sends more than 16 MiB before an event ends"),
        (whole(b"data: [" + b"[]," * (4 * MIB) + b"[]]\n\n"), "holds more than 500,000 values"),
        (whole(b"data: " + b"[" * 10**5 + b"\n\n"), "nested too deeply"),
        (whole(b"data: " + b"9" * 400 + b"\n\n"), "a number out of range"),
        (whole(b'data: "\xff"\n\n'), "invalid JSON"),
        (whole(b"data: [1, 2]\n\n"), "has a different version"),
        (whole(b"data: 5\n\n"), "has a different version"),
        (whole(b'data: {"error": 5}\n\n'), "no cause given"),
        (whole(b'data: {"error": {"code": [], "message": {}, "param": 1e18}}\n\n'), "{}"),
        (whole(event({"error": {"message": "\x1b]0;x\x07" * 10_000}})), r"\x1b]0;x\x07"),
        (whole(event({"full": 5})), "has a different version"),
        (whole(event({"full": [], "delta": {}})), "has a different version"),
        (whole(event({"delta": {"at": [1]}})), "has a different version"),
        (whole(doubling()), "has a different version"),
        (whole(with_field(("snapshot", "at"), "now")), "has a different version"),
        (whole(with_field(("snapshot", "requests"), 7)), "has a different version"),
        (whole(with_field(("snapshot", "status", "spec", "path"), 7)), "has a different version"),
        (whole(with_field(("api",), None)), "has a different version"),
        (whole(with_field(("snapshot", "log_total"), -1) + event({"delta": {"gone": None}})), "a different version"),
        (packed(event({"full": 5})), "ended the connection"),
        (whole(b"x" * 10_000, 302, Location="http://127.0.0.1:1/"), "not EricLLM (HTTP 302)"),
        (endless(b"", b"x" * 2**16, 500), "not EricLLM (HTTP 500)"),
        (whole(b"[" * MIB, 400), "not EricLLM (HTTP 400)"),
        (whole(b'{"error": {"message": ["no"]}}', 401), "['no']"),
    ],
)
async def test_whatever_it_sends_is_one_sentence(stream: Answer, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with within_bounds(http.MAX_BYTES), caplog.at_level(logging.INFO):
        async with attached(events=stream, logs=whole(b'{"result": [3, []]}')) as link:
            assert said in await lost(link)
    assert "Traceback" not in caplog.text
    assert all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (whole(b"5"), "has a different version"),
        (whole(b"[]"), "has a different version"),
        (whole(b'{"result": [-1, []]}'), "has a different version"),
        (whole(b'{"result": [' + b"9" * 300 + b", []]}"), "a number out of range"),
        (whole(b'{"result": [1, [{"at": "now"}]]}'), "has a different version"),
        (endless(b"[", b" " * 2**16), "sends more than 16 MiB in one answer"),
        (packed(b""), "invalid JSON"),
    ],
)
async def test_whatever_its_log_is_is_one_sentence(log: Answer, said: str, caplog: pytest.LogCaptureFixture) -> None:
    first = with_field(("snapshot", "log_total"), 10**6)
    with within_bounds(http.MAX_BYTES):
        async with attached(events=whole(first), logs=log) as link:
            assert said in await lost(link)
    assert all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (whole(b"data: 5\n\n"), "has a different version"),
        (whole(b'data: {"result": 5}\n\n'), "has a different version"),
        (whole(b'data: {"result": {"' + b"x" * 1000 + b'": 1}}\n\n'), "has a different version"),
        (whole(b"data: " + b'{"result": [' * 10**5 + b"\n\n"), "nested too deeply"),
        (whole(b"\n"), "closed the connection too early"),
        (endless(b"data: ", b"[" * 2**16), "sends more than 16 MiB before an event ends"),
    ],
)
async def test_whatever_it_answers_to_a_command_is_one_sentence(answer: Answer, said: str) -> None:
    with within_bounds(http.MAX_BYTES):
        async with attached(events=alive(), call=answer) as link:
            await until(lambda: link.standing().reach == "live")
            with pytest.raises(EngineError, match=said):
                await as_link(link).models.estimate("demo")


def alive() -> Answer:
    """A frame, and then nothing for as long as the console stays."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(with_field(("snapshot", "log_total"), 0))
        await asyncio.Event().wait()
        return response

    return answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (whole(b"data: 5\n\n"), "sent an unreadable answer"),
        (whole(b'data: {"choices": 5}\n\n'), "sent an unreadable answer"),
        (whole(b'data: {"choices": [{"delta": {"content": 5}}]}\n\n'), "sent an unreadable answer"),
        (whole(b'data: {"choices": [{"delta": null}]}\n\n'), "sent an unreadable answer"),
        (whole(b'data: {"choices": [{"finish_reason": {}}]}\n\n'), "sent an unreadable answer"),
        (
            whole(b'data: {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": "x"}}\n\n'),
            "sent an unreadable answer",
        ),
        (
            whole(b'data: {"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 1e18}}\n\n'),
            "sent an unreadable answer",
        ),
        (
            endless(b"", event({"choices": [{"delta": {"content": "x" * 2**16}}]})),
            f"an answer of more than {chat.MAX_ANSWER:,} characters",
        ),
        (whole(b'data: {"choices": []}\n\n' * 100_000), "ended the connection before the answer was complete"),
    ],
)
async def test_whatever_it_answers_to_a_chat_is_one_sentence(answer: Answer, said: str) -> None:
    with within_bounds(http.MAX_BYTES):
        async with attached(events=alive(), chat=answer) as link:
            await until(lambda: link.standing().reach == "live")
            with pytest.raises(OutOfReach, match=said):
                async for _ in as_link(link).conversation.chat(HI, SamplingParams()):
                    pass


async def test_cookies_are_not_kept() -> None:
    seen: list[str] = []

    async def events(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Cookie", ""))
        return web.Response(body=b"data: 5\n\n", headers={"Set-Cookie": f"c{len(seen)}=1"})

    async with attached(host="localhost", events=events) as link:  # none are kept of a number
        await until(lambda: len(seen) == 2)
        assert link.standing().stale
    assert seen == ["", ""]


class Flooding:
    """An instance that sends a hundred frames at once."""

    address = address_of("gpu1")

    async def events(self, path: str, **_: Any) -> AsyncIterator[Any]:
        yield to_plain(FrameEvent(full=frame()))
        for _ in range(99):
            yield {"delta": {}}
        raise OutOfReach("gpu1 cannot be reached: connection refused")

    async def get(self, path: str, query: Any = None) -> Any:
        return {"result": [3, []]}


async def test_of_a_flood_of_frames_no_more_are_taken_than_four_times_what_was_asked_for() -> None:
    clock, waited = [100.0], []

    async def pause(seconds: float) -> None:
        waited.append(seconds)
        clock[0] += seconds
        if len(waited) == 100:
            raise asyncio.CancelledError

    connection = Connection("gpu1:8000", 2.0, lambda: clock[0], pause)
    with pytest.raises(asyncio.CancelledError):
        await connection.follow(Flooding())  # type: ignore[arg-type]
    assert waited == [*[pytest.approx(1 / 8)] * 99, 0.5]


async def test_of_words_that_come_at_once_a_screen_that_is_busy_gets_one_piece() -> None:
    loop = asyncio.get_running_loop()
    feed = DeltaFeed(loop)
    scheduled = []
    feed._loop = Scheduling(loop, scheduled)  # type: ignore[assignment]
    for number in range(10_000):
        feed.put(ChatDelta(text="x", output_tokens=number))
    feed.close()
    assert [delta async for delta in feed] == [ChatDelta(text="x" * 10_000, output_tokens=9999)]
    assert len(scheduled) == 2


class Scheduling:
    """A loop that writes down what it is given to call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, scheduled: list[object]) -> None:
        self._loop, self._scheduled = loop, scheduled

    def call_soon_threadsafe(self, callback: Any) -> None:
        self._scheduled.append(callback)
        self._loop.call_soon_threadsafe(callback)
