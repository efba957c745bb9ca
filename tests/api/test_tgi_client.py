"""huggingface_hub's InferenceClient against the server, as its users use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, OverloadedError, ValidationError
from pydantic import BaseModel

from console.api.server import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, expected_text, letters

KEY = "hf-test"


def completion(prompt: str, count: int) -> str:
    """What the fake model answers."""
    return expected_text(list(prompt.encode()), count, letters)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that wants a key."""
    async with serving(tmp_path, settings=ApiSettings(port=0, api_key=KEY)) as served:
        yield served


async def asked(api: Served, prompt: str, **options: Any) -> Any:
    """What the blocking client gives."""

    def ask() -> Any:
        client = InferenceClient(base_url=api.url, api_key=KEY)
        given = client.text_generation(prompt, **options)
        return list(given) if options.get("stream") else given

    return await asyncio.to_thread(ask)


async def test_a_text(api: Served) -> None:
    assert await asked(api, "Once", max_new_tokens=5, return_full_text=False) == completion("Once", 5)
    assert await asked(api, "Once", max_new_tokens=5, return_full_text=True) == "Once" + completion("Once", 5)


async def test_details(api: Served) -> None:
    answer = await asked(api, "Once", max_new_tokens=3, details=True, return_full_text=False, top_n_tokens=2)
    assert answer.generated_text == completion("Once", 3)
    assert (answer.details.finish_reason, answer.details.generated_tokens) == ("length", 3)
    assert "".join(token.text for token in answer.details.tokens) == completion("Once", 3)


async def test_a_stream(api: Served) -> None:
    assert "".join(await asked(api, "Once", max_new_tokens=5, stream=True)) == completion("Once", 5)


async def test_a_stream_with_details(api: Served) -> None:
    told = await asked(api, "Once", max_new_tokens=3, stream=True, details=True, return_full_text=False)
    assert "".join(event.token.text for event in told) == told[-1].generated_text == completion("Once", 3)
    assert (told[-1].details.finish_reason, told[-1].details.generated_tokens) == ("length", 3)


async def test_the_async_client(api: Served) -> None:
    client = AsyncInferenceClient(base_url=api.url, api_key=KEY)
    text = await client.text_generation("Once", max_new_tokens=5, return_full_text=False, seed=1, do_sample=True)
    pieces = [piece async for piece in await client.text_generation("Once", max_new_tokens=5, stream=True)]
    await client.close()
    assert text == "".join(pieces) == completion("Once", 5)


async def test_chat_completion(api: Served) -> None:
    client = AsyncInferenceClient(base_url=api.url, api_key=KEY)
    answer = await client.chat_completion([{"role": "user", "content": "hello"}], max_tokens=4)
    await client.close()
    assert answer.choices[0].message.content == expected_text(b"user: hello\nassistant: ", 4)


class TgiMessage(BaseModel):
    """As TGI's own client, text_generation 0.7, declares it, which cannot be installed beside newer clients."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: Any | None = None


class TgiChoice(BaseModel):
    """Likewise."""

    index: int
    message: TgiMessage
    logprobs: Any | None
    finish_reason: str
    usage: Any | None = None


class TgiChat(BaseModel):
    """Likewise."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TgiChoice]
    usage: Any


async def test_tgi_s_own_client_can_read_a_chat(api: Served) -> None:
    message = {"role": "user", "content": "hello", "name": None, "tool_calls": None}
    unset = dict.fromkeys(("logit_bias", "logprobs", "n", "repetition_penalty", "seed", "temperature", "tools"))
    asked = {"model": "tgi", "messages": [message], "max_tokens": 4, "stream": False, **unset}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with api.http.post("/v1/chat/completions", json=asked, headers=headers) as response:
        chat = TgiChat(**await response.json())
    assert chat.choices[0].message.content == expected_text(b"user: hello\nassistant: ", 4)
    assert chat.system_fingerprint


async def test_errors_have_the_client_s_own_types(api: Served) -> None:
    with pytest.raises(ValidationError, match="watermark is not supported"):
        await asked(api, "x", watermark=True)


async def test_a_full_queue_is_an_overloaded_error(tmp_path: Path) -> None:
    settings, config = ApiSettings(port=0, api_key=KEY), EngineConfig(worker_host="thread", max_queue=0, max_prompts=1)
    async with serving(tmp_path, settings=settings, config=config) as api:
        with pytest.raises(OverloadedError):
            await asked(api, "x", best_of=2, do_sample=True)


async def test_a_failure_in_a_stream_raises(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, api_key=KEY)
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000)), settings=settings) as api:
        with pytest.raises(GenerationError):
            await asked(api, "x", stream=True)
