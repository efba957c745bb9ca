"""langchain-openai's ChatOpenAI and its kin against the server, as its users use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, Reply, expected_text, saying, vector_of
from tests.fakes.model import EOS_ID, fake_spec
from tests.fakes.tool_templates import HERMES, write_tool_model

KEY = SecretStr("none")
HELLO_PROMPT = b"system: be kind\nuser: hello\nassistant: "
HELLO = [SystemMessage("be kind"), HumanMessage("hello")]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, only_loopback: None) -> None:
    """Nothing is traced, and nobody else is asked."""
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"rain in {city}"


@asynccontextmanager
async def calling(folder: Path, reply: Reply) -> AsyncIterator[Served]:
    """A server whose model calls tools as Hermes does, and gives this answer."""
    write_tool_model(folder, HERMES)
    async with serving(folder, FakeBackend(reply=reply), spec=fake_spec(folder)) as api:
        yield api


def chat_of(api: Served, **settings: Any) -> ChatOpenAI:
    """A chat model that tries once."""
    return ChatOpenAI(base_url=f"{api.url}/v1", api_key=KEY, model="fake", max_retries=0, **settings)


async def test_an_answer(api: Served) -> None:
    answer = await chat_of(api, max_tokens=6, temperature=0.5).ainvoke(HELLO)
    assert answer.content == expected_text(HELLO_PROMPT, 6)
    assert answer.response_metadata["finish_reason"] == "length"
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 6
    assert api.backend.submitted[0].params.temperature == 0.5


async def test_a_stream_with_its_usage(api: Served) -> None:
    whole: AIMessageChunk | None = None
    async for chunk in chat_of(api, max_tokens=6, stream_usage=True).astream(HELLO):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.content == expected_text(HELLO_PROMPT, 6)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["total_tokens"] == len(HELLO_PROMPT) + 6


async def test_several_at_once(api: Served) -> None:
    answers = await chat_of(api, max_tokens=2).abatch(["a", "b", "c"])
    assert [answer.content for answer in answers] == [
        expected_text(f"user: {ask}\nassistant: ".encode(), 2) for ask in "abc"
    ]


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
async def test_an_answer_in_a_shape(tmp_path: Path, method: Any) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying('{"name": "Ann", "age": 7}', then=EOS_ID))) as api:
        shaped = chat_of(api).with_structured_output(Person, method=method)
        assert await shaped.ainvoke("who? (as JSON)") == Person(name="Ann", age=7)
        grammar = api.backend.submitted[0].params.grammar
    assert grammar is not None
    assert grammar.kind == ("json_schema" if method == "json_schema" else "json_object")


async def test_an_answer_in_a_shape_by_a_call(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "Person", "arguments": {"name": "Ann", "age": 7}}\n</tool_call>'
    async with calling(tmp_path, saying(call, then=EOS_ID)) as api:
        shaped = chat_of(api).with_structured_output(Person, method="function_calling")
        assert await shaped.ainvoke("who?") == Person(name="Ann", age=7)
        assert api.backend.submitted[0].params.grammar is not None


async def test_tools_are_called_and_their_results_told(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(CALL, then=EOS_ID)) as api:
        model = chat_of(api).bind_tools([get_weather])
        answer = await model.ainvoke("hello")
        [call] = answer.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
        result = await get_weather.ainvoke(call)
        assert isinstance(result, ToolMessage)
        await model.ainvoke([HumanMessage("hello"), answer, result])
        prompt = bytes(api.backend.submitted[-1].prompt_ids).decode()
    assert f"result get_weather {call['id']}: rain in Paris\n" in prompt


async def test_a_streamed_call_is_put_together(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(CALL, then=EOS_ID)) as api:
        whole: AIMessageChunk | None = None
        async for chunk in chat_of(api).bind_tools([get_weather], tool_choice="get_weather").astream("hello"):
            assert isinstance(chunk, AIMessageChunk)
            whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Paris"})]


async def test_a_text_is_gone_on_with(api: Served) -> None:
    model = OpenAI(base_url=f"{api.url}/v1", api_key=KEY, model="fake", max_tokens=4, max_retries=0, temperature=0)
    assert await model.ainvoke("Once") == expected_text(b"Once", 4)


async def test_texts_become_vectors(api: Served) -> None:
    vectors = OpenAIEmbeddings(
        base_url=f"{api.url}/v1", api_key=KEY, model="fake", check_embedding_ctx_length=False, max_retries=0
    )
    assert await vectors.aembed_documents(["ab", "c"]) == [vector_of(b"ab"), vector_of(b"c")]


async def test_a_refusal_raises_openai_s_error(api: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning_effort is not supported"):
        await chat_of(api, reasoning_effort="high").ainvoke("hello")


@pytest.mark.parametrize("elsewhere", ["example.com", "192.0.2.1"])
async def test_a_client_that_asks_elsewhere_would_be_found_out(elsewhere: str) -> None:
    with pytest.raises(AssertionError, match="was asked"):
        await asyncio.open_connection(elsewhere, 80)


async def test_chat_over_the_responses_api(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(CALL, then=EOS_ID)) as api:
        model = ChatOpenAI(base_url=f"{api.url}/v1", api_key=KEY, model="fake", use_responses_api=True, max_retries=0)
        answer = await model.bind_tools([get_weather]).ainvoke(HELLO)
        chunks = [chunk async for chunk in model.bind_tools([get_weather]).astream(HELLO)]
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_weather", {"city": "Paris"})]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}]
