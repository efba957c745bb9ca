"""The anthropic Python client against the server, as its users use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import pytest

from console.api.server import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.api.test_api_thinking import ENDED, THINKS, THOUGHT
from tests.api.test_api_tools import serving_tools
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying

pytestmark = pytest.mark.usefixtures("only_loopback")

KEY = "sk-ant-test"
SAMPLING = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
PROMPT = b"user: hello\nassistant: "


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that wants a key."""
    async with serving(tmp_path, settings=ApiSettings(port=0, api_key=KEY)) as served:
        yield served


def client_of(api: Served, key: str = KEY) -> anthropic.AsyncAnthropic:
    """A client that tries once."""
    return anthropic.AsyncAnthropic(base_url=api.url, api_key=key, max_retries=0)


def hello() -> list[anthropic.types.MessageParam]:
    return [{"role": "user", "content": "hello"}]


async def test_a_message(api: Served) -> None:
    async with client_of(api) as client:
        message = await client.messages.create(model="fake", max_tokens=6, messages=hello(), extra_body=SAMPLING)
    [block] = message.content
    assert block.type == "text"
    assert block.text == expected_text(PROMPT, 6)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 6)


async def test_a_bearer_token_does_too(api: Served) -> None:
    async with anthropic.AsyncAnthropic(base_url=api.url, auth_token=KEY, api_key=None, max_retries=0) as client:
        assert (await client.messages.count_tokens(model="fake", messages=hello())).input_tokens == len(PROMPT)


async def test_a_stream_adds_up_to_its_message(api: Served) -> None:
    async with client_of(api) as client, client.messages.stream(model="fake", max_tokens=6, messages=hello()) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert text == expected_text(PROMPT, 6)
    assert message.content[0].type == "text"
    assert message.content[0].text == text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 6)


async def test_raw_events_come_typed_and_in_order(api: Served) -> None:
    async with client_of(api) as client:
        stream = await client.messages.create(model="fake", max_tokens=1, messages=hello(), stream=True)
        kinds = [event.type async for event in stream]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_a_stop_sequence(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one two three"))) as api, client_of(api) as client:
        message = await client.messages.create(
            model="fake", max_tokens=50, messages=hello(), system="be kind", stop_sequences=[" three"]
        )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
    assert message.content[0].type == "text"
    assert message.content[0].text == "one two"


async def test_thinking_blocks_have_the_client_s_own_types(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api, client_of(api) as client:
        message = await client.messages.create(
            model="fake", max_tokens=99, messages=hello(), thinking={"type": "enabled", "budget_tokens": 50}
        )
        follow_up = await client.messages.create(
            model="fake",
            max_tokens=99,
            messages=[*hello(), {"role": "assistant", "content": message.content}, *hello()],
            thinking={"type": "adaptive", "display": "omitted"},
        )
    thought, text = message.content
    assert isinstance(thought, anthropic.types.ThinkingBlock)
    assert isinstance(text, anthropic.types.TextBlock)
    assert (thought.thinking, text.text) == (THOUGHT, "Yes.")
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens > 0
    assert follow_up.content == [thought.model_copy(update={"thinking": ""}), text]


async def test_a_stream_of_thinking_adds_up_to_its_message(tmp_path: Path) -> None:
    async with (
        serving_tools(tmp_path, THINKS, ENDED) as api,
        client_of(api) as client,
        client.messages.stream(
            model="fake", max_tokens=99, messages=hello(), thinking={"type": "enabled", "budget_tokens": 50}
        ) as stream,
    ):
        thinking = "".join([event.thinking async for event in stream if event.type == "thinking"])
        message = await stream.get_final_message()
    assert thinking == THOUGHT
    thought, text = message.content
    assert thought == anthropic.types.ThinkingBlock(type="thinking", thinking=THOUGHT, signature="")
    assert text.type == "text"
    assert text.text == "Yes."


async def test_models_are_listed(api: Served) -> None:
    async with client_of(api) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"


async def test_the_blocking_client(api: Served) -> None:
    def ask() -> str:
        with (
            anthropic.Anthropic(base_url=api.url, api_key=KEY, max_retries=0) as client,
            client.messages.stream(model="fake", max_tokens=6, messages=hello()) as stream,
        ):
            return "".join(stream.text_stream)

    assert await asyncio.to_thread(ask) == expected_text(PROMPT, 6)


async def test_errors_have_the_client_s_own_types(api: Served) -> None:
    async with client_of(api) as client:
        with pytest.raises(anthropic.BadRequestError, match="it must be less than max_tokens, 6") as bad:
            await client.messages.create(
                model="fake", max_tokens=6, messages=hello(), thinking={"type": "enabled", "budget_tokens": 1024}
            )
        with pytest.raises(anthropic.NotFoundError, match="available: fake"):
            await client.messages.create(model="claude", max_tokens=6, messages=hello())
    assert bad.value.type == "invalid_request_error"
    assert bad.value.request_id == bad.value.response.headers["X-Request-Id"]
    async with client_of(api, key="wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model="fake", max_tokens=6, messages=hello())


async def test_a_full_queue_is_a_rate_limit_error(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_prompts=1, max_queue=0)
    async with (
        serving(tmp_path, FakeBackend(gate=Gate()), config=config) as api,
        client_of(api) as client,
        await client.messages.create(model="fake", max_tokens=6, messages=hello(), stream=True),
    ):
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(model="fake", max_tokens=6, messages=hello())


async def test_a_failure_in_a_stream_raises(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api, client_of(api) as client:
        stream = await client.messages.create(model="fake", max_tokens=50, messages=hello(), stream=True)
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            async for _ in stream:
                pass


async def test_closing_a_stream_early_cancels_the_request(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(gate=Gate(3))) as api, client_of(api) as client:
        async with client.messages.stream(model="fake", max_tokens=50, messages=hello()) as stream:
            async for _ in stream.text_stream:
                break
        await api.until_row(state="finished", finish="cancelled")
        [row] = api.engine.publish().requests
        assert 0 < row.output_tokens <= 3
        assert not api.engine._tracker.live
