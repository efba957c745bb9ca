"""The ollama Python client against the server, as its users use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import ollama
import pytest

from console.api.server import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.api.test_api_thinking import ENDED, THINKS, THOUGHT
from tests.api.test_api_tools import serving_tools
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying, vector_of

pytestmark = pytest.mark.usefixtures("only_loopback")

KEY = "sesame"
PROMPT = b"user: hello\nassistant: "


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that wants a key."""
    async with serving(tmp_path, settings=ApiSettings(port=0, api_key=KEY)) as served:
        yield served


def client_of(api: Served, key: str = KEY) -> ollama.AsyncClient:
    """A client with a key."""
    return ollama.AsyncClient(host=api.url, headers={"Authorization": f"Bearer {key}"})


def hello() -> list[ollama.Message]:
    return [ollama.Message(role="user", content="hello")]


async def test_a_conversation(api: Served) -> None:
    options = ollama.Options(num_predict=6, temperature=0.5, top_k=3, repeat_penalty=1.2, num_ctx=2048, num_gpu=1)
    answer = await client_of(api).chat("fake", hello(), options=options, keep_alive="10m")
    assert answer.message.content == expected_text(PROMPT, 6)
    assert (answer.done_reason, answer.eval_count, answer.prompt_eval_count) == ("length", 6, len(PROMPT))
    assert answer.total_duration
    assert answer.eval_duration


async def test_a_streamed_conversation(api: Served) -> None:
    parts = [part async for part in await client_of(api).chat("fake", hello(), options={"num_predict": 6}, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == expected_text(PROMPT, 6)
    assert [part.done for part in parts][-1]
    assert parts[-1].eval_count == 6


async def test_a_prompt_and_what_follows_it(api: Served) -> None:
    client = client_of(api)
    first = await client.generate("fake", "hello", options={"num_predict": 3})
    assert first.response == expected_text(PROMPT, 3)
    assert first.context
    await client.generate("fake", "more", context=first.context, options={"num_predict": 1}, think=False)
    prompt = bytes(api.backend.submitted[-1].prompt_ids)
    assert prompt == PROMPT + expected_text(PROMPT, 3).encode() + b"user: more\nassistant: "


async def test_a_streamed_prompt_with_logprobs(api: Served) -> None:
    stream = await client_of(api).generate("fake", "hello", options={"num_predict": 6}, logprobs=True, stream=True)
    parts = [part async for part in stream]
    assert "".join(part.response or "" for part in parts) == expected_text(PROMPT, 6)
    assert "".join(entry.token for part in parts for entry in part.logprobs or ()) == expected_text(PROMPT, 6)


async def test_a_stop_string(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one two three"))) as api:
        answer = await ollama.AsyncClient(host=api.url).generate("fake", ">", options={"stop": [" three"]})
    assert (answer.response, answer.done_reason) == ("one two", "stop")


async def test_thinking(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        client = ollama.AsyncClient(host=api.url)
        answer = await client.chat("fake", hello(), think=True)
        parts = [part.message async for part in await client.chat("fake", hello(), think=True, stream=True)]
        written = await client.generate("fake", "hello", think="high")
        shown = await client.show("fake")
    assert (answer.message.thinking, answer.message.content) == (THOUGHT, "Yes.")
    assert "".join(part.thinking or "" for part in parts) == THOUGHT
    assert "".join(part.content or "" for part in parts) == "Yes."
    assert (written.thinking, written.response) == (THOUGHT, "Yes.")
    assert "thinking" in (shown.capabilities or ())


async def test_models(api: Served) -> None:
    client = client_of(api)
    [model] = (await client.list()).models
    assert model.model == "fake:latest"
    assert model.details is not None
    assert model.details.family == "llama"
    assert (await client.chat(model.model, hello(), options={"num_predict": 1})).done
    shown = await client.show("fake")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 4096
    assert [running.context_length for running in (await client.ps()).models] == [4096]


async def test_vectors(api: Served) -> None:
    client = client_of(api)
    answer = await client.embed("fake", ["ab", "c"])
    assert [list(vector) for vector in answer.embeddings] == [vector_of(b"ab"), vector_of(b"c")]
    assert list((await client.embeddings("fake", "ab")).embedding) == vector_of(b"ab")


async def test_the_blocking_client(api: Served) -> None:
    def ask() -> str:
        client = ollama.Client(host=api.url, headers={"X-API-Key": KEY})
        stream = client.chat("fake", hello(), options={"num_predict": 6}, stream=True)
        return "".join(part.message.content or "" for part in stream)

    assert await asyncio.to_thread(ask) == expected_text(PROMPT, 6)


async def test_errors_carry_their_sentence_and_status(api: Served) -> None:
    client = client_of(api)
    with pytest.raises(ollama.ResponseError, match="available: fake") as missing:
        await client.chat("llama3", hello())
    with pytest.raises(ollama.ResponseError, match="suffix is not supported") as refused:
        await client.generate("fake", "x", suffix="y")
    with pytest.raises(ollama.ResponseError, match="/api/pull is not supported"):
        await client.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="key is not valid") as stranger:
        await client_of(api, key="wrong").chat("fake", hello())
    assert [error.value.status_code for error in (missing, refused, stranger)] == [404, 400, 401]


async def test_a_failure_in_a_stream_raises(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api:
        stream = await ollama.AsyncClient(host=api.url).generate("fake", "x", stream=True)
        with pytest.raises(ollama.ResponseError):
            async for _ in stream:
                pass


async def test_closing_a_stream_early_cancels_the_request(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread")
    async with serving(tmp_path, FakeBackend(gate=Gate(3)), config=config) as api:
        stream = await ollama.AsyncClient(host=api.url).generate("fake", "x", stream=True)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await api.until_row(state="finished", finish="cancelled")
