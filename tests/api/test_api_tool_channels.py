"""Calls of models that think and call in channels of one answer: GPT-OSS, Gemma 4 and GLM, with their own templates."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.api.tools.formats import FORMATS
from console.api.tools.tool_use import control_texts
from engine.text.thinking import BY_NAME
from tests.api.harness import Served
from tests.api.test_api_tools import CHAT, HELLO, NOW, WEATHER, deltas_of, saying_tokens, serving_tools
from tests.fakes.backend import Reply
from tests.fakes.model import VOCAB_SIZE
from tests.fakes.tool_templates import published_template

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
GLM = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
THOUGHT = "<|channel|>analysis<|message|>I could <|constrain|>call.<|end|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
PARIS = ("get_weather", {"city": "Paris"})

Answer = tuple[str, str, list[tuple[str, str]], str]


def reply_of(text: str, tokens: tuple[str, ...]) -> Reply:
    """A reply with this text, in which control tokens are one token each."""
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    return saying_tokens(*(VOCAB_SIZE + tokens.index(part) if part in tokens else part for part in parts if part))


@asynccontextmanager
async def answering(folder: Path, template: str, tokens: tuple[str, ...], text: str) -> AsyncIterator[Served]:
    source = published_template(template).source
    async with serving_tools(folder, source, reply_of(text, tokens), tokens) as api:
        yield api


async def answers_of(api: Served, **body: Any) -> tuple[Answer, Answer]:
    """Thinking, content, calls and finish reason of an answer, whole and streamed."""
    body = {"messages": HELLO, "tools": [WEATHER, NOW], **body}
    choice = (await api.post(CHAT, **body))["choices"][0]
    message = choice["message"]
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())]
    whole = (message.get("reasoning") or "", message["content"] or "", calls, choice["finish_reason"])
    events = await api.events(CHAT, **body)
    deltas = deltas_of(events)
    thinking = "".join(delta.get("reasoning") or "" for delta in deltas)
    content = "".join(delta.get("content") or "" for delta in deltas)
    found: dict[int, list[str]] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        name, arguments = found.setdefault(piece["index"], ["", ""])
        function = piece["function"]
        found[piece["index"]] = [name + function.get("name", ""), arguments + function["arguments"]]
    finish = next(event["choices"][0]["finish_reason"] for event in reversed(events[:-1]) if event["choices"])
    return whole, (thinking, content, [(name, text) for name, text in found.values()], finish)


def parsed(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("text", "thinking", "content"),
    [
        (f"{THOUGHT}<|start|>assistant{CALL}", "I could <|constrain|>call.", ""),
        (CALL, "", ""),
        (
            f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
            "I could <|constrain|>call.",
            "I look.",
        ),
        (
            f"{THOUGHT}<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
            '{"city": "Paris"}',
            "I could <|constrain|>call.",
            "",
        ),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}", "", "I look."),
    ],
    ids=["after thinking", "at once", "after a preamble", "recipient first", "preamble without thinking"],
)
async def test_a_call_of_gpt_oss_is_a_call_and_its_analysis_is_thinking(
    tmp_path: Path, text: str, thinking: str, content: str
) -> None:
    async with answering(tmp_path, "gptoss", HARMONY, text) as api:
        for thought, words, calls, finish in await answers_of(api):
            assert (thought, words, parsed(calls), finish) == (thinking, content, [PARIS], "tool_calls")


async def test_an_answer_of_gpt_oss_that_calls_nothing_is_its_final_channel(tmp_path: Path) -> None:
    text = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>No rain."
    async with answering(tmp_path, "gptoss", HARMONY, text) as api:
        for answer in await answers_of(api):
            assert answer == ("I could <|constrain|>call.", "No rain.", [], "stop")


@pytest.mark.parametrize(
    ("template", "tokens", "text", "thinking"),
    [
        (
            "gptoss",
            HARMONY,
            f"<|channel|>analysis<|message|>I write {CALL}<|end|><|start|>assistant<|channel|>final<|message|>Done.",
            f"I write {CALL}",
        ),
        (
            "glm4moe",
            GLM,
            "\n<think>I write <tool_call>now\n</tool_call></think>\nDone.",
            "I write <tool_call>now\n</tool_call>",
        ),
    ],
    ids=["GPT-OSS", "GLM"],
)
async def test_markup_of_a_call_in_the_thinking_is_no_call(
    tmp_path: Path, template: str, tokens: tuple[str, ...], text: str, thinking: str
) -> None:
    async with answering(tmp_path, template, tokens, text) as api:
        for answer in await answers_of(api):
            assert answer == (thinking, "Done.", [], "stop")


@pytest.mark.parametrize(
    ("template", "tokens", "text", "thinking", "call"),
    [
        ("gptoss", HARMONY, f"{THOUGHT}<|start|>assistant{CALL}", "I could <|constrain|>call.", PARIS),
        (
            "gemma4",
            GEMMA,
            '<|channel>thought\nHm.<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
            "Hm.",
            PARIS,
        ),
        (
            "glm4moe",
            GLM,
            "\n<think>Hm.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "</tool_call>",
            "Hm.",
            PARIS,
        ),
    ],
    ids=["GPT-OSS", "Gemma", "GLM"],
)
async def test_an_answer_cut_by_max_tokens_has_no_markup_whole_or_streamed(
    tmp_path: Path, template: str, tokens: tuple[str, ...], text: str, thinking: str, call: tuple[str, Any]
) -> None:
    count = len(re.split(f"({'|'.join(map(re.escape, tokens))})", text)) // 2
    length = len(re.sub("|".join(map(re.escape, tokens)), "", text)) + count
    async with answering(tmp_path, template, tokens, text) as api:
        for num_tokens in range(1, length + 1):
            whole, streamed = await answers_of(api, max_tokens=num_tokens)
            assert whole == streamed
            thought, words, calls, finish = whole
            assert (words.strip(), finish) == ("", "length")
            assert thinking.startswith(thought)
            for name, arguments in calls:
                assert name == call[0]
                assert json.dumps(call[1]).startswith(arguments)
        answer, _ = await answers_of(api, max_tokens=length + 1)
    assert parsed(answer[2]) == [call]


async def test_calls_of_one_message_are_messages_of_their_own_where_the_template_renders_one(tmp_path: Path) -> None:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i, name in enumerate(("get_weather", "now"))
    ]
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": text} for i, text in ((1, "noon"), (0, "rain"))]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    async with answering(tmp_path, "gptoss", HARMONY, "<|channel|>final<|message|>Ok.") as api:
        await api.post(CHAT, messages=messages, tools=[WEATHER, NOW])
        ids = api.backend.submitted[-1].prompt_ids
    prompt = "".join(HARMONY[each - VOCAB_SIZE] if each >= VOCAB_SIZE else chr(each) for each in ids)
    parts = [
        "to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>",
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>',
        "to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>',
    ]
    places = [prompt.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


async def test_a_call_without_words_has_no_word_in_the_prompt_for_its_null_content(tmp_path: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    async with answering(tmp_path, "glm4moe", GLM, "Ok.") as api:
        await api.post(CHAT, messages=messages, tools=[NOW])
        ids = api.backend.submitted[-1].prompt_ids
    prompt = "".join(GLM[each - VOCAB_SIZE] if each >= VOCAB_SIZE else chr(each) for each in ids)
    assert "<tool_call>now" in prompt
    assert "None" not in prompt


def test_the_markers_of_channels_are_those_of_the_formats() -> None:
    by_name = {each.name: each for each in FORMATS}
    assert set(control_texts(by_name["GPT-OSS"])) == set(HARMONY)
    assert set(control_texts(by_name["Gemma 4"])) <= set(GEMMA)
    assert BY_NAME["gemma"].close in GEMMA
