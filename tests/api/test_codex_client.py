"""OpenAI's Codex CLI against POST /v1/responses: a session as it sends it, for a model whose name it does not know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Served
from tests.api.test_api_tools import serving_tools
from tests.fakes.model import EOS_ID
from tests.fakes.tool_templates import HERMES

PATH = "/v1/responses"
HEADERS = {
    "User-Agent": "codex_cli_rs/0.98.0 (Linux 6.8; x86_64) xterm",
    "originator": "codex_cli_rs",
    "session_id": "0198b2b6-6d1c-7a52-9d3f-0c5f5f1f2a11",
    "Accept": "text/event-stream",
}
METADATA = {"internal_chat_message_metadata_passthrough": {"turn_id": "0198b2b7"}}


def function(name: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    """A tool as Codex declares it."""
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "name": name, "description": f"{name}.", "strict": False, "parameters": schema}


TEXT, NUMBER, FLAG = {"type": "string", "description": "."}, {"type": "number"}, {"type": "boolean"}
STEP = {
    "type": "object",
    "properties": {"step": {"type": "string"}, "status": {"type": "string"}},
    "required": ["step", "status"],
    "additionalProperties": False,
}
TOOLS = [
    function(
        *("exec_command", ["cmd"]),
        cmd=TEXT,
        workdir=TEXT,
        shell=TEXT,
        tty=FLAG,
        login=FLAG,
        yield_time_ms=NUMBER,
        max_output_tokens=NUMBER,
        sandbox_permissions=TEXT,
        justification=TEXT,
        prefix_rule={"type": "array", "items": {"type": "string"}},
    ),
    function("write_stdin", ["session_id"], session_id=NUMBER, chars=TEXT, yield_time_ms=NUMBER),
    function("update_plan", ["plan"], explanation={"type": "string"}, plan={"type": "array", "items": STEP}),
    function("view_image", ["path"], path=TEXT),
]


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **METADATA}


START = [
    message("developer", "<permissions instructions>"),
    message("user", "<environment_context>"),
    message("user", "What is here?"),
]


def body_of(items: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The body of a turn: always the whole conversation."""
    return {
        "model": "fake",
        "instructions": "You are a coding agent running in the Codex CLI.",
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "0198b2b6-6d1c-7a52-9d3f-0c5f5f1f2a11",
        "client_metadata": {"x-codex-installation-id": "5f1f2a11"},
        **fields,
    }


def reply(prompt_ids: Sequence[int], index: int) -> int:
    """The model: it runs a command, looks at a picture, and answers."""
    prompt = bytes(prompt_ids).decode()
    if "result view_image" in prompt:
        text = "A readme and a picture."
    elif "result exec_command" in prompt:
        text = '<tool_call>{"name": "view_image", "arguments": {"path": "a.png"}}</tool_call>'
    else:
        text = 'Looking.\n<tool_call>{"name": "exec_command", "arguments": {"cmd": "ls"}}</tool_call>'
    return text.encode()[index] if index < len(text) else EOS_ID


async def turn(api: Served, items: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The items of the answer as Codex reads them: each once that it is done, and the end, without which it retries."""
    async with api.http.post(PATH, json=body_of(items, **fields), headers=HEADERS) as response:
        assert response.status == 200, await response.text()
        data = [line.removeprefix("data: ") for line in (await response.text()).splitlines() if "data: " in line]
    events = [json.loads(each) for each in data]
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["id"].startswith("resp_")
    assert set(events[-1]["response"]["usage"]) >= {"input_tokens", "output_tokens", "total_tokens"}
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def sent_back(item: dict[str, Any]) -> dict[str, Any]:
    """An item as Codex sends it with the next turn: what it knows of it, without its id."""
    kept = {"message": ("role", "content"), "function_call": ("name", "arguments", "call_id")}[item["type"]]
    return {"type": item["type"], **{name: item[name] for name in kept}, **METADATA}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "reasoning": {"effort": "medium", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "text": {"verbosity": "medium"},
            "parallel_tool_calls": True,
            "service_tier": "priority",
        },
    ],
    ids=["unknown model", "with reasoning and verbosity"],
)
async def test_a_session_of_codex_goes_from_question_to_call_to_output_to_answer(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with serving_tools(tmp_path, HERMES, reply) as api:
        items = [*START]
        said, called = await turn(api, items, **fields)
        assert said["content"][0]["text"] == "Looking."
        assert (called["name"], json.loads(called["arguments"])) == ("exec_command", {"cmd": "ls"})
        listing = "Exit code: 0\nOutput:\nREADME.md\na.png"
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": listing, **METADATA}
        items += [sent_back(said), sent_back(called), output]

        [looked] = await turn(api, items, **fields)
        assert (looked["name"], json.loads(looked["arguments"])) == ("view_image", {"path": "a.png"})
        picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"}
        output = {"type": "function_call_output", "call_id": looked["call_id"], "output": [picture], **METADATA}
        items += [sent_back(looked), output]

        [answer] = await turn(api, items, **fields)
        assert answer["content"][0]["text"] == "A readme and a picture."
        prompt = bytes(api.backend.submitted[-1].prompt_ids).decode()
    assert prompt.index("user: What is here?") < prompt.index(listing) < prompt.index("(an image, which this model")
    assert "turn_id" not in prompt


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ({"type": "web_search", "external_web_access": False}, "runs no tools of its own"),
        ({"type": "image_generation", "output_format": "png"}, "runs no tools of its own"),
        ({"type": "tool_search", "execution": "client"}, "runs no tools of its own"),
        ({"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, "send type function"),
        ({"type": "local_shell"}, "send type function"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
async def test_tools_that_codex_sends_for_models_of_openai_are_refused_by_name(
    tmp_path: Path, tool: dict[str, Any], reason: str
) -> None:
    async with serving_tools(tmp_path, HERMES, reply) as api:
        body = body_of(START, tools=[*TOOLS, tool])
        error = await api.refusal(PATH, **body)
    assert f"tools[4] of type {tool['type']} is not supported" in error["message"]
    assert reason in error["message"]


async def test_an_image_of_the_user_is_refused_as_models_here_read_text(tmp_path: Path) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    async with serving_tools(tmp_path, HERMES, reply) as api:
        error = await api.refusal(PATH, **body_of([{"type": "message", "role": "user", "content": [picture]}]))
    assert "input[0].content[0] of type input_image is not supported" in error["message"]
