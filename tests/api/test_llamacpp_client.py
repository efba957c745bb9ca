"""llamacpp-client and SillyTavern's type llama.cpp against the server, as their users use them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from llamacpp_client import LlamaCppClient, LlamaCppServerAddress

from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, saying
from tests.fakes.model import EOS_ID
from tests.fakes.sillytavern import LLAMA_NAMES, SEQUENCE_BREAKERS, SHARED

SILLYTAVERN: dict[str, Any] = {
    **SHARED,
    **LLAMA_NAMES,
    "dry_sequence_breakers": SEQUENCE_BREAKERS,
    "api_type": "llamacpp",
    "api_server": "http://127.0.0.1:8080/",
    "n_probs": 0,
    "samplers": [
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
        "adaptive_p",
    ],
    "logit_bias": [[97, -5], [98, False]],
    "grammar": "",
    "cache_prompt": True,
}
"""What it posts to /completion."""


@pytest.fixture
async def api(tmp_path: Path, only_loopback: None) -> AsyncIterator[Served]:
    """A server whose model ends its answer by itself."""
    async with serving(tmp_path, FakeBackend(reply=saying("one END", then=EOS_ID))) as served:
        yield served


@pytest.fixture
def client(api: Served) -> LlamaCppClient:
    """A client of the server."""
    place = urlsplit(api.url)
    assert place.hostname is not None
    assert place.port is not None
    return LlamaCppClient([LlamaCppServerAddress(place.hostname, place.port)])


async def test_a_whole_completion(api: Served, client: LlamaCppClient) -> None:
    answer = await asyncio.to_thread(client.new_completion, "hello", n_predict=20, stop=["END"], repeat_penalty=1.0)
    assert (answer.content, answer.stop_type, answer.truncated) == ("one ", "word", False)
    assert (answer.tokens_evaluated, answer.tokens_cached) == (5, 0)
    assert answer.tokens_predicted == api.engine.publish().requests[0].output_tokens


async def test_a_streamed_completion(api: Served, client: LlamaCppClient) -> None:
    chunks = await asyncio.to_thread(lambda: list(client.new_stream_completion("hello", repeat_penalty=1.0)))
    *pieces, last = chunks
    assert "".join(piece.content for piece in pieces) == "one END"
    assert (last.stop, last.stop_type, last.tokens_evaluated, last.truncated) == (True, "eos", 5, False)


async def test_any_other_field_of_the_server(api: Served, client: LlamaCppClient) -> None:
    answer = await asyncio.to_thread(client.completion, "hello", n_predict=3, return_tokens=True, cache_prompt=True)
    assert isinstance(answer, dict)
    assert answer["tokens"] == list(b"one")


async def test_an_error_is_one_for_the_client(api: Served, client: LlamaCppClient) -> None:
    with pytest.raises(requests.HTTPError, match="400"):
        await asyncio.to_thread(client.new_completion, "hello", top_p=7.0)


async def test_sillytavern_s_completion_and_its_stream(api: Served) -> None:
    assert (await api.post("/completion", **SILLYTAVERN))["content"] == "one E"
    async with api.http.post("/completion", json={**SILLYTAVERN, "stream": True}) as response:
        lines = [line for line in (await response.text()).split("\n\n") if line.startswith("data: ")]
    assert "".join(json.loads(line.removeprefix("data: "))["content"] for line in lines) == "one E"
    params = api.backend.submitted[0].params
    assert (params.temperature_last, params.max_tokens, params.logit_bias) == (True, 5, {97: -5.0, 98: -100.0})


async def test_sillytavern_finds_the_template_and_counts_tokens(api: Served) -> None:
    assert "messages" in (await api.get("/props"))["chat_template"]
    assert len((await api.post("/tokenize", content="hello"))["tokens"]) == 5
