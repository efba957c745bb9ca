"""A console elsewhere: what it is shown as events, and what it may ask for by name."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from console.api.server import ApiServer, ApiSettings
from console.link.frames import Frame, FrameEvent, FrameReader
from console.link.rpc import CALLS, GROUPS, LOCAL_CALLS, STREAMS
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelLoadFailed
from engine.snapshot import Second
from tests.api.harness import until
from tests.api.operators import FolderOperator
from tests.fakes import scenes
from tests.fakes.link import FakeLink


@asynccontextmanager
async def shown(folder: Path, link: FakeLink, **settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A server that shows `link`, and a client of it."""
    engine = Engine(EngineConfig(worker_host="thread"))
    server = ApiServer(engine, ApiSettings(port=0, **settings), FolderOperator(folder).admit, lambda: link)
    await engine.start()
    await server.start()
    try:
        async with aiohttp.ClientSession(server.status().url) as http:
            yield http
    finally:
        await server.stop(drain_s=0.0)
        await engine.close(drain_s=0.0)


async def frames(http: aiohttp.ClientSession, query: str = "?hz=10") -> AsyncIterator[tuple[FrameEvent, Frame]]:
    """Events as they come, with the frame that each leads to."""
    reader = FrameReader()
    async with http.get(f"/admin/events{query}") as response:
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                event = msgspec.json.decode(line[6:], type=FrameEvent)
                yield event, reader.frame(event)


async def test_events_begin_with_a_whole_frame_and_go_on_with_what_changed(tmp_path: Path) -> None:
    link = FakeLink(scenes.busy())
    async with shown(tmp_path, link) as http:
        events = frames(http)
        event, frame = await anext(events)
        assert event.full is not None
        assert frame == Frame(snapshot=link.current, api=link.api_status())
        history = (*link.current.history[1:], Second(at=scenes.NOW + 1, output_tokens=5))
        link.show(msgspec.structs.replace(link.current, at=scenes.NOW + 1, history=history))
        event, frame = await anext(events)
        assert event.full is None
        assert event.delta is not None
        spans = event.delta["snapshot"]["history"][1]
        assert spans[0] == [1, len(history) - 1]
        assert len(spans) == 2
        assert frame.snapshot == link.current
        await events.aclose()


async def test_a_moment_in_which_nothing_changed_is_no_event(tmp_path: Path) -> None:
    link = FakeLink(scenes.busy())
    async with shown(tmp_path, link, ping_s=0.05) as http, http.get("/admin/events?hz=10") as response:
        lines = [line async for line in _first(response, 9)]
    assert sum(line.startswith(b"data: ") for line in lines) == 1
    assert b": ping\n" in lines


async def _first(response: aiohttp.ClientResponse, count: int) -> AsyncIterator[bytes]:
    async for line in response.content:
        yield line
        count -= 1
        if not count:
            return


@pytest.mark.parametrize("hz", ["0", "11", "fast", "nan"])
async def test_a_rate_that_cannot_be_is_refused(tmp_path: Path, hz: str) -> None:
    async with shown(tmp_path, FakeLink()) as http, http.get(f"/admin/events?hz={hz}") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "hz"


async def test_a_server_that_stops_tells_who_watches_and_does_not_wait_for_it(tmp_path: Path) -> None:
    link = FakeLink()
    engine = Engine(EngineConfig(worker_host="thread"))
    server = ApiServer(engine, ApiSettings(port=0), FolderOperator(tmp_path).admit, lambda: link)
    await engine.start()
    await server.start()
    async with aiohttp.ClientSession(server.status().url) as http, http.get("/admin/events?hz=0.1") as response:
        await response.content.readline()
        async with asyncio.timeout(60):
            await server.stop(drain_s=1000.0)
        assert "The server is stopping" in (await response.text())
    await engine.close(drain_s=0.0)


async def test_a_call_that_only_looks_is_a_get_with_its_arguments_in_the_query(tmp_path: Path) -> None:
    link = FakeLink()
    async with shown(tmp_path, link) as http, http.get("/admin/call/engine.logs?after=2") as response:
        total, entries = (await response.json())["result"]
    assert total == 3
    assert [entry["message"] for entry in entries] == ["port 8000 is taken"]


async def test_a_call_that_changes_something_takes_post_alone(tmp_path: Path) -> None:
    link = FakeLink()
    async with shown(tmp_path, link) as http:
        async with http.get("/admin/call/engine.unload") as response:
            assert response.status == 405
        async with http.post("/admin/call/engine.reconfigure", json={"num_workers": 3}) as response:
            assert await response.json() == {"result": None}
    assert link.commands == [("reconfigure", {"num_workers": 3})]


async def test_an_order_is_carried_out_where_its_client_leaves(tmp_path: Path) -> None:
    link = FakeLink()
    link.hold("unload")
    async with shown(tmp_path, link) as http:
        leaving = asyncio.create_task(_post(http, "/admin/call/engine.unload"))
        await until(lambda: link.commands != [])
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert link.current.workers, "it is held"
        link.release("unload")
        await until(lambda: not link.current.workers)
    assert link.commands == [("unload", {})]


async def test_an_order_that_fails_after_its_client_left_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def fails(*_: object, **__: object) -> None:
        begun.set()
        await goes_on.wait()
        raise ModelLoadFailed("it is stuck")

    caplog.set_level(logging.INFO)
    link = FakeLink()
    monkeypatch.setattr(link, "unload", fails)
    async with shown(tmp_path, link) as http:
        leaving = asyncio.create_task(_post(http, "/admin/call/engine.unload"))
        await begun.wait()
        leaving.cancel()
        await until(lambda: " 499 in " in caplog.text)
        goes_on.set()
        await until(lambda: "engine.unload failed: it is stuck" in caplog.text)
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_bytes_that_are_no_text_are_one_sentence(tmp_path: Path) -> None:
    async with (
        shown(tmp_path, FakeLink()) as http,
        http.post("/admin/call/engine.unload", data=b'{"model": "\xff"}') as response,
    ):
        assert response.status == 400
        assert "not valid JSON" in (await response.json())["error"]["message"]


async def _post(http: aiohttp.ClientSession, path: str) -> None:
    async with http.post(path, json={}):
        pass


async def test_why_an_order_failed_is_told_as_an_event_to_who_wants_events(tmp_path: Path) -> None:
    link = FakeLink()
    link.failures["load"] = ModelLoadFailed("the weights are cut off")
    headers = {"Accept": "text/event-stream"}
    async with (
        shown(tmp_path, link) as http,
        http.post("/admin/call/models.load", json={"model": "demo"}, headers=headers) as response,
    ):
        said = (await response.text()).removeprefix("data: ")
    assert json.loads(said)["error"]["message"] == "the weights are cut off"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("engine.fly", {}, "Unknown call engine.fly"),
        ("models.load", {"model": "demo", "fast": True}, "fast"),
        ("models.load", {}, "model"),
        ("engine.reconfigure", {"num_workers": "three"}, "num_workers"),
        ("models.load", {"model": "/etc/passwd"}, "is in none of the models folders"),
        ("engine.attach", {"name": "a", "path": "/etc"}, "is in none of the models folders"),
        (
            "benches.start",
            {"order": {"bench": "users", "server": {"url": "http://x"}}},
            "only by a console on that machine",
        ),
        ("benches.start", {"order": {"bench": "serve", "settings": {"trace": "/etc/passwd"}}}, "a trace is a file on"),
        ("tuning.start", {"order": {"trace": "/etc/passwd"}}, "a trace is a file on"),
    ],
)
async def test_what_cannot_be_called_is_one_sentence(tmp_path: Path, path: str, body: object, said: str) -> None:
    link = FakeLink()
    async with shown(tmp_path, link) as http, http.post(f"/admin/call/{path}", json=body) as response:
        assert response.status in (400, 404)
        assert said in (await response.json())["error"]["message"]
    assert link.commands == []


async def test_without_the_key_nothing_is_shown(tmp_path: Path) -> None:
    async with shown(tmp_path, FakeLink(), api_key="sesame") as http:
        for path in ("/admin/events", "/admin/call/engine.logs"):
            async with http.get(path) as response:
                assert response.status == 401


async def test_reading_the_log_is_no_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "api")
    async with shown(tmp_path, FakeLink()) as http:
        async with http.get("/admin/call/engine.logs"):
            pass
        async with http.post("/admin/call/engine.unload", json={}):
            pass
    said = [record.getMessage() for record in caplog.records if record.name == "api.access"]
    assert [line.split()[:2] for line in said if "/admin/" in line] == [["POST", "/admin/call/engine.unload"]]


def test_every_method_of_every_protocol_is_a_call_or_kept_at_home_for_a_reason() -> None:
    methods = {
        f"{group}.{name}"
        for group, protocol in GROUPS.items()
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert methods == CALLS.keys() | LOCAL_CALLS.keys() | STREAMS


def test_every_call_is_written_down() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "admin-api.md").read_text(encoding="utf-8")
    assert [name for name in CALLS if f"`{name}`" not in page] == []
