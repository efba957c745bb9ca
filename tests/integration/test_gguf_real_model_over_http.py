"""A real GGUF file over HTTP: SmolLM2-135M-Instruct answers by a JSON schema, and calls tools.

Its chat template has neither tools nor thinking: tools are described in the default format, and no prompt of it opens a
thinking block, so that thinking has no test here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import jsonschema
import pytest

from console.api.server import ApiServer, ApiSettings
from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from tests.fakes.engines import StillProbe
from tests.fakes.published_sources import SMOLLM2, source_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 16},
        "is_in_europe": {"type": "boolean"},
    },
    "required": ["capital", "is_in_europe"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY, "strict": True},
}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose base is a server with the model."""
    engine = Engine(EngineConfig(worker_host="thread", max_prompts=2), probe=StillProbe())
    server = ApiServer(engine, ApiSettings(port=0), None, None, None)
    await engine.start()
    try:
        file = source_folder(SMOLLM2) / SMOLLM2.marker
        await engine.load(ModelSpec(path=file, name="smollm2", device="cpu", threads=1, kv_cache_tokens=2048))
        await server.start()
        async with aiohttp.ClientSession(server.status().url) as session:
            yield session
    finally:
        await server.stop(drain_s=0.0)
        await engine.close(drain_s=0.0)


async def answered(http: aiohttp.ClientSession, text: str, **body: Any) -> tuple[dict[str, Any], str]:
    """The choice of a chat's answer, and its X-Tool-Format."""
    asked = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 96, **body}
    async with http.post(CHAT, json=asked) as response:
        answer = await response.json()
        assert response.status == 200, answer
    [choice] = answer["choices"]
    return choice, response.headers.get("X-Tool-Format", "")


async def test_a_real_model_answers_by_a_json_schema(http: aiohttp.ClientSession) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    choice, _ = await answered(http, "What is the capital of France? Answer as JSON.", response_format=form)
    assert choice["finish_reason"] == "stop"
    found = json.loads(choice["message"]["content"])
    jsonschema.validate(found, SCHEMA)
    assert found["capital"] == "Paris"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_real_model_that_must_call_a_tool_gives_it_arguments_of_its_schema(
    http: aiohttp.ClientSession, choice: Any
) -> None:
    asked = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    found, format_ = await answered(http, "What is the weather in Paris?", **asked)
    assert format_ == "Hermes (default)"
    assert found["finish_reason"] == "tool_calls"
    call = found["message"]["tool_calls"][0]["function"]
    assert call["name"] == "get_weather"
    arguments = json.loads(call["arguments"])
    jsonschema.validate(arguments, CITY)
    assert arguments["city"].startswith("Paris")
