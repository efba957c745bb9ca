"""Published chat templates: rendered as transformers renders them, and what they write as calls is read as calls."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from console.api.requests.conversation import read_messages, render
from console.api.tools import CallReader, Tool, convert_call_ids, read_answer, tool_use, without_null_content
from console.api.tools.formats import FORMATS, ToolFormat
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer
from tests.fakes.tool_templates import TOKENS, write_tool_model
from tests.fakes.tool_templates import published_template as template_of

pytestmark = pytest.mark.long

ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>", "<|observation|>")
FORMAT_OF = {
    "glm4moe": "GLM-4.5",
    "llama3_1": "Llama 3",
    "llama3_2": "Llama 3",
    "qwen2_5": "Hermes",
    "qwen3": "Hermes",
    "qwen3_5_think": "Qwen3-Coder",
    "qwen3_instruct_2507": "Hermes",
    "tool_chat_deepseekv3": "DeepSeek V3",
    "tool_chat_hermes": "Hermes",
    "tool_chat_llama3_1_json": "Llama 3",
    "tool_chat_mistral": "Mistral",
}
WEATHER = Tool(
    name="get_weather",
    description="Tell the weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Which city"},
            "days": {"type": "integer", "description": "How many days"},
        },
        "required": ["city"],
    },
)
ARGUMENTS = {"city": 'Paris "la belle"', "days": 3}
ASKED: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Rain?"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
CALLED: list[dict[str, Any]] = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
ANSWERED = [*CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "No rain."}]


def format_of(name: str) -> ToolFormat:
    """The format that is found for it."""
    return next(each for each in FORMATS if each.matches(template_of(name).source))


def rendered(name: str, messages: list[dict[str, Any]], *, opens_answer: bool) -> tuple[str, str]:
    """The prompt as it is made here, and as transformers makes it."""
    turns = convert_call_ids(read_messages(messages), format_of(name))
    options: dict[str, Any] = {"tools": [WEATHER.definition()], "add_generation_prompt": opens_answer}
    template = template_of(name)
    try:
        ours = asyncio.run(template.render(turns, **options))
    except InvalidRequest:
        turns = without_null_content(turns)
        ours = asyncio.run(template.render(turns, **options))
    theirs = _compile_jinja_template(template.source).render(messages=turns, documents=None, **TOKENS, **options)
    return ours, theirs


@pytest.mark.parametrize("name", FORMAT_OF)
def test_the_format_of_a_published_template_is_found(name: str) -> None:
    assert template_of(name).uses("tools")
    assert format_of(name).name == FORMAT_OF[name]


def test_a_published_template_of_another_format_has_none() -> None:
    template = template_of("muse_glimmer")
    assert template.uses("tools")
    assert not any(each.matches(template.source) for each in FORMATS)


@pytest.mark.parametrize("name", FORMAT_OF)
def test_a_model_whose_template_takes_one_call_a_message_is_kept_to_one(tmp_path: Path, name: str) -> None:
    folder = write_tool_model(tmp_path, template_of(name).source)
    use = tool_use(Tokenizer.from_folder(folder), [WEATHER])
    assert use.parallel == (FORMAT_OF[name] != "Llama 3")


@pytest.mark.parametrize("name", FORMAT_OF)
@pytest.mark.parametrize("messages", [ASKED, CALLED, ANSWERED], ids=["asked", "called", "answered"])
def test_a_published_template_renders_as_transformers_renders_it(name: str, messages: list[dict[str, Any]]) -> None:
    ours, theirs = rendered(name, messages, opens_answer=True)
    assert ours == theirs
    assert "get_weather" in ours
    assert messages is not ANSWERED or "No rain." in ours


@pytest.mark.parametrize("name", FORMAT_OF)
def test_what_a_published_template_writes_as_a_call_is_read_as_that_call(name: str) -> None:
    before, _ = rendered(name, ASKED, opens_answer=False)
    after, _ = rendered(name, CALLED, opens_answer=False)
    same = (i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
    answer = after[next(same, len(before)) :]
    for end in ENDS:
        answer = answer.partition(end)[0] if end in answer else answer
    if "<|end_header_id|>" in answer:
        answer = answer.rpartition("<|end_header_id|>")[2]
    said, [call] = read_answer(CallReader(format_of(name), [WEATHER]), answer)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    assert "get_weather" not in said


@pytest.mark.parametrize("name", sorted(FORMAT_OF))
@pytest.mark.parametrize("begun", ["It rains", "end", "s", "One:\n", "Two "])
def test_a_continued_answer_ends_where_it_was_begun_whatever_the_template_adds(name: str, begun: str) -> None:
    template = template_of(name)
    tokenizer = cast(Tokenizer, SimpleNamespace(apply_chat_template=template.render, tool_template=template))

    def prompt(content: str) -> str:
        turns = read_messages([*ASKED, {"role": "assistant", "content": content}])
        return asyncio.run(
            render(tokenizer, turns=turns, add_generation_prompt=False, continue_final=True, variables={})
        )

    assert prompt(begun) == prompt("Sun.").removesuffix("Sun.") + begun
    assert prompt("Sun.").endswith("Sun.")
