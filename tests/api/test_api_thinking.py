"""Thinking in POST /v1/chat/completions: apart from the answer, asked for, switched off, bounded and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import Thinking
from tests.api.harness import Served
from tests.api.test_api_tools import CHAT, HELLO, NOW, deltas_of, serving_tools
from tests.fakes.backend import saying
from tests.fakes.model import EOS_ID
from tests.fakes.tool_templates import HERMES

THINKS = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WITH_EFFORT = THINKS.replace("assistant: ", "{{ reasoning_effort or 'medium' }} assistant: <think>", 1)
ANSWER = "<think>Is it noon?\n</think>\n\nYes."
THOUGHT = "Is it noon?"
ENDED = saying(ANSWER, then=EOS_ID)


def prompt_of(api: Served) -> str:
    """The prompt that the backend got last."""
    return bytes(api.backend.submitted[-1].prompt_ids).decode()


def thinking_of(api: Served) -> Thinking | None:
    """How the backend was told to split its last answer."""
    return api.backend.submitted[-1].params.thinking


async def test_thinking_has_fields_of_its_own(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        answer = await api.post(CHAT, messages=HELLO)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Yes.", THOUGHT, THOUGHT)
    thought = len("<think>Is it noon?\n</think>\n\nY")
    assert thought - 3 <= answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= thought


async def test_a_stream_has_the_thinking_first(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        pieces = deltas_of(await api.events(CHAT, messages=HELLO))
    assert "".join(piece.get("reasoning_content", "") for piece in pieces) == THOUGHT
    assert "".join(piece.get("content") or "" for piece in pieces) == "Yes."
    kinds = ["thinking" if "reasoning" in piece else "answer" for piece in pieces if len(piece) and "role" not in piece]
    assert kinds == sorted(kinds, reverse=True)


async def test_thinking_is_left_out_where_a_client_says_so_and_counted_all_the_same(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        answer = await api.post(CHAT, messages=HELLO, include_reasoning=False)
        pieces = deltas_of(await api.events(CHAT, messages=HELLO, include_reasoning=False))
    message = answer["choices"][0]["message"]
    assert (message["content"], "reasoning" in message) == ("Yes.", False)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert not any("reasoning" in piece or "reasoning_content" in piece for piece in pieces)


@pytest.mark.parametrize(
    "asked",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"thinking_token_budget": 0},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
async def test_thinking_is_switched_off_by_any_of_its_names(tmp_path: Path, asked: dict[str, Any]) -> None:
    async with serving_tools(tmp_path, THINKS, saying("Yes.", then=EOS_ID)) as api:
        answer = await api.post(CHAT, messages=HELLO, **asked)
        assert prompt_of(api).endswith("<think>\n\n</think>\n\n")
        assert thinking_of(api) is None
    assert answer["choices"][0]["message"]["content"] == "Yes."


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_budget": 8}, 8),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "high"}, None),
        ({}, None),
    ],
    ids=str,
)
async def test_a_budget_or_an_effort_bounds_the_thinking(
    tmp_path: Path, asked: dict[str, Any], budget: int | None
) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        await api.post(CHAT, messages=HELLO, **asked)
        assert thinking_of(api) == Thinking(open="<think>", close="</think>", budget=budget)


async def test_an_effort_goes_to_the_template_where_that_has_one(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, WITH_EFFORT, ENDED) as api:
        await api.post(CHAT, messages=HELLO, reasoning_effort="high")
        assert prompt_of(api).endswith("high assistant: <think>")
        assert thinking_of(api) == Thinking(open="<think>", close="</think>", inside=True)


async def test_a_model_that_does_not_think_refuses_efforts_and_budgets_by_name(api: Served) -> None:
    for asked in ({"reasoning_effort": "low"}, {"thinking_token_budget": 5}):
        error = await api.refusal(CHAT, messages=HELLO, **asked)
        assert error["param"] == next(iter(asked))
        assert "does not think" in error["message"]
    for asked in ({"reasoning_effort": "none"}, {"enable_thinking": False}, {"include_reasoning": True}):
        await api.post(CHAT, messages=HELLO, max_tokens=1, **asked)


async def test_what_was_thought_goes_back_to_the_template(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": THOUGHT}
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        await api.post(CHAT, messages=[*HELLO, said, *HELLO])
        assert f"assistant: <think>{THOUGHT}</think>Yes." in prompt_of(api)
        error = await api.refusal(CHAT, messages=[*HELLO, {**said, "reasoning_content": 1}, *HELLO])
    assert error["param"] == "messages[1].reasoning_content"


async def test_calls_in_the_thinking_are_thoughts(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    reply = saying(f"<think>I could {call}</think>{call}", then=EOS_ID)
    async with serving_tools(tmp_path, HERMES + "{# <think> #}", reply) as api:
        answer = await api.post(CHAT, messages=HELLO, tools=[NOW])
        pieces = deltas_of(await api.events(CHAT, messages=HELLO, tools=[NOW]))
    message = answer["choices"][0]["message"]
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["now"]
    assert message["reasoning"] == f"I could {call}"
    assert "".join(piece.get("reasoning", "") for piece in pieces) == f"I could {call}"
    assert sum(bool(each.get("id")) for piece in pieces for each in piece.get("tool_calls", ())) == 1


async def test_a_continued_answer_goes_on_where_it_was(tmp_path: Path) -> None:
    begun = {"role": "assistant", "content": "<think>Is it"}
    async with serving_tools(tmp_path, THINKS, saying(" noon?</think>Yes.", then=EOS_ID)) as api:
        answer = await api.post(CHAT, messages=[*HELLO, begun], continue_final_message=True)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" noon?", "Yes.")


async def test_thinking_that_never_ends_leaves_no_content(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        answer = await api.post(CHAT, messages=HELLO, max_tokens=12)
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["reasoning"] == "Is it"
