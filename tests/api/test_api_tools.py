"""Tools in POST /v1/chat/completions: told to the model, called by it, answered by the client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from engine.config import Grammar
from engine.engine import GenerateRequest, RequestStream
from tests.api.harness import Served, serving
from tests.api.test_models_by_name import Folder
from tests.fakes.backend import FakeBackend, Gate, Reply, letters, saying
from tests.fakes.engines import Backends
from tests.fakes.model import EOS_ID, VOCAB_SIZE, fake_spec, write_fake_model
from tests.fakes.tool_templates import CODER, DEEPSEEK, HERMES, LLAMA, MISTRAL, UNKNOWN, write_tool_model

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALLED = [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}]
BROKEN = {"name": "now", "arguments": "["}
ANSWERED = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": CALLED},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]


def saying_tokens(*parts: str | int) -> Reply:
    """A reply of texts and single tokens, and then the end."""
    ids = [token for part in parts for token in (part.encode() if isinstance(part, str) else [part])]

    def reply(prompt_ids: object, index: int) -> int:
        return ids[index] if index < len(ids) else EOS_ID

    return reply


@asynccontextmanager
async def serving_tools(
    folder: Path, template: str, reply: Reply, control_tokens: tuple[str, ...] = (), gate: Gate | None = None
) -> AsyncIterator[Served]:
    """A server whose model has this template and gives this answer."""
    write_tool_model(folder, template, control_tokens)
    backend = FakeBackend(reply=reply, gate=gate, vocab_size=VOCAB_SIZE + len(control_tokens))
    async with serving(folder, backend, spec=fake_spec(folder)) as api:
        yield api


def deltas_of(events: list[Any]) -> list[dict[str, Any]]:
    """What the chunks of a stream add."""
    return [event["choices"][0]["delta"] for event in events if event != "[DONE]"]


async def test_calls_come_back_in_openai_s_shape(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying(f"Let me look.\n{PARIS}", then=EOS_ID)) as api:
        answer = await api.post(CHAT, messages=HELLO, tools=[WEATHER, NOW])
    [choice] = answer["choices"]
    [call] = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Let me look.", "refusal": None, "annotations": []}
    assert choice["finish_reason"] == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


async def test_content_is_null_where_the_answer_does_nothing_but_call(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying(PARIS, then=EOS_ID)) as api:
        answer = await api.post(CHAT, messages=HELLO, tools=[WEATHER])
    assert answer["choices"][0]["message"]["content"] is None


async def test_the_model_is_told_of_tools_as_its_own_template_tells_it(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying("ok", then=EOS_ID)) as api:
        answer = await api.post(CHAT, messages=HELLO, tools=[WEATHER, NOW])
        prompt = bytes(api.backend.submitted[-1].prompt_ids).decode()
    told = json.loads(prompt.splitlines()[0].removeprefix("tools: "))
    assert told[0] == WEATHER
    assert told[1]["function"] == {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_gives_the_name_first_and_then_the_arguments_as_they_come(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying(f"Hm. {PARIS}\n{PARIS}", then=EOS_ID)) as api:
        events = await api.events(CHAT, messages=HELLO, tools=[WEATHER])
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = deltas_of(events)
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hm."
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
    for index in (0, 1):
        first, *others = [piece for piece in pieces if piece["index"] == index]
        assert first["id"].startswith("call_")
        assert first["type"] == "function"
        assert first["function"] == {"name": "get_weather", "arguments": ""}
        assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in others)
        assert json.loads("".join(piece["function"]["arguments"] for piece in others)) == {"city": "Paris"}


async def test_text_before_a_call_streams_at_once_and_what_may_begin_one_is_held_back(tmp_path: Path) -> None:
    gate = Gate(len("Hi <tool_c"))
    async with serving_tools(tmp_path, HERMES, saying(f"Hi {PARIS}", then=EOS_ID), gate=gate) as api:
        body = {"messages": HELLO, "tools": [WEATHER], "stream": True}
        async with api.http.post(CHAT, json=body) as response:
            said = ""
            while said != "Hi":
                line = (await response.content.readline()).decode().removeprefix("data: ").strip()
                if line and not line.startswith(":"):
                    said += json.loads(line)["choices"][0]["delta"].get("content", "")
            gate.wait_until_reached()
            gate.open()
            rest = (await response.text()).split("\n\n")
    assert not any('"content"' in frame for frame in rest)


@pytest.mark.parametrize(
    ("template", "tokens", "reply"),
    [
        (HERMES, (), [PARIS]),
        (
            CODER,
            (),
            ["<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"],
        ),
        (MISTRAL, ("[TOOL_CALLS]",), [VOCAB_SIZE, ' [{"name": "get_weather", "arguments": {"city": "Paris"}}]']),
        (LLAMA, ("<|python_tag|>",), ['{"name": "get_weather", "parameters": {"city": "Paris"}}']),
        (LLAMA, ("<|python_tag|>",), [VOCAB_SIZE, '{"name": "get_weather", "parameters": {"city": "Paris"}}']),
        (
            DEEPSEEK,
            ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            [VOCAB_SIZE, VOCAB_SIZE + 1, "get_weather", VOCAB_SIZE + 2, '{"city": "Paris"}', VOCAB_SIZE + 3],
        ),
    ],
    ids=["Hermes", "Qwen3-Coder", "Mistral", "Llama bare", "Llama tagged", "DeepSeek"],
)
async def test_each_model_s_own_format_is_parsed_and_its_control_tokens_never_show(
    tmp_path: Path, template: str, tokens: tuple[str, ...], reply: list[str | int]
) -> None:
    lead = "" if template is LLAMA else "So."
    async with serving_tools(tmp_path, template, saying_tokens(lead, *reply), tokens) as api:
        answer = await api.post(CHAT, messages=HELLO, tools=[WEATHER])
        events = await api.events(CHAT, messages=HELLO, tools=[WEATHER])
    message = answer["choices"][0]["message"]
    assert message["content"] == (lead or None)
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert "".join(delta.get("content", "") for delta in deltas_of(events)) == lead


async def test_a_malformed_call_is_given_as_content_without_its_control_token(tmp_path: Path) -> None:
    reply = saying_tokens("So ", VOCAB_SIZE, '[{"name": "get_weather", "arguments": {"city" "Paris"}}]')
    async with serving_tools(tmp_path, MISTRAL, reply, ("[TOOL_CALLS]",)) as api:
        answer = await api.post(CHAT, messages=HELLO, tools=[WEATHER])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": 'So [{"name": "get_weather", "arguments": {"city" "Paris"}}]',
        "refusal": None,
        "annotations": [],
    }


def streamed(events: list[Any]) -> tuple[str, list[tuple[str, str]], str | None]:
    """What a stream says, the names and arguments of its calls, and why it ended."""
    said, calls = "", dict[int, tuple[str, str]]()
    for delta in deltas_of(events):
        said += delta.get("content") or ""
        for piece in delta.get("tool_calls", []):
            name, arguments = calls.get(piece["index"], ("", ""))
            function = piece["function"]
            calls[piece["index"]] = (name or function["name"], arguments + function.get("arguments", ""))
    return said, list(calls.values()), events[-2]["choices"][0]["finish_reason"]


def answered(answer: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str | None]:
    """The same of a whole answer."""
    [choice] = answer["choices"]
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return choice["message"]["content"] or "", calls, choice["finish_reason"]


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_call_that_max_tokens_cuts_off_is_a_partial_call_streamed_or_not(tmp_path: Path, choice: str) -> None:
    async with serving_tools(tmp_path, HERMES, saying(PARIS, then=EOS_ID)) as api:
        body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": choice}
        for tokens in range(1, len(PARIS)):
            whole = answered(await api.post(CHAT, **body, max_tokens=tokens))
            assert streamed(await api.events(CHAT, **body, max_tokens=tokens)) == whole
            said, calls, finish = whole
            assert finish == "length"
            if PARIS[:tokens].startswith("<tool_call>") or choice == "required":
                assert said == ""
            if tokens > len(named := '<tool_call>\n{"name": "get_weather",'):
                [(name, arguments)] = calls
                assert name == "get_weather"
                assert '{"city": "Paris"}'.startswith(arguments)
                assert arguments or tokens <= len(named + ' "arguments": ')


async def test_a_model_that_would_call_for_ever_calls_a_named_tool_once(tmp_path: Path) -> None:
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    named = {"type": "function", "function": {"name": "now"}}
    async with serving_tools(tmp_path, HERMES, saying(now * 9, then=EOS_ID)) as api:
        answer = await api.post(CHAT, messages=HELLO, tools=[NOW], tool_choice=named, max_tokens=400)
    assert answered(answer) == ("", [("now", "{}")], "tool_calls")
    assert answer["usage"]["completion_tokens"] <= len(now)


async def test_one_call_is_kept_where_parallel_calls_are_not_wanted(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying(f"{PARIS}\n{PARIS}", then=EOS_ID)) as api:
        body = {"messages": HELLO, "tools": [WEATHER]}
        several = await api.post(CHAT, **body)
        one = await api.post(CHAT, **body, parallel_tool_calls=False)
    assert len(several["choices"][0]["message"]["tool_calls"]) == 2
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1


async def test_with_tool_choice_none_the_model_is_told_of_no_tools_and_calls_none(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying(PARIS, then=EOS_ID)) as api:
        answer = await api.post(CHAT, messages=HELLO, tools=[WEATHER], tool_choice="none")
        prompt = bytes(api.backend.submitted[-1].prompt_ids).decode()
    assert prompt == "user: hello\nassistant: "
    assert answer["choices"][0]["message"]["content"] == PARIS


async def test_calls_and_their_results_become_the_prompt_that_the_template_makes(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying("ok", then=EOS_ID)) as api:
        await api.post(CHAT, messages=ANSWERED)
        prompt = bytes(api.backend.submitted[-1].prompt_ids).decode()
    assert prompt == (
        'user: hello\nassistant: <tool_call>{"name": "now", "arguments": {"zone": "CET"}}</tool_call>\n'
        "result now call_1: noon\nassistant: "
    )


async def test_a_template_that_joins_arguments_to_text_gets_their_json(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, DEEPSEEK, saying("ok", then=EOS_ID)) as api:
        await api.post(CHAT, messages=ANSWERED)
        prompt = bytes(api.backend.submitted[-1].prompt_ids).decode()
    assert '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"zone": "CET"}<｜tool▁call▁end｜>' in prompt


async def test_ids_of_another_model_s_calls_are_made_to_fit_the_template(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, MISTRAL, saying("ok", then=EOS_ID)) as api:
        await api.post(CHAT, messages=ANSWERED)
        prompt = bytes(api.backend.submitted[-1].prompt_ids).decode()
    fitted = prompt.split("result now ")[1][:9]
    assert fitted.isalnum()
    assert prompt.count(fitted) == 2


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "be kind"}]], ids=["none", "own"])
async def test_a_template_without_tools_has_them_in_its_system_message(
    tmp_path: Path, system: list[dict[str, str]]
) -> None:
    backend = FakeBackend(reply=saying(PARIS, then=EOS_ID))
    async with serving(tmp_path, backend, spec=fake_spec(write_fake_model(tmp_path))) as api:
        async with api.http.post(CHAT, json={"messages": [*system, *HELLO], "tools": [WEATHER]}) as response:
            answer = await response.json()
            assert response.headers["X-Tool-Format"] == "Hermes (default)"
        prompt = bytes(backend.submitted[-1].prompt_ids).decode()
        plain = await api.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
        assert "X-Tool-Format" not in plain.headers
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], answer["choices"][0]["finish_reason"]) == ("get_weather", "tool_calls")
    assert prompt.startswith("system: be kind\n\nYou may call" if system else "system: You may call")
    assert json.dumps(WEATHER) in prompt
    assert prompt.endswith("user: hello\nassistant: ")


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)


async def test_a_template_that_refuses_system_messages_has_tools_in_the_first_user_message(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, NO_SYSTEM, saying(PARIS, then=EOS_ID)) as api:
        messages = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "rain?"}]
        async with api.http.post(CHAT, json={"messages": messages, "tools": [WEATHER]}) as response:
            answer = await response.json()
            assert response.headers["X-Tool-Format"] == "Hermes (default)"
        prompt = bytes(api.backend.submitted[-1].prompt_ids).decode()
        system = [{"role": "system", "content": "be kind"}]
        error = await api.refusal(CHAT, messages=[*system, *HELLO], tools=[WEATHER])
    assert [name for name, _ in answered(answer)[1]] == ["get_weather"]
    assert prompt.startswith("user: You may call")
    assert json.dumps(WEATHER) in prompt
    assert prompt.endswith("\n\nhello\nassistant: hi\nuser: rain?\nassistant: ")
    assert "System role not supported" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "tools": [WEATHER]}),
        ("/v1/responses", {"input": "hello", "tools": [{"type": "function", **WEATHER["function"]}]}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 200, "tools": [{"name": "now", "input_schema": {}}]}),
        ("/api/chat", {"messages": HELLO, "tools": [WEATHER]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_dialect_says_in_a_header_that_tools_are_described_in_the_default_format(
    api: Served, path: str, body: dict[str, Any], stream: bool
) -> None:
    limit = {"options": {"num_predict": 2}} if path.startswith("/api") else {}
    async with api.http.post(path, json={**body, **limit, "stream": stream}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["X-Tool-Format"] == "Hermes (default)"
        await response.read()


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_stream_that_began_while_its_model_was_loaded_says_the_default_format_in_a_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("console.api.requests.stream.COMMENT_S", 0.01)
    gate = Gate()
    others = Backends(FakeBackend(load_gate=gate))
    tool = WEATHER if path == CHAT else {"name": "now", "input_schema": {"type": "object"}}
    body = {"model": "a", "messages": HELLO, "max_tokens": 2, "stream": True, "tools": [tool]}
    async with (
        serving(tmp_path / "fake", others=others, loadable=Folder(tmp_path, "a")) as api,
        api.http.post(path, json=body) as response,
    ):
        assert (await response.content.readline()).startswith(b': loading model="a"')
        gate.open()
        lines = (await response.text()).splitlines()
        assert "X-Tool-Format" not in response.headers
    first = next(i for i, line in enumerate(lines) if line.startswith(("data:", "event:")))
    assert ": X-Tool-Format: Hermes (default)" in lines[:first]


async def test_past_calls_and_results_are_text_where_the_template_has_no_tools(api: Served) -> None:
    results = [{**ANSWERED[-1], "content": text} for text in ("noon", "CET")]
    await api.post(CHAT, messages=[*ANSWERED[:-1], *results, *HELLO], max_tokens=1)
    assert bytes(api.backend.submitted[-1].prompt_ids).decode() == (
        'user: hello\nassistant: <tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>\n'
        "user: <tool_response>\nnoon\n</tool_response>\n<tool_response>\nCET\n</tool_response>\n"
        "user: hello\nassistant: "
    )


ONLY_NOW = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
}


async def test_allowed_tools_leave_the_prompt_as_it_is(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying("ok", then=EOS_ID)) as api:
        await api.post(CHAT, messages=HELLO, tools=[WEATHER, NOW])
        await api.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], tool_choice=ONLY_NOW)
        free, restricted = (bytes(each.prompt_ids).decode() for each in api.backend.submitted)
        error = await api.refusal(CHAT, messages=HELLO, tools=[WEATHER], tool_choice=ONLY_NOW)
    assert restricted == free
    assert "get_weather" in restricted
    assert (error["param"], "'now'" in error["message"]) == ("tool_choice", True)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_a_model_that_would_call_another_tool_calls_an_allowed_one(tmp_path: Path, mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {**ONLY_NOW["allowed_tools"], "mode": mode}}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [WEATHER, {"type": "function", "function": {"name": "now", "parameters": nothing}}]
    async with serving_tools(tmp_path, HERMES, saying(PARIS, then=EOS_ID)) as api:
        answer = await api.post(
            CHAT, messages=HELLO, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=200
        )
    assert answered(answer)[1] == [("now", "{}")]


async def test_a_call_of_a_tool_that_is_not_allowed_stays_text_where_calls_begin_like_any_answer(
    tmp_path: Path,
) -> None:
    call = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    async with serving_tools(tmp_path, LLAMA, saying(call, then=EOS_ID)) as api:
        answer = await api.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], tool_choice=ONLY_NOW)
        assert "get_weather" in bytes(api.backend.submitted[-1].prompt_ids).decode()
    assert answered(answer) == (call, [], "stop")


async def test_a_format_that_is_not_known_is_named_not_passed_over(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, UNKNOWN, saying("ok", then=EOS_ID)) as api:
        error = await api.refusal(CHAT, messages=HELLO, tools=[WEATHER])
    assert error["param"] == "tools"
    assert "<|call_begin|>" in error["message"]
    assert "Hermes" in error["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_a_call_that_must_come_is_held_to_a_grammar_of_the_model_s_format(tmp_path: Path, choice: object) -> None:
    async with serving_tools(tmp_path, HERMES, saying(PARIS, then=EOS_ID)) as api:
        await api.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], tool_choice=choice)
        grammar = api.backend.submitted[-1].params.grammar
    assert isinstance(grammar, Grammar)
    assert ("get_weather" in grammar.source) == (choice == "required")
    assert '\\"name\\": \\"now\\"' in grammar.source


@pytest.mark.parametrize(
    ("template", "tokens"),
    [(HERMES, ()), (CODER, ()), (MISTRAL, ("[TOOL_CALLS]",)), (LLAMA, ("<|python_tag|>",))],
    ids=["Hermes", "Qwen3-Coder", "Mistral", "Llama"],
)
async def test_a_model_that_would_talk_nonsense_calls_where_it_must(
    tmp_path: Path, template: str, tokens: tuple[str, ...]
) -> None:
    city = {"type": "string", "enum": ["Paris", "Oslo"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    async with serving_tools(tmp_path, template, letters, tokens) as api:
        body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        choice = (await api.post(CHAT, **body))["choices"][0]
        events = await api.events(CHAT, **body)
    assert choice["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    called = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    streamed = [piece for delta in deltas_of(events) for piece in delta.get("tool_calls", [])]
    assert "".join(piece["function"]["arguments"] for piece in streamed) == "".join(called)
    assert all(json.loads(arguments)["city"] in ("Paris", "Oslo") for arguments in called)


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "here": {"type": "boolean"}},
    "required": ["name", "here"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ADA = '{"name": "Ada", "here": true}'


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    here: bool


FORMATS_OF_CALLS = pytest.mark.parametrize(
    ("template", "call"),
    [
        (HERMES, PARIS),
        (
            CODER,
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        ),
        (LLAMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}'),
    ],
    ids=["Hermes", "Qwen3-Coder", "Llama"],
)


@FORMATS_OF_CALLS
async def test_an_answer_with_a_format_and_tools_is_calls_or_text_of_the_format(
    tmp_path: Path, template: str, call: str
) -> None:
    body = {"messages": HELLO, "tools": [WEATHER], "response_format": AS_PERSON, "max_tokens": 200}
    async with serving_tools(tmp_path / "calls", template, saying(call, then=EOS_ID)) as api:
        said, calls, finish = answered(await api.post(CHAT, **body))
        assert (said, finish) == ("", "tool_calls")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", {"city": "Paris"})]
        assert streamed(await api.events(CHAT, **body)) == ("", calls, "tool_calls")
    async with serving_tools(tmp_path / "says", template, saying(ADA, then=EOS_ID)) as api:
        assert answered(await api.post(CHAT, **body)) == (ADA, [], "stop")
        assert streamed(await api.events(CHAT, **body)) == (ADA, [], "stop")
    async with serving_tools(tmp_path / "talks", template, saying("No idea.", then=EOS_ID)) as api:
        said, calls, _ = answered(await api.post(CHAT, **body))
        assert calls or json.loads(said)["name"] in ("Ada", "Grace")


async def test_any_json_object_may_be_the_format_beside_tools(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying('{"a": [1]}', then=EOS_ID)) as api:
        body = {"messages": HELLO, "tools": [WEATHER], "response_format": {"type": "json_object"}}
        assert answered(await api.post(CHAT, **body)) == ('{"a": [1]}', [], "stop")
        assert answered(await api.post(CHAT, **body, tool_choice="none")) == ('{"a": [1]}', [], "stop")


async def test_a_call_that_must_come_is_made_whatever_the_format_of_text(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying(ADA, then=EOS_ID)) as api:
        body = {"messages": HELLO, "tools": [WEATHER], "response_format": AS_PERSON, "max_tokens": 300}
        said, [(name, _)], _ = answered(await api.post(CHAT, **body, tool_choice="required", parallel_tool_calls=False))
    assert (said, name) == ("", "get_weather")


@pytest.mark.parametrize(
    ("field", "value"),
    [("guided_regex", "a+"), ("guided_choice", ["a", "b"]), ("guided_grammar", 'start: "a"')],
)
async def test_a_format_other_than_json_is_refused_beside_tools(tmp_path: Path, field: str, value: object) -> None:
    async with serving_tools(tmp_path, HERMES, saying("ok", then=EOS_ID)) as api:
        error = await api.refusal(CHAT, messages=HELLO, tools=[WEATHER], **{field: value})
    assert error["param"] == field
    assert "JSON" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "later"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
            },
            "tool_choice",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "shape": 1}}]}, "tools[0].function.shape"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "a",
                            "strict": True,
                            "parameters": {"type": "object", "properties": {"b": {"type": "nonsense"}}},
                        },
                    }
                ]
            },
            "tools[0].function.parameters",
        ),
        ({"functions": [NOW["function"]]}, "functions"),
        ({"function_call": {"name": "now"}}, "function_call"),
        ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALLED[0], "function": {"name": "a", "arguments": "["}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_value_of_tools_is_refused_by_its_name(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with serving_tools(tmp_path, HERMES, saying("ok", then=EOS_ID)) as api:
        error = await api.refusal(CHAT, **{"messages": HELLO, **body})
        assert api.backend.submitted == []
    assert error["param"] == param


STRICT_NOW = {"type": "function", "function": {**NOW["function"], "strict": True}}


async def test_strict_that_cannot_be_enforced_is_said_in_a_header(tmp_path: Path) -> None:
    many = [{"type": "function", "function": {"name": f"f{i}", "strict": True}} for i in range(20)]
    async with serving_tools(tmp_path, LLAMA, saying("ok", then=EOS_ID)) as api:
        for stream in (False, True):
            body = {"messages": HELLO, "tools": [WEATHER, STRICT_NOW], "stream": stream}
            async with api.http.post(CHAT, json=body) as response:
                assert response.status == 200
                assert response.headers["X-Tools-Not-Strict"] == "now"
        async with api.http.post(CHAT, json={"messages": HELLO, "tools": many}) as response:
            assert response.headers["X-Tools-Not-Strict"] == "f0, f1, f2, f3, f4, f5, f6, f7 and 12 more"
        async with api.http.post(CHAT, json=body | {"tool_choice": "required"}) as response:
            assert "X-Tools-Not-Strict" not in response.headers


async def test_strict_that_is_enforced_has_no_header(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying("ok", then=EOS_ID)) as api:
        async with api.http.post(CHAT, json={"messages": HELLO, "tools": [WEATHER, STRICT_NOW]}) as response:
            assert response.status == 200
            assert "X-Tools-Not-Strict" not in response.headers
        assert api.backend.submitted[-1].params.grammar is not None


async def test_one_schema_that_cannot_be_enforced_leaves_other_tools_strict(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"b": {"not": {"type": "null"}}}}
    loose = {"type": "function", "function": {"name": "a", "strict": True, "parameters": schema}}
    async with serving_tools(tmp_path, HERMES, saying("ok", then=EOS_ID)) as api:
        async with api.http.post(CHAT, json={"messages": HELLO, "tools": [loose, STRICT_NOW]}) as response:
            assert response.headers["X-Tools-Not-Strict"] == "a"
        assert api.backend.submitted[-1].params.grammar is not None
        named = {"type": "function", "function": {"name": "now"}}
        await api.post(CHAT, messages=HELLO, tools=[loose, STRICT_NOW], tool_choice=named)
        for choice in ("required", {"type": "function", "function": {"name": "a"}}):
            error = await api.refusal(CHAT, messages=HELLO, tools=[STRICT_NOW, loose], tool_choice=choice)
            assert error["param"] == "tools[1].function.parameters"


async def test_openai_s_own_client_puts_a_streamed_call_together(tmp_path: Path) -> None:
    messages: Any = HELLO
    tools: Any = [WEATHER]
    async with (
        serving_tools(tmp_path, HERMES, saying(f"Hm. {PARIS}", then=EOS_ID)) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none") as client,
        client.chat.completions.stream(model="fake", messages=messages, tools=tools) as stream,
    ):
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Hm."
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}


async def test_openai_s_own_client_parses_an_answer_with_a_format_and_tools(tmp_path: Path) -> None:
    messages: Any = HELLO
    tools: Any = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]
    for text in (PARIS, ADA):
        async with (
            serving_tools(tmp_path, HERMES, saying(text, then=EOS_ID)) as api,
            openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none") as client,
        ):
            answer = await client.chat.completions.parse(
                model="fake", messages=messages, tools=tools, response_format=Person
            )
        message = answer.choices[0].message
        if text == ADA:
            assert (message.parsed, message.tool_calls) == (Person(name="Ada", here=True), None)
        else:
            assert message.tool_calls is not None
            assert message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}


async def test_a_request_with_tools_is_bound_to_the_model_whose_format_its_answer_is_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_tools(tmp_path, HERMES, saying("ok", then=EOS_ID)) as api:
        submitted: list[GenerateRequest] = []
        submit = api.engine.submit

        def note(request: GenerateRequest) -> RequestStream:
            submitted.append(request)
            return submit(request)

        monkeypatch.setattr(api.engine, "submit", note)
        await api.post(CHAT, messages=HELLO, tools=[NOW])
        await api.post(CHAT, messages=HELLO)
    assert [request.encode is None for request in submitted] == [True, False]
