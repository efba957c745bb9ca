"""Answers that run out of time end with what they have, in each dialect; one that has nothing is a 504."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from tests.api.harness import Served, serving, text_of
from tests.fakes.backend import FakeBackend, Gate, expected_text

CHAT = {"messages": [{"role": "user", "content": "x"}]}
CHAT_TOKENS = b"user: x\nassistant: "


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose worker makes three steps and then none."""
    async with serving(tmp_path, FakeBackend(gate=Gate(3))) as served:
        yield served


async def lines(api: Served, **body: Any) -> list[dict[str, Any]]:
    """The lines of a /generate stream."""
    async with api.http.post("/generate", json={"stream": True, **body}) as response:
        assert response.status == 200
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def test_a_completion_ends_with_what_it_has(api: Served) -> None:
    answer = await api.cut_off(api.post("/v1/completions", prompt="x", max_tokens=100), tokens=3)
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert answer["choices"][0]["text"] == expected_text(b"x", 3)
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_completion_s_stream_ends_regularly_with_what_it_has(api: Served) -> None:
    events = await api.cut_off(api.events("/v1/completions", prompt="x", max_tokens=100), tokens=3)
    assert text_of(events) == expected_text(b"x", 3)
    assert events[-2]["choices"][0]["finish_reason"] == "timeout"
    assert events[-1] == "[DONE]"


async def test_a_chat_answer_ends_with_what_it_has(api: Served) -> None:
    choice = (await api.cut_off(api.post("/v1/chat/completions", **CHAT), tokens=3))["choices"][0]
    assert choice["finish_reason"] == "timeout"
    assert choice["message"]["content"] == expected_text(CHAT_TOKENS, 3)


async def test_a_chat_stream_ends_regularly_with_what_it_has(api: Served) -> None:
    events = await api.cut_off(api.events("/v1/chat/completions", **CHAT), tokens=3)
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert said == expected_text(CHAT_TOKENS, 3)
    assert events[-2]["choices"][0]["finish_reason"] == "timeout"
    assert events[-1] == "[DONE]"


async def test_generate_says_that_an_answer_was_cut_and_has_the_field_in_no_other_case(api: Served) -> None:
    answer = await api.cut_off(api.post("/generate", prompt="x"), tokens=3)
    assert answer == {"text": "x" + expected_text(b"x", 3), "finish_reason": "timeout"}
    assert api.backend.gate is not None
    api.backend.gate.open()
    assert "finish_reason" not in await api.post("/generate", prompt="x", max_tokens=2)


async def test_generate_s_stream_says_which_answers_were_cut(api: Served) -> None:
    found = await api.cut_off(lines(api, prompt=["x", "y"], max_tokens=100), tokens=5)
    assert "finish_reason" not in found[0]
    assert found[-1]["finish_reason"] == ["timeout", "timeout"]
    assert found[-1]["text"][0].startswith("x" + expected_text(b"x", 2))


async def test_an_answer_without_a_token_is_empty_where_another_one_has_some(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_prompts=1)
    async with serving(tmp_path, FakeBackend(gate=Gate(3)), config=config) as api:
        asking = api.post("/v1/completions", prompt="x", n=2, seed=1, max_tokens=100)
        choices = (await api.cut_off(asking, tokens=3))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["timeout", "timeout"]
    assert [len(choice["text"]) for choice in choices] == [3, 0]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_a_request_without_any_token_is_a_504_with_the_limit(tmp_path: Path, path: str) -> None:
    config = EngineConfig(worker_host="thread", timeout_s=0.05)
    body = CHAT if "chat" in path else {"prompt": "x"}
    async with serving(tmp_path, FakeBackend(gate=Gate()), config=config) as api:
        error = await api.refusal(path, status=504, **body)
        assert (error["code"], error["type"]) == ("request_timeout", "server_error")
        assert "0.05 s" in error["message"]
        if path != "/generate":
            assert [event["error"]["code"] for event in await api.events(path, **body)] == ["request_timeout"]


async def test_a_request_that_waited_in_the_queue_all_its_time_is_a_504(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_prompts=1)
    async with serving(tmp_path, FakeBackend(gate=Gate(1)), config=config) as api:
        first = asyncio.create_task(api.post("/generate", prompt="x"))
        await api.until_row(state="decode")
        waiting = asyncio.create_task(api.refusal("/generate", status=504, prompt="y"))
        await api.until_row(state="queued")
        api.expire()
        assert (await first)["finish_reason"] == "timeout"
        assert (await waiting)["code"] == "request_timeout"
