"""Calls as real chat templates write them are read back as the same calls: whole, streamed and cut off anywhere."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from console.api.requests.conversation import read_messages, render
from console.api.tools import (
    AnswerPiece,
    CallArguments,
    CallEnd,
    CallReader,
    CallStart,
    TextPiece,
    Tool,
    read_answer,
)
from console.api.tools.formats import FORMATS, ToolFormat
from console.api.tools.tool_use import control_texts
from engine.text.tokenizer import Tokenizer
from tests.fakes.tool_templates import published_template

pytestmark = pytest.mark.long

WEATHER = Tool(
    name="get_weather",
    description="Look up the weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name"},
            "days": {"type": "integer", "description": "Number"},
            "share": {"type": "number", "description": "Part"},
            "exact": {"type": "boolean", "description": "Switch"},
            "limit": {"type": ["integer", "null"], "description": "Maximum"},
            "code": {"type": "string", "description": "Digits"},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "Labels"},
            "options": {"type": "object", "properties": {}, "description": "More"},
        },
        "required": ["city"],
    },
)
NOW = Tool(name="now", description="Read the clock")
TOOLS = (WEATHER, NOW)
PLAIN: dict[str, Any] = {
    "city": "Zürich <HB> {x}\n東京 🌦",
    "days": 3,
    "share": -0.5,
    "exact": True,
    "limit": None,
    "code": "007",
    "tags": ["a, b", "[c]"],
    "options": {"deep": {"n": None, "all": [1, {}, []]}, "text": "x: y"},
}
QUOTED: dict[str, Any] = {
    **PLAIN,
    "city": '"Zürich" \'HB\' {"x": [1}\n\n\\n C:\\new </b> 東京 🌦',
    "code": '{"a": 1}',
    "tags": ['say "hi"', "it's", "{}"],
    "options": {"deep": {"n": None, "all": [1, {}, []]}, "text": 'a "b" }', "off": False},
}
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>", "<|call|>", "<seed:eos>", "[e~[", "<|eot|>"),
    *("<end_of_sentence>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|message_sep|>", "<|observation|>"),
    *("<end_of_turn>", "<|tool_response>", "<|assistant_end|>", "<turn|>", "[RESULT", "<|eos|>"),
)
"""What templates write after an answer."""


@dataclass(frozen=True)
class Transcript:
    """A template and the name of its format. escapes: False where it writes quotes within quotes as they are.
    unions: False where it cannot describe a parameter of several types."""

    template: str
    format: str
    escapes: bool = True
    unions: bool = True

    def __str__(self) -> str:
        return self.template


TRANSCRIPTS = (
    Transcript("gptoss", "GPT-OSS"),
    Transcript("seed_oss", "Seed-OSS"),
    Transcript("minimax_m1", "MiniMax-M1"),
    Transcript("minimax_m2", "MiniMax-M2"),
    Transcript("deepseek_v3_2", "DeepSeek V3.2"),
    Transcript("deepseek_v4", "DeepSeek V4"),
    Transcript("tool_chat_qwen3coder", "Qwen3-Coder"),
    Transcript("qwen3_5_think", "Qwen3-Coder"),
    Transcript("glm4_7", "GLM-4.7"),
    Transcript("glm4moe", "GLM-4.5"),
    Transcript("gemma4", "Gemma 4"),
    Transcript("tool_chat_functiongemma", "FunctionGemma"),
    Transcript("kimi_k2", "Kimi K2"),
    Transcript("tool_chat_deepseekv3", "DeepSeek V3"),
    Transcript("tool_chat_deepseekv31", "DeepSeek V3.1"),
    Transcript("mistral_small_3_2", "Mistral"),
    Transcript("tool_chat_mistral", "Mistral"),
    Transcript("tool_chat_apertus", "Apertus"),
    Transcript("lfm2_5", "LFM2", escapes=False),
    Transcript("gigachat3_1", "GigaChat 3.1"),
    Transcript("tool_chat_internlm2_tool", "InternLM2"),
    Transcript("tool_chat_granite", "Granite"),
    Transcript("tool_chat_granite_20b_fc", "Granite 20B"),
    Transcript("llama3_1", "Llama 3"),
    Transcript("llama3_2", "Llama 3"),
    Transcript("tool_chat_llama3_1_json", "Llama 3"),
    Transcript("tool_chat_llama4_json", "Llama 3"),
    Transcript("functionary_v3_1", "Functionary"),
    Transcript("tool_chat_xlam_qwen", "xLAM"),
    Transcript("tool_chat_llama4_pythonic", "Python", escapes=False),
    Transcript("tool_chat_hunyuan_a13b", "Jamba"),
    Transcript("qwen2_5", "Hermes"),
    Transcript("qwen3", "Hermes"),
    Transcript("qwen3_instruct_2507", "Hermes"),
    Transcript("tool_chat_hermes", "Hermes", unions=False),
)


def format_of(transcript: Transcript) -> ToolFormat:
    source = published_template(transcript.template).source
    return next(each for each in FORMATS if each.matches(source))


def calls_of(transcript: Transcript) -> list[tuple[str, dict[str, Any]]]:
    """The calls of one turn: two, or one where the format has no more."""
    calls = [("get_weather", QUOTED if transcript.escapes else PLAIN), ("now", {})]
    return calls[:1] if format_of(transcript).one_per_turn or format_of(transcript).name == "Llama 3" else calls


def tools_of(transcript: Transcript) -> list[Tool]:
    if transcript.unions:
        return list(TOOLS)
    schema = json.loads(json.dumps(WEATHER.schema).replace('["integer", "null"]', '"integer"'))
    return [msgspec.structs.replace(WEATHER, parameters=schema), NOW]


def prompt_of(transcript: Transcript, messages: list[dict[str, Any]], *, opens_answer: bool) -> str:
    """The prompt of a conversation with tools."""
    template = published_template(transcript.template)
    tokenizer = cast(Tokenizer, SimpleNamespace(apply_chat_template=template.render, tool_template=template))
    return asyncio.run(
        render(
            tokenizer,
            turns=read_messages(messages),
            add_generation_prompt=opens_answer,
            continue_final=False,
            variables={},
            tools=[tool.definition() for tool in tools_of(transcript)],
        )
    )


def conversation(transcript: Transcript) -> list[dict[str, Any]]:
    """A question, calls and their results."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls_of(transcript))
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "RESULT"} for call in calls]
    return [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


@cache
def written(transcript: Transcript) -> str:
    """What the template writes as the assistant's calls."""
    asked, called, *results = conversation(transcript)
    plain = prompt_of(transcript, [asked, {"role": "assistant", "content": "ANSWER"}], opens_answer=False)
    full = prompt_of(transcript, [asked, called, *results], opens_answer=True)
    same = next(i for i, (one, other) in enumerate(zip(plain, full, strict=False)) if one != other)
    if (tag := full.rfind("<", 0, same)) > full.rfind(">", 0, same):
        same = tag
    text = full[same:]
    ends = [text.index(end) for end in ENDS if end in text]
    text = text[: min(ends)] if ends else text
    return text.rpartition("<|header_end|>")[2].lstrip().removeprefix("</think>")


def reader_of(transcript: Transcript, *, control: bool) -> CallReader:
    """A reader of one answer. control: its markers are control tokens of the model."""
    tool_format = format_of(transcript)
    return CallReader(tool_format, TOOLS, hidden=tuple(control_texts(tool_format)) if control else ())


def summary(pieces: list[AnswerPiece]) -> tuple[str, list[tuple[str, str]], int]:
    """The text of an answer, its calls with their arguments, and the number of whole calls."""
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case CallStart(name=name):
                calls.append((name, ""))
            case CallArguments(text=more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return text, calls, sum(isinstance(piece, CallEnd) for piece in pieces)


def fed(reader: CallReader, pieces: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    return summary([*(piece for text in pieces for piece in reader.feed(text)), *reader.finish()])


def parsed(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


each_template = pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=str)
each_tokenizer = pytest.mark.parametrize("control", [False, True], ids=["plain markers", "control tokens"])


@pytest.mark.parametrize("template", ["gemma3", "smollm3"])
def test_tools_calls_and_results_are_text_where_a_template_has_none(template: str) -> None:
    prompt = prompt_of(Transcript(template, "Hermes"), conversation(Transcript("qwen2_5", "Hermes")), opens_answer=True)
    assert "<tools>" in prompt
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in prompt
    assert "<tool_response>\nRESULT\n</tool_response>" in prompt


@each_template
def test_the_format_of_a_template_is_found(transcript: Transcript) -> None:
    assert format_of(transcript).name == transcript.format


@each_template
@each_tokenizer
def test_calls_as_a_template_writes_them_are_read_as_those_calls(transcript: Transcript, control: bool) -> None:
    text, calls = read_answer(reader_of(transcript, control=control), written(transcript))
    assert text.strip() == ""
    assert [(call.name, json.loads(call.arguments)) for call in calls] == calls_of(transcript)
    assert not any(call.truncated for call in calls)


@each_template
@each_tokenizer
def test_streamed_calls_are_the_same_calls(transcript: Transcript, control: bool) -> None:
    text, chance = written(transcript), random.Random(0)
    whole = fed(reader_of(transcript, control=control), [text])
    assert fed(reader_of(transcript, control=control), list(text)) == whole
    for _ in range(20):
        cuts = sorted(chance.sample(range(len(text)), 12))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert fed(reader_of(transcript, control=control), parts) == whole


@each_template
def test_text_before_calls_stays_text(transcript: Transcript) -> None:
    if format_of(transcript).bare:
        pytest.skip("its calls are the whole answer")
    text, calls, _ = fed(reader_of(transcript, control=True), ["Let me look.\n", written(transcript)])
    assert text.strip() == "Let me look."
    assert parsed(calls) == calls_of(transcript)


@each_template
@each_tokenizer
def test_calls_cut_by_max_tokens_anywhere_leave_whole_calls_one_partial_call_and_no_markup(
    transcript: Transcript, control: bool
) -> None:
    text, expected = written(transcript), calls_of(transcript)
    tool_format = format_of(transcript)
    tokens = list(control_texts(tool_format)) if control else []
    openings = [each for each in tool_format.shape.openings if not any(token in each for token in tokens)]
    _, whole, _ = fed(reader_of(transcript, control=control), [text])
    for end in range(len(text)):
        if within_token(text, end, tokens):
            continue
        words, calls, num_whole = fed(reader_of(transcript, control=control), [text[:end]])
        assert parsed(calls[:num_whole]) == expected[:num_whole]
        assert len(calls) - num_whole in (0, 1)
        for (name, arguments), (entire_name, entire) in zip(calls, whole, strict=False):
            assert name == entire_name
            assert entire.startswith(arguments)
        is_bare = tool_format.bare and not calls and words == text[:end]
        assert is_bare or not words.strip() or any(opening.startswith(words.strip()) for opening in openings)


def within_token(text: str, end: int, tokens: list[str]) -> bool:
    """Whether a text of tokens cannot end there."""
    return any(text.startswith(token, start) for token in tokens for start in range(end - len(token) + 1, end))
