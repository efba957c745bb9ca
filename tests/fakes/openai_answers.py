"""Requests whose answers the openai SDK's own tests do not get to see, held to its types as those are.

Collected by a pytest of its own, see tests/api/test_sdk_resources.py; `tests` is the SDK's package there.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse

from tests.utils import assert_matches_type

MODEL = "gpt-6-astra"
HELLO: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
WEATHER: Any = {"name": "get_weather", "description": "Weather at a place", "parameters": SCHEMA}
CHAT: Any = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 100}
CHAT_TOOLS: Any = [{"type": "function", "function": WEATHER}]
RESPONSE_TOOLS: Any = [{"type": "function", "strict": False, **WEATHER}]


def matches(kind: Any, value: Any) -> None:
    """Fail where the value is not of this kind, in any of its parts."""
    assert_matches_type(kind, value, path=["response"])


def test_a_response_is_stored_read_listed_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello", instructions="Be kind.", store=True)
    read = client.responses.retrieve(made.id)
    matches(Response, made)
    matches(Response, read)
    assert made.output_text == read.output_text == "Hello there, friend."
    items = list(client.responses.input_items.list(made.id))
    assert items
    for item in items:
        matches(ResponseItem, item)
    following = client.responses.create(model=MODEL, input="Again", previous_response_id=made.id)
    matches(Response, following)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


@pytest.mark.parametrize("tools", [[], RESPONSE_TOOLS], ids=["text", "call"])
def test_every_event_of_a_response(client: openai.OpenAI, tools: Any) -> None:
    events = list(client.responses.create(model=MODEL, input="Hello", tools=tools, stream=True))
    for event in events:
        matches(ResponseStreamEvent, event)
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]


def test_a_response_that_calls(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello", tools=RESPONSE_TOOLS, tool_choice="required")
    matches(Response, made)
    assert [item.type for item in made.output] == ["function_call"]


def test_tokens_of_an_input(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input="Hello")
    matches(InputTokenCountResponse, counted)
    assert counted.input_tokens > len("Hello")


@pytest.mark.parametrize("tools", [{}, {"tools": CHAT_TOOLS}], ids=["text", "call"])
def test_a_chat_whole_and_streamed(client: openai.OpenAI, tools: Any) -> None:
    whole = client.chat.completions.create(**CHAT, **tools, n=2)
    matches(ChatCompletion, whole)
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls" if tools else "stop"] * 2
    chunks = list(client.chat.completions.create(**CHAT, **tools, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        matches(ChatCompletionChunk, chunk)
    assert chunks[-1].usage is not None


def test_a_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Once", "logprobs": 2}
    matches(Completion, client.completions.create(**asked))
    # OpenAI's type of a chunk needs a finish reason, which only a last one has, as here the only one.
    for chunk in client.completions.create(**asked, max_tokens=1, stream=True):
        matches(Completion, chunk)


def test_vectors_as_numbers(client: openai.OpenAI) -> None:
    vectors = client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
    matches(CreateEmbeddingResponse, vectors)
    assert [len(each.embedding) for each in vectors.data] == [64, 64]
