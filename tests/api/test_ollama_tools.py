"""Tools and formats in Ollama's dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import ollama
import pytest

from console.api.server import ApiSettings
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, Reply, saying
from tests.fakes.model import EOS_ID, fake_spec
from tests.fakes.tool_templates import HERMES, write_tool_model

HELLO = [{"role": "user", "content": "hello"}]
PARIS = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return f"rain in {city}"


@asynccontextmanager
async def calling(folder: Path, reply: Reply) -> AsyncIterator[Served]:
    """A server whose model calls tools as Hermes does, and gives this answer."""
    write_tool_model(folder, HERMES)
    async with serving(folder, FakeBackend(reply=reply), spec=fake_spec(folder)) as api:
        yield api


def prompt_of(api: Served) -> str:
    return bytes(api.backend.submitted[-1].prompt_ids).decode()


async def test_the_client_is_told_of_calls_and_tells_what_they_gave(tmp_path: Path) -> None:
    messages: list[Any] = [*HELLO]
    async with calling(tmp_path, saying(f"Let me look.\n{PARIS}", then=EOS_ID)) as api:
        client = ollama.AsyncClient(host=api.url)
        answer = await client.chat("fake", messages, tools=[get_weather])
        told = json.loads(prompt_of(api).splitlines()[0].removeprefix("tools: "))
        assert answer.message.tool_calls
        [call] = answer.message.tool_calls
        messages.append(answer.message)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": get_weather("Paris")})
        await client.chat("fake", messages, tools=[get_weather])
        turns = prompt_of(api).splitlines()[1:]
    assert told[0]["function"]["name"] == "get_weather"
    assert told[0]["function"]["parameters"]["properties"]["city"]["type"] == "string"
    assert answer.message.content == "Let me look."
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    assert turns[1:3] == [f"assistant: Let me look.{PARIS}", "result get_weather call_1_0: rain in Paris"]


async def test_a_model_that_calls_tools_says_so(tmp_path: Path) -> None:
    async with calling(tmp_path / "tools", saying("ok", then=EOS_ID)) as api:
        assert (await ollama.AsyncClient(host=api.url).show("fake")).capabilities == ["completion", "tools"]
    async with serving(tmp_path / "none") as api:
        assert (await ollama.AsyncClient(host=api.url).show("fake")).capabilities == ["completion"]


async def test_calls_are_streamed_whole(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(f"Hm. {PARIS}{PARIS}", then=EOS_ID)) as api:
        stream = await ollama.AsyncClient(host=api.url).chat("fake", HELLO, tools=[get_weather], stream=True)
        parts = [part async for part in stream]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": "Paris"}] * 2
    assert "".join(part.message.content or "" for part in parts) == "Hm."
    assert (parts[-1].done, parts[-1].done_reason) == (True, "stop")


async def test_a_call_has_an_id_and_its_place(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(PARIS + PARIS, then=EOS_ID)) as api:
        tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
        answer = await api.post("/api/chat", messages=HELLO, tools=tools, stream=False)
    calls = answer["message"]["tool_calls"]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_call_that_num_predict_cuts_off_has_the_arguments_that_are_whole(tmp_path: Path, stream: bool) -> None:
    call = PARIS.replace('"Paris"', '"Paris", "zone": "CET"')
    async with calling(tmp_path, saying(call, then=EOS_ID)) as api:
        options = {"num_predict": call.index("CET") + 1}
        client = ollama.AsyncClient(host=api.url)
        answer: Any = await client.chat("fake", HELLO, tools=[get_weather], options=options, stream=stream)
        parts = [part async for part in answer] if stream else [answer]
    [found] = [found for part in parts for found in part.message.tool_calls or ()]
    assert (found.function.name, found.function.arguments) == ("get_weather", {"city": "Paris"})
    assert "".join(part.message.content or "" for part in parts) == ""
    assert parts[-1].done_reason == "length"


async def test_a_call_that_breaks_off_is_text(tmp_path: Path) -> None:
    broken = PARIS.removesuffix("}}</tool_call>") + " oh"
    async with calling(tmp_path, saying(broken, then=EOS_ID)) as api:
        answer = await ollama.AsyncClient(host=api.url).chat("fake", HELLO, tools=[get_weather])
    assert answer.message.content == broken
    assert not answer.message.tool_calls


async def test_a_format_holds_the_answer_to_a_schema(api: Served) -> None:
    client = ollama.AsyncClient(host=api.url)
    answer = await client.chat("fake", HELLO, format=SCHEMA)
    jsonschema.validate(json.loads(answer.message.content or ""), SCHEMA)
    assert answer.done_reason == "stop"
    parts = [part async for part in await client.generate("fake", "who?", format=SCHEMA, stream=True)]
    jsonschema.validate(json.loads("".join(part.response or "" for part in parts)), SCHEMA)


async def test_the_format_json_is_any_object(tmp_path: Path) -> None:
    closing = FakeBackend(reply=lambda prompt_ids, index: ord("}"))
    async with serving(tmp_path, closing) as api:
        answer = await ollama.AsyncClient(host=api.url).generate("fake", "x", format="json")
    assert json.loads(answer.response) == {}


async def test_a_format_beyond_what_the_operator_allows_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_schema_bytes=20)) as api:
        with pytest.raises(ollama.ResponseError, match="format has"):
            await ollama.AsyncClient(host=api.url).generate("fake", "x", format=SCHEMA)


@pytest.mark.parametrize("text", ["<tool_call>\n" + PARIS[11:-12] + "\n</tool_call>", '{"name": "Ada", "age": 36}'])
async def test_an_answer_with_a_format_and_tools_is_a_call_or_text_of_the_format(tmp_path: Path, text: str) -> None:
    async with calling(tmp_path, saying(text, then=EOS_ID)) as api:
        answer = await ollama.AsyncClient(host=api.url).chat("fake", HELLO, tools=[get_weather], format=SCHEMA)
    calls = [call.function.name for call in answer.message.tool_calls or ()]
    assert (calls, answer.message.content) == ((["get_weather"], "") if "tool_call" in text else ([], text))


@pytest.mark.parametrize("value", ["1e999", '"\\ud800"'], ids=["number", "text"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_arguments_that_programs_can_hardly_read_are_passed_on_in_one_line(
    tmp_path: Path, value: str, stream: bool
) -> None:
    call = PARIS.replace('"Paris"', f"\n{value}")
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    async with calling(tmp_path, saying(call, then=EOS_ID)) as api:
        body = {"messages": HELLO, "tools": [tool], "stream": stream}
        async with api.http.post("/api/chat", json=body) as response:
            assert response.status == 200
            lines = (await response.text()).splitlines()
    assert f'"arguments":{{"city":  {value}}}' in lines[0]
    assert all(line.endswith("}") for line in lines)
