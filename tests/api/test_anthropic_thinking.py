"""Thinking in POST /v1/messages: blocks before the answer, requested, bounded, and sent back by the client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import Thinking
from tests.api.harness import Served
from tests.api.test_anthropic_messages import HELLO, ask, prompt_of, stream, text_block, text_of
from tests.api.test_anthropic_tools import PARIS, WEATHER
from tests.api.test_api_thinking import ANSWER, ENDED, THINKS, THOUGHT, WITH_EFFORT, thinking_of
from tests.api.test_api_tools import serving_tools
from tests.fakes.backend import Gate, saying
from tests.fakes.model import EOS_ID
from tests.fakes.tool_templates import HERMES

SWITCHED_OFF = "<think>\n\n</think>\n\n"


def thinking_block(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text, "signature": ""}


async def stream_of(api: Served, **body: Any) -> list[dict[str, Any]]:
    """What the events of the blocks hold."""
    return [data for name, data in await stream(api, **body) if name.startswith("content_block")]


async def test_thinking_is_a_block_before_the_text(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        answer = await ask(api, max_tokens=100)
    assert answer["content"] == [thinking_block(THOUGHT), text_block("Yes.")]
    assert answer["stop_reason"] == "end_turn"
    assert 0 < answer["usage"]["output_tokens_details"]["thinking_tokens"] < answer["usage"]["output_tokens"]


async def test_a_stream_has_the_thinking_then_its_signature_then_the_text(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        events = await stream(api, max_tokens=100)
    blocks = [data for name, data in events if name.startswith("content_block")]
    thought = [each for each in blocks if each["index"] == 0]
    deltas = [each["delta"] for each in thought[1:-1]]
    assert blocks == thought + [each for each in blocks if each["index"] == 1]
    assert thought[0]["content_block"] == thinking_block("")
    assert "".join(delta["thinking"] for delta in deltas[:-1]) == THOUGHT
    assert {delta["type"] for delta in deltas[:-1]} == {"thinking_delta"}
    assert deltas[-1] == {"type": "signature_delta", "signature": ""}
    assert thought[-1]["type"] == "content_block_stop"
    assert text_of(events) == "Yes."


async def test_calls_come_after_the_thinking_and_those_within_it_are_thoughts(tmp_path: Path) -> None:
    reply = saying(f"<think>I could {PARIS}</think>{PARIS}", then=EOS_ID)
    body = {"max_tokens": 300, "tools": [WEATHER]}
    async with serving_tools(tmp_path, HERMES + "{# <think> #}", reply) as api:
        answer = await ask(api, **body)
        events = await stream_of(api, **body)
    thought, used = answer["content"]
    assert thought == thinking_block(f"I could {PARIS}")
    assert (used["type"], used["input"], answer["stop_reason"]) == ("tool_use", {"city": "Paris"}, "tool_use")
    starts = [each for each in events if each["type"] == "content_block_start"]
    assert [(each["index"], each["content_block"]["type"]) for each in starts] == [(0, "thinking"), (1, "tool_use")]


async def test_omitted_thinking_is_an_empty_block(tmp_path: Path) -> None:
    body = {"max_tokens": 100, "thinking": {"type": "adaptive", "display": "omitted"}}
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        answer = await ask(api, **body)
        events = await stream_of(api, **body)
    assert answer["content"] == [thinking_block(""), text_block("Yes.")]
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert [each.get("delta") for each in events if each["index"] == 0] == [
        None,
        {"type": "signature_delta", "signature": ""},
        None,
    ]


async def test_thinking_that_max_tokens_cut_off_is_the_only_block_and_complete(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        answer = await ask(api, max_tokens=12)
        events = await stream_of(api, max_tokens=12)
    assert (answer["content"], answer["stop_reason"]) == ([thinking_block("Is it")], "max_tokens")
    assert events[-2]["delta"]["type"] == "signature_delta"
    assert (events[-1]["type"], events[-1]["index"]) == ("content_block_stop", 0)


@pytest.mark.parametrize(
    ("cut", "display"),
    [(3, None), (len("<think>Is it"), None), (len("<think>Is it noon?\n</think>\n\nY"), None), (12, "omitted")],
    ids=["within the marker", "within the thinking", "within the text", "omitted"],
)
async def test_thinking_whose_time_was_up_goes_on_once_it_is_sent_back(
    tmp_path: Path, cut: int, display: str | None
) -> None:
    gate = Gate(cut)

    def rest(prompt_ids: Sequence[int], index: int) -> int:
        text = ANSWER.replace("\n", "").encode()
        at = len(bytes(prompt_ids).rpartition(b"assistant: ")[2]) + index
        return text[at] if at < len(text) else EOS_ID

    thinking = {"type": "adaptive", "display": display}
    async with serving_tools(tmp_path, THINKS, rest, gate=gate) as api:
        paused = await api.cut_off(ask(api, max_tokens=100, thinking=thinking), tokens=cut)
        assert paused["stop_reason"] == "pause_turn"
        gate.open()
        said = {"role": "assistant", "content": paused["content"]}
        answer = await ask(api, max_tokens=100, thinking=thinking, messages=[*HELLO, said])
    blocks = [*paused["content"], *answer["content"]]
    shown = "" if display == "omitted" else THOUGHT
    assert "".join(block.get("thinking", "") for block in blocks) == shown
    assert "".join(block.get("text", "") for block in blocks) == "Yes."
    assert answer["stop_reason"] == "end_turn"


async def test_thinking_is_switched_off(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, saying("Yes.", then=EOS_ID)) as api:
        assert (await prompt_of(api, thinking={"type": "disabled"})).endswith(SWITCHED_OFF)
        assert thinking_of(api) is None
        answer = await ask(api, thinking={"type": "disabled"})
    assert answer["content"] == [text_block("Yes.")]


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive", "budget_tokens": None}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 7.0}}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}, "output_config": {"effort": "high"}}, 7),
        ({"output_config": {"effort": "low"}}, 1024),
        ({"output_config": {"effort": "max"}}, None),
    ],
    ids=str,
)
async def test_a_budget_or_an_effort_bounds_the_thinking(
    tmp_path: Path, asked: dict[str, Any], budget: int | None
) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        assert not (await prompt_of(api, **asked)).endswith(SWITCHED_OFF)
        assert thinking_of(api) == Thinking(open="<think>", close="</think>", budget=budget)


async def test_an_effort_goes_to_the_template_where_that_has_one(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, WITH_EFFORT, ENDED) as api:
        assert (await prompt_of(api, output_config={"effort": "high"})).endswith("high assistant: <think>")


async def test_thinking_of_earlier_turns_goes_to_the_template_and_redacted_thinking_does_not(tmp_path: Path) -> None:
    redacted = {"type": "redacted_thinking", "data": "secret"}
    thought = [{**thinking_block(THOUGHT), "signature": "of another server"}, redacted, thinking_block("It is.")]
    said = {"role": "assistant", "content": [*thought, text_block("Yes.")]}
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        prompt = await prompt_of(api, messages=[*HELLO, said, *HELLO])
        assert f"assistant: <think>{THOUGHT}\nIt is.</think>Yes.\n" in prompt
        assert "secret" not in prompt
        one_turn = [{"role": "assistant", "content": [block]} for block in said["content"]]
        assert await prompt_of(api, messages=[*HELLO, *one_turn, *HELLO]) == prompt
        begun = await prompt_of(api, messages=[*HELLO, said])
    assert begun.endswith(f"<think>{THOUGHT}\nIt is.</think>Yes.")


async def test_the_count_of_tokens_has_the_prompt_s_thinking(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        counts = [
            (await api.post("/v1/messages/count_tokens", messages=HELLO, thinking=thinking))["input_tokens"]
            for thinking in ({"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2000})
        ]
        assert counts == [counts[1] + len(SWITCHED_OFF), counts[1], counts[1]]


async def test_a_model_that_does_not_think_takes_the_default_effort_and_thinking_that_is_kept(api: Served) -> None:
    keep_all = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = {"output_config": {"effort": "high"}, "context_management": keep_all, "thinking": {"type": "adaptive"}}
    assert await api.post("/v1/messages", max_tokens=20, messages=HELLO, **body)
    clears = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    async with api.http.post(
        "/v1/messages", json={"max_tokens": 20, "messages": HELLO, "context_management": clears}
    ) as response:
        assert "context_management is not supported" in (await response.json())["error"]["message"]


async def test_a_model_that_does_not_think_refuses_efforts_and_budgets_by_name(api: Served) -> None:
    asked = {
        "output_config.effort": {"output_config": {"effort": "low"}},
        "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": 5}},
    }
    for name, body in asked.items():
        async with api.http.post("/v1/messages", json={"max_tokens": 20, "messages": HELLO, **body}) as response:
            error = (await response.json())["error"]
        assert error["message"].startswith(f"{name} is not supported: fake does not think")
