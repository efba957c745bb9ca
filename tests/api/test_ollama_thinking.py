"""Thinking in Ollama's dialect: apart from the answer, asked for, switched off, and refused by models without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import Thinking
from tests.api.harness import Served
from tests.api.ollama_calls import HELLO, chat, generate, refusal
from tests.api.test_api_thinking import ANSWER, ENDED, THINKS, THOUGHT, WITH_EFFORT, prompt_of, thinking_of
from tests.api.test_api_tools import NOW, serving_tools
from tests.fakes.backend import saying
from tests.fakes.model import EOS_ID
from tests.fakes.tool_templates import HERMES

CLOSED = "<think>\n\n</think>\n\n"


async def chunks(api: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The lines of a stream."""
    async with api.http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return [json.loads(line) async for line in response.content]


async def test_thinking_has_a_field_of_its_own(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        spoken, written = await chat(api, think=True), await generate(api)
    assert spoken["message"] == {"role": "assistant", "content": "Yes.", "thinking": THOUGHT}
    assert (written["response"], written["thinking"]) == ("Yes.", THOUGHT)
    assert spoken["eval_count"] == written["eval_count"] > len(ANSWER)


async def test_a_stream_has_the_thinking_first_in_chunks_of_its_own(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        spoken = [line["message"] for line in await chunks(api, "/api/chat", messages=HELLO)]
        written = await chunks(api, "/api/generate", prompt="hello")
    for parts, text in ((spoken, "content"), (written, "response")):
        assert "".join(part.get("thinking", "") for part in parts) == THOUGHT
        assert "".join(part[text] for part in parts) == "Yes."
        assert not any(part[text] for part in parts if "thinking" in part)
        thoughts = ["thinking" in part for part in parts]
        assert thoughts == sorted(thoughts, reverse=True)


async def test_logprobs_cover_thinking_and_answer_once(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        parts = await chunks(api, "/api/chat", messages=HELLO, logprobs=True)
    entries = [entry["token"] for part in parts for entry in part.get("logprobs", ())]
    assert "".join(entries).startswith(ANSWER)
    assert len(entries) == parts[-1]["eval_count"]


async def test_think_false_switches_thinking_off(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, saying("Yes.", then=EOS_ID)) as api:
        for answer in ((await chat(api, think=False))["message"], await generate(api, think=False)):
            assert prompt_of(api).endswith(CLOSED)
            assert thinking_of(api) is None
            assert "thinking" not in answer


@pytest.mark.parametrize(
    ("think", "budget"), [("low", 1024), ("medium", 4096), ("high", None), (True, None), (None, None)], ids=str
)
async def test_an_effort_bounds_the_thinking(tmp_path: Path, think: object, budget: int | None) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        await chat(api, think=think)
        assert thinking_of(api) == Thinking(open="<think>", close="</think>", budget=budget)


async def test_an_effort_goes_to_the_template_where_that_has_one(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, WITH_EFFORT, ENDED) as api:
        await generate(api, think="low")
        assert prompt_of(api).endswith("low assistant: <think>")
        assert thinking_of(api) == Thinking(open="<think>", close="</think>", inside=True)


async def test_a_model_that_does_not_think_refuses_to(api: Served) -> None:
    for think in (True, "low"):
        said = await refusal(api, "/api/chat", messages=HELLO, model="fake:latest", think=think)
        assert said == '"fake:latest" does not support thinking'
        assert await refusal(api, "/api/generate", prompt="x", think=think) == '"fake" does not support thinking'
    for off in (False, None):
        assert "thinking" not in (await chat(api, think=off, options={"num_predict": 1}))["message"]


@pytest.mark.parametrize("think", ["soon", 2, ["low"]], ids=str)
async def test_what_is_no_switch_and_no_effort_is_refused(api: Served, think: object) -> None:
    said = await refusal(api, "/api/chat", messages=HELLO, think=think)
    assert said.startswith("think should be True, False, 'low', 'medium' or 'high', not ")


async def test_a_raw_prompt_has_no_separate_thinking(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        answer = await generate(api, raw=True, think=False)
        assert "think" in await refusal(api, "/api/generate", prompt="x", raw=True, think=True)
    assert (answer["response"], "thinking" in answer) == (ANSWER, False)


async def test_what_was_thought_goes_back_to_the_template(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "Yes.", "thinking": THOUGHT}
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        await chat(api, messages=[*HELLO, said, *HELLO])
        assert f"assistant: <think>{THOUGHT}</think>Yes." in prompt_of(api)
        wrong = await refusal(api, "/api/chat", messages=[*HELLO, {**said, "thinking": 1}, *HELLO])
    assert wrong == "messages[1].thinking should be a string"


async def test_calls_in_the_thinking_are_thoughts(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    reply = saying(f"<think>I could {call}</think>{call}", then=EOS_ID)
    async with serving_tools(tmp_path, HERMES + "{# <think> #}", reply) as api:
        parts = [(await chat(api, tools=[NOW]))["message"]]
        streamed = [line["message"] for line in await chunks(api, "/api/chat", messages=HELLO, tools=[NOW])]
    for found in (parts, streamed):
        assert "".join(part.get("thinking", "") for part in found) == f"I could {call}"
        assert [each["function"]["name"] for part in found for each in part.get("tool_calls", ())] == ["now"]


async def test_a_model_that_thinks_is_listed_with_it(tmp_path: Path, api: Served) -> None:
    assert (await api.post("/api/show", model="fake"))["capabilities"] == ["completion"]
    async with serving_tools(tmp_path / "thinks", THINKS, ENDED) as thinking:
        assert (await thinking.post("/api/show", model="fake"))["capabilities"] == ["completion", "thinking"]
