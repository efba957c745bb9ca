"""Whose an answer without a genkey is, where several clients go by one key, or by one address where none is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from console.api.http.serial_thread import SerialThread
from console.api.server import ApiSettings
from engine.text.chat_template import ChatTemplate
from tests.api.harness import Served, bearer, serving
from tests.fakes.backend import FakeBackend, Gate

pytestmark = pytest.mark.long

MINE, OTHERS = {"User-Agent": "SillyTavern/1.12"}, {"User-Agent": "curl/8.5"}
BODY = {"prompt": "Once", "max_length": 50}


async def aborted(api: Served, headers: dict[str, str]) -> str:
    async with api.http.post("/api/extra/abort", headers=headers) as response:
        return str((await response.json())["success"])


async def checked(api: Served, headers: dict[str, str]) -> str:
    answer = await api.get("/api/extra/generate/check", headers=headers)
    return str(answer["results"][0]["text"])


@pytest.mark.parametrize("has_key", [False, True], ids=["no keys", "the key of the settings"])
async def test_another_program_at_the_same_address_neither_reads_nor_ends_an_answer(
    tmp_path: Path, has_key: bool
) -> None:
    settings = ApiSettings(port=0, api_key="sesame" if has_key else None)
    key = {"X-API-Key": "sesame"} if has_key else {}
    async with (
        serving(tmp_path, FakeBackend(gate=Gate(4)), settings=settings) as api,
        api.http.post("/api/extra/generate/stream", json=BODY, headers=MINE | key) as response,
    ):
        await response.content.readline()
        assert await checked(api, OTHERS | key) == ""
        assert await aborted(api, OTHERS | key) == "false"
        assert await checked(api, MINE | key) != ""
        assert await aborted(api, MINE | key) == "true"


async def test_where_two_programs_have_answers_under_way_neither_is_read_or_ended_without_a_genkey(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, FakeBackend(gate=Gate(8))) as api,
        api.http.post("/api/extra/generate/stream", json=BODY, headers=MINE) as mine,
        api.http.post("/api/extra/generate/stream", json=BODY | {"genkey": ""}, headers=OTHERS) as others,
    ):
        await asyncio.gather(mine.content.readline(), others.content.readline())
        for headers in (MINE, OTHERS):
            assert await checked(api, headers) == ""
            assert await aborted(api, headers) == "false"


async def test_a_genkey_says_whose_an_answer_is_whatever_program_asks(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, FakeBackend(gate=Gate(4))) as api,
        api.http.post("/api/extra/generate/stream", json=BODY | {"genkey": "K1"}, headers=MINE) as response,
    ):
        await response.content.readline()
        async with api.http.post("/api/extra/abort", json={"genkey": "K1"}, headers=OTHERS) as ended:
            assert (await ended.json())["success"] == "true"


async def test_stop_stream_says_that_it_cannot_tell_whose_answers_are_meant(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, FakeBackend(gate=Gate(3))) as api,
        api.http.ws_connect("/api/v1/stream", headers=MINE) as socket,
    ):
        await socket.send_str(json.dumps({"prompt": "Once", "max_new_tokens": 50}))
        assert (await socket.receive_json())["event"] == "text_stream"
        async with api.http.post("/api/v1/stop-stream", headers=OTHERS) as refused:
            assert refused.status == 400
            assert "so the one to stop is unknown" in (await refused.json())["error"]["message"]
        async with api.http.post("/api/v1/stop-stream", headers=MINE) as stopped:
            assert (await stopped.json()) == {"results": "success"}
        rest = [json.loads(message.data) async for message in socket]
    assert rest[-1]["event"] == "stream_end"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"max_tokens": 1}),
        ("/v1/messages", {"max_tokens": 1, "model": "fake"}),
        ("/api/chat", {"model": "fake", "options": {"num_predict": 1}, "stream": False}),
    ],
)
async def test_work_on_a_long_conversation_is_done_for_the_client_that_sends_it(
    keyed: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    clients, run, render = set[str](), SerialThread.run, ChatTemplate.render

    async def noted_run(thread: SerialThread, work: Callable[[], object], client: str = "") -> object:
        clients.add(f"thread: {client}")
        return await run(thread, work, client)

    async def noted_render(template: ChatTemplate, messages: Any, client: str = "", /, **options: Any) -> str:
        clients.add(f"template: {client}")
        return await render(template, messages, client, **options)

    monkeypatch.setattr(SerialThread, "run", noted_run)
    monkeypatch.setattr(ChatTemplate, "render", noted_render)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 50 + [
        {"role": "user", "content": "x"}
    ]
    sent = json.dumps({**body, "messages": messages}) + " " * 40_000
    async with keyed.http.post(path, data=sent, headers=await bearer(keyed, "alice", "use")) as response:
        assert response.status == 200, await response.text()
    assert clients == {"thread: alice", "template: alice"}
