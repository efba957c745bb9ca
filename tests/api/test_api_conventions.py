"""What holds for every endpoint: keys, errors in one shape, limits, ids."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from console.api.http.errors import envelope
from console.api.server import ApiSettings
from engine.config import EngineConfig
from engine.errors import LoadCancelled
from tests.api.harness import Served, serving, until
from tests.fakes.backend import FakeBackend, Gate

KEYED = ApiSettings(port=0, api_key="open sesame")
TALK = [{"role": "user", "content": "x"}]
Asked = tuple[str, dict[str, Any]]
ENDINGS: dict[str, tuple[Asked, Any, Any]] = {
    "openai": (("/v1/completions", {"prompt": "x"}), "server_error", "server_error"),
    "openai chat": (("/v1/chat/completions", {"messages": TALK}), "server_error", "server_error"),
    "ericllm": (("/generate", {"prompt": "x"}), "server_error", "server_error"),
    "anthropic": (
        ("/v1/messages", {"model": "fake", "max_tokens": 99, "messages": TALK}),
        "api_error",
        "overloaded_error",
    ),
    "ollama": (("/api/chat", {"model": "fake", "messages": TALK, "stream": False}), None, None),
    "tgi": (("/generate", {"inputs": "x"}), "incomplete_generation", "overloaded"),
    "kobold": (("/api/v1/generate", {"prompt": "x"}), "server_error", "service_unavailable"),
    "llamacpp": (("/completion", {"prompt": "x"}), "server_error", "unavailable_error"),
    "textgen": (("/api/v1/generate", {"prompt": "x", "max_new_tokens": 9}), "server_error", "server_error"),
}
"""By dialect: what is asked, and the type of error, None where its shape has none, that says of an answer that the
operator cancelled, and of one that the server stopped, whose doing it was."""


def type_and_sentence(answer: Any) -> tuple[Any, str]:
    """Of an error in any dialect's shape."""
    match answer:
        case {"error": str(sentence), **others}:
            return others.get("error_type"), sentence
        case {"error": {"type": kind, "message": sentence}} | {"detail": {"type": kind, "msg": sentence}}:
            return kind, sentence
    raise AssertionError(answer)


async def answered(api: Served, asked: Asked) -> tuple[int, Any]:
    """The status and the body."""
    path, body = asked
    async with api.http.post(path, json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "open sesame"}, {"X-API-Key": ""}],
    ids=["none", "wrong", "no scheme", "empty"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/nowhere"])
async def test_without_the_key_nothing_is_told(tmp_path: Path, headers: dict[str, str], path: str) -> None:
    async with serving(tmp_path, settings=KEYED, load=False) as api, api.http.get(path, headers=headers) as response:
        error = (await response.json())["error"]
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "sesame" not in error["message"]


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer open sesame"}, {"X-API-Key": "open sesame"}])
async def test_the_key_is_taken_as_bearer_or_as_x_api_key(tmp_path: Path, headers: dict[str, str]) -> None:
    async with (
        serving(tmp_path, settings=KEYED, load=False) as api,
        api.http.get("/v1/models", headers=headers) as response,
    ):
        assert response.status == 200


async def test_health_and_readiness_need_no_key(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=KEYED) as api:
        for path in ("/health", "/ready"):
            async with api.http.get(path) as response:
                assert response.status == 200


async def test_the_key_is_not_in_the_settings_repr() -> None:
    assert "sesame" not in repr(KEYED)


async def test_an_unknown_path_is_a_404_in_the_common_shape(api: Served) -> None:
    error = await api.refusal("/v1/images", status=404, input="x")
    assert "/v1/images" in error["message"]


async def test_a_wrong_method_is_a_405_that_names_the_right_one(api: Served) -> None:
    async with api.http.get("/v1/chat/completions") as response:
        error = (await response.json())["error"]
        assert (response.status, response.headers["Allow"]) == (405, "POST")
    assert "POST" in error["message"]


async def test_a_body_beyond_the_limit_is_a_413_with_the_limit(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_body_bytes=1000)) as api:
        error = await api.refusal("/generate", status=413, prompt="x" * 2000)
    assert "1000 bytes" in error["message"]


async def test_a_body_that_cannot_be_decompressed_is_a_400(api: Served) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with api.http.post("/generate", data=b"no gzip", headers=headers) as response:
        assert response.status == 400
        assert "error" in await response.json()


async def test_an_unforeseen_failure_is_a_500_without_its_traceback(
    api: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the secret path")

    monkeypatch.setattr(api.engine, "submit", broken)
    error = await api.refusal("/generate", status=500, prompt="x")
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in error["message"]
    assert "the secret path" in caplog.text


async def test_answers_carry_the_client_s_request_id_or_a_new_one(api: Served) -> None:
    async with api.http.get("/v1/models", headers={"X-Request-Id": "mine-1"}) as response:
        assert response.headers["X-Request-Id"] == "mine-1"
    async with api.http.get("/nowhere", headers={"X-Request-Id": "spaced out"}) as response:
        assert len(response.headers["X-Request-Id"]) == 32


async def test_a_stream_carries_a_request_id_and_is_never_cached_or_buffered(api: Served) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    async with api.http.post("/v1/completions", json=body, headers={"X-Request-Id": "s"}) as response:
        await response.read()
    assert response.headers["X-Request-Id"] == "s"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"


async def test_a_full_queue_is_a_429_that_says_when_to_come_back(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_prompts=1, max_queue=1)
    async with (
        serving(tmp_path, FakeBackend(gate=Gate()), config=config) as api,
        api.http.post("/v1/completions", json={"prompt": "a", "stream": True}),
        api.http.post("/v1/completions", json={"prompt": "b", "stream": True}),
        api.http.post("/v1/completions", json={"prompt": "c"}) as response,
    ):
        error = (await response.json())["error"]
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")


async def test_a_request_whose_answers_do_not_all_fit_leaves_none_in_the_queue(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_prompts=1, max_queue=2)
    async with serving(tmp_path, FakeBackend(gate=Gate()), config=config) as api:
        await api.refusal("/v1/completions", status=429, prompt="a", n=9)
        await until(lambda: api.engine.publish().queued + api.engine.publish().running == 0)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_without_a_model_every_endpoint_is_a_503_that_says_so(tmp_path: Path, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    async with serving(tmp_path, load=False) as api, api.http.post(path, json=body) as response:
        error = (await response.json())["error"]
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
    assert error["code"] == "no_model_loaded"
    assert error["message"] == "no model is loaded"


async def test_a_request_that_the_operator_cancels_is_never_a_short_answer(paced_api: Served) -> None:
    api = paced_api
    asking = asyncio.create_task(api.refusal("/generate", status=499, prompt="x"))
    await api.until_row(state="prefill")
    api.engine.cancel(api.engine.publish().requests[0].id)
    assert (await asking)["code"] == "request_cancelled"


@pytest.mark.parametrize("dialect", ENDINGS)
async def test_what_the_operator_cancels_is_said_as_the_server_s_doing(paced_api: Served, dialect: str) -> None:
    asked, kind, _ = ENDINGS[dialect]
    asking = asyncio.create_task(answered(paced_api, asked))
    await paced_api.until_row(state="prefill")
    paced_api.engine.cancel(paced_api.engine.publish().requests[0].id)
    status, answer = await asking
    assert status == 499
    assert type_and_sentence(answer) == (kind, "The request was cancelled by the operator of this server")


@pytest.mark.parametrize("dialect", ENDINGS)
async def test_what_a_stopping_server_ends_or_turns_away_is_said_as_its_doing(paced_api: Served, dialect: str) -> None:
    asked, _, kind = ENDINGS[dialect]
    begun = asyncio.create_task(answered(paced_api, asked))
    await paced_api.until_row(state="prefill")
    stopping = asyncio.create_task(paced_api.server.stop(drain_s=1000))
    await paced_api.draining()
    status, answer = await answered(paced_api, asked)
    assert (status, *type_and_sentence(answer)) == (503, kind, "The server is stopping")
    stopping.cancel()
    await paced_api.server.stop(drain_s=0)
    status, answer = await begun
    stopped = "The server stopped before the answer was complete"
    assert (status, *type_and_sentence(answer)) == (503, kind, stopped)


def test_a_load_that_the_operator_cancels_is_no_fault_of_the_request() -> None:
    kind = envelope(LoadCancelled("the load was cancelled")).error.type
    assert kind == "server_error"


async def test_an_answer_that_its_worker_fails_is_an_error_and_never_a_short_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api:
        error = await api.refusal("/v1/completions", status=500, prompt="x")
    assert error["type"] == "server_error"
