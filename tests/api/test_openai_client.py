"""The openai Python client against the server, as its users use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from pydantic import BaseModel

from console.api.server import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying
from tests.fakes.model import EOS_ID, fake_spec
from tests.fakes.tool_templates import HERMES, write_tool_model

pytestmark = pytest.mark.usefixtures("only_loopback")

KEY = "sk-test"
CHAT_PROMPT = b"user: hello\nassistant: "
HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that wants a key."""
    async with serving(tmp_path, settings=ApiSettings(port=0, api_key=KEY)) as served:
        yield served


def client_of(api: Served, key: str = KEY) -> openai.AsyncOpenAI:
    """A client that tries once."""
    return openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0)


async def test_chat(api: Served) -> None:
    async with client_of(api) as client:
        answer = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=6
        )
    assert answer.choices[0].message.content == expected_text(CHAT_PROMPT, 6)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


async def test_chat_streaming_with_usage(api: Served) -> None:
    async with client_of(api) as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected_text(CHAT_PROMPT, 6)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == len(CHAT_PROMPT) + 6


async def test_chat_logprobs_n_and_seed(api: Served) -> None:
    async with client_of(api) as client:
        answer = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=4,
            n=2,
            seed=5,
            logprobs=True,
            top_logprobs=1,
            temperature=0.0,
            logit_bias={"7": -100},
        )
    assert [choice.index for choice in answer.choices] == [0, 1]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    assert {request.params.seed for request in api.backend.submitted} == {5, 6}
    assert all(request.params.logit_bias == {7: -100} for request in api.backend.submitted)


async def test_completions_with_stop_and_extra_fields(tmp_path: Path) -> None:
    backend = FakeBackend(reply=saying("one two three"))
    async with serving(tmp_path, backend) as api, client_of(api) as client:
        answer = await client.completions.create(
            model="fake", prompt=">", stop=[" three"], max_tokens=50, extra_body={"top_k": 3, "min_p": 0.1}
        )
        stream = await client.completions.create(model="fake", prompt=">", max_tokens=7, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert answer.choices[0].text == "one two"
    assert answer.choices[0].finish_reason == "stop"
    assert text == "one two"
    assert (backend.submitted[0].params.top_k, backend.submitted[0].params.min_p) == (3, 0.1)


async def test_models(api: Served) -> None:
    async with client_of(api) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError, match="available: fake"):
            await client.completions.create(model="gpt-4", prompt="x")


async def test_the_blocking_client(api: Served) -> None:
    def ask() -> str | None:
        with openai.OpenAI(base_url=f"{api.url}/v1", api_key=KEY, max_retries=0) as client:
            stream = client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=6, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == expected_text(CHAT_PROMPT, 6)


async def test_errors_have_the_client_s_own_types(api: Served) -> None:
    async with client_of(api) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="fake", prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    async with client_of(api, key="wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_a_full_queue_is_a_rate_limit_error(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_prompts=1, max_queue=0)
    async with (
        serving(tmp_path, FakeBackend(gate=Gate()), config=config) as api,
        client_of(api) as client,
        await client.completions.create(model="fake", prompt="a", stream=True),
    ):
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="fake", prompt="b")


async def test_a_failure_in_a_stream_raises(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api, client_of(api) as client:
        stream = await client.completions.create(model="fake", prompt="x", max_tokens=50, stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_closing_a_stream_early_cancels_the_request(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(gate=Gate(3))) as api, client_of(api) as client:
        stream = await client.completions.create(model="fake", prompt="x", max_tokens=50, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await api.until_row(state="finished", finish="cancelled")


async def test_an_answer_in_a_shape(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, FakeBackend(reply=saying('{"name": "Ann", "age": 7}', then=EOS_ID))) as api,
        client_of(api) as client,
    ):
        answer = await client.chat.completions.parse(model="fake", messages=HELLO, response_format=Person)
        await client.chat.completions.create(model="fake", messages=HELLO, response_format={"type": "json_object"})
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model="fake",
                messages=HELLO,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}},
            )
        schema, anything = (request.params.grammar for request in api.backend.submitted)
    assert answer.choices[0].message.parsed == Person(name="Ann", age=7)
    assert schema is not None
    assert anything is not None
    assert (schema.kind, anything.kind) == ("json_schema", "json_object")
    assert bad.value.param == "response_format.json_schema.schema"


async def test_tools(tmp_path: Path) -> None:
    write_tool_model(tmp_path, HERMES)
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    function: openai.types.shared_params.FunctionDefinition = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    async with (
        serving(tmp_path, FakeBackend(reply=saying(call, then=EOS_ID)), spec=fake_spec(tmp_path)) as api,
        client_of(api) as client,
        client.chat.completions.stream(
            model="fake", messages=HELLO, tools=[{"type": "function", "function": function}], tool_choice="auto"
        ) as stream,
    ):
        message = (await stream.get_final_completion()).choices[0].message
    assert message.tool_calls
    assert (message.tool_calls[0].function.name, message.tool_calls[0].function.arguments) == (
        "get_weather",
        '{"city": "Paris"}',
    )


async def test_prompt_logprobs_with_echo(api: Served) -> None:
    async with client_of(api) as client:
        answer = await client.completions.create(model="fake", prompt="Once", echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "Once"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["O", "n", "c", "e"]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
