"""Requests whose answers the anthropic SDK's own tests do not get to see, held to its types as those are.

Collected by a pytest of its own, see tests/api/test_sdk_resources.py; `tests` is the SDK's package there.
"""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent

from tests.utils import assert_matches_type

SCHEMA = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
TOOL: Any = {"name": "get_weather", "description": "Weather at a place", "input_schema": SCHEMA}
HELLO: Any = {"role": "user", "content": "Hello"}
ASKED: Any = {"model": "claude-opus-5-5", "max_tokens": 100, "messages": [HELLO]}


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["text", "call"])
def test_a_message_and_every_event_of_one(client: anthropic.Anthropic, tools: Any) -> None:
    whole = client.messages.create(**ASKED, tools=tools)
    assert_matches_type(Message, whole, path=["response"])
    events = list(client.messages.create(**ASKED, tools=tools, stream=True))
    for event in events:
        assert_matches_type(RawMessageStreamEvent, event, path=["response"])
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    assert whole.stop_reason == ("tool_use" if tools else "end_turn")


def test_a_conversation_with_a_call_and_its_result(client: anthropic.Anthropic) -> None:
    called = client.messages.create(**ASKED, tools=[TOOL], tool_choice={"type": "any"})
    [call] = called.content
    assert call.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    turns: Any = [HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**{**ASKED, "messages": turns}, tools=[TOOL])
    assert_matches_type(Message, answer, path=["response"])
    counted = client.messages.count_tokens(model=ASKED["model"], messages=turns, tools=[TOOL])
    assert_matches_type(MessageTokensCount, counted, path=["response"])
