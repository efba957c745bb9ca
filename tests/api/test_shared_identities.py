"""Whose an answer without a genkey is, where several clients go by one key, or by one address where none is needed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from console.api.server import ApiSettings
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, Gate

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
            assert "it cannot be told which are to end" in (await refused.json())["error"]["message"]
        async with api.http.post("/api/v1/stop-stream", headers=MINE) as stopped:
            assert (await stopped.json()) == {"results": "success"}
        rest = [json.loads(message.data) async for message in socket]
    assert rest[-1]["event"] == "stream_end"
