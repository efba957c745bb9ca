"""POST /v1/messages: Anthropic's dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from console.api.server import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import Served, serving, until
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying
from tests.fakes.model import EOS_ID

HELLO = [{"role": "user", "content": "hello"}]
HELLO_PROMPT = "user: hello\nassistant: "

Event = tuple[str, dict[str, Any]]


def text_block(text: str) -> dict[str, str | None]:
    return {"type": "text", "text": text, "citations": None}


async def ask(api: Served, **body: Any) -> dict[str, Any]:
    """The answer to `body`."""
    return await api.post("/v1/messages", **{"max_tokens": 20, "messages": HELLO, **body})


async def prompt_of(api: Served, **body: Any) -> str:
    """The prompt that the backend got."""
    await ask(api, **body)
    return bytes(api.backend.submitted[-1].prompt_ids).decode()


async def stream(api: Served, **body: Any) -> list[Event]:
    """The events of a streamed answer, each as (its name, what it holds)."""
    body = {"max_tokens": 20, "messages": HELLO, "stream": True, **body}
    async with api.http.post("/v1/messages", json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


async def refusal(api: Served, status: int = 400, path: str = "/v1/messages", **body: Any) -> dict[str, Any]:
    """The error of a request that must be refused."""
    async with api.http.post(path, json={"max_tokens": 20, "messages": HELLO, **body}) as response:
        answer = await response.json()
        assert response.status == status, answer
        assert answer["type"] == "error"
        assert set(answer["error"]) == {"type", "message"}
        return dict(answer["error"])


def text_of(events: list[Event]) -> str:
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")


async def test_the_answer_has_anthropic_s_shape(api: Served) -> None:
    answer = await ask(api, model="fake", max_tokens=5)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [text_block(expected_text(HELLO_PROMPT.encode(), 5))],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": len(HELLO_PROMPT),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 0},
            "cache_creation": None,
            "inference_geo": None,
            "server_tool_use": None,
            "service_tier": "standard",
        },
    }


async def test_system_and_content_may_be_strings_or_blocks(api: Served) -> None:
    messages = [
        {"role": "user", "content": [text_block("one"), {**text_block("two"), "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{**text_block("three"), "citations": None}]},
        {"role": "user", "content": "four"},
    ]
    expected = "system: be kind\nuser: one\ntwo\nassistant: three\nuser: four\nassistant: "
    assert await prompt_of(api, system="be kind", messages=messages) == expected
    system = [text_block("be"), text_block("kind")]
    assert (await prompt_of(api, system=system, messages=messages)).startswith("system: be\nkind\n")


async def test_turns_of_one_side_are_one_turn(api: Served) -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": [text_block("two")]}]
    assert await prompt_of(api, messages=messages) == "user: one\ntwo\nassistant: "


async def test_an_answer_begun_goes_on(api: Served) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
    assert await prompt_of(api, messages=messages) == "user: hello\nassistant: Well,"


async def test_sampling_reaches_the_engine(api: Served) -> None:
    await ask(api, temperature=0.3, top_p=0.9, top_k=7, stop_sequences=["x", "y"], metadata={"user_id": "me"}, seed=3)
    params = api.backend.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.3, 0.9, 7, 3)
    assert (params.stop, params.max_tokens) == (("x", "y"), 20)


async def test_an_end_token_ends_the_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("bye", then=256))) as api:
        answer = await ask(api, stop_sequences=["never"])
        silent = await stream(api)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert silent[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        ([" three"], "one two", " three"),
        (["three", "two three"], "one ", "two three"),
        (["e tw", "two"], "on", "e tw"),
        (["one"], "", "one"),
        (["four"], "one two three", None),
    ],
)
async def test_which_stop_sequence_ended_the_answer_is_told_and_none_of_it_shown(
    tmp_path: Path, stops: list[str], text: str, stop: str | None
) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one two three", then=256))) as api:
        answer = await ask(api, stop_sequences=stops)
        events = await stream(api, stop_sequences=stops)
    reason = "end_turn" if stop is None else "stop_sequence"
    assert answer["content"] == ([text_block(text)] if text else [])
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
    assert text_of(events) == text
    assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


async def test_a_stream_is_a_message_of_blocks_between_their_start_and_stop(api: Served) -> None:
    events = await stream(api, max_tokens=8)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert all(data["type"] == name for name, data in events)
    assert text_of(events) == expected_text(HELLO_PROMPT.encode(), 8)
    message = events[0][1]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["input_tokens"] == len(HELLO_PROMPT)
    assert events[1][1] == {"type": "content_block_start", "index": 0, "content_block": text_block("")}
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 8


async def test_a_silent_stream_is_kept_open_by_ping_events(tmp_path: Path) -> None:
    backend = FakeBackend(gate=Gate())
    async with serving(tmp_path, backend, settings=ApiSettings(port=0, ping_s=0.01)) as api:
        body = {"max_tokens": 2, "messages": HELLO, "stream": True}
        async with api.http.post("/v1/messages", json=body) as response:
            assert await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
            backend.gate.open()  # type: ignore[union-attr]
            assert (await response.text()).endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_a_failure_in_a_stream_is_an_error_event(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api:
        name, data = (await stream(api))[-1]
    assert name == "error"
    assert (data["type"], data["error"]["type"]) == ("error", "api_error")


async def test_an_answer_cut_short_by_the_context_s_end_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(max_model_len=40)) as api:
        answer = await ask(api, max_tokens=1000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 40


@pytest.mark.parametrize("cut", [4, 6], ids=["a word", "a space"])
async def test_an_answer_whose_time_was_up_pauses_the_turn_and_goes_on_once_it_is_sent_back(
    tmp_path: Path, cut: int
) -> None:
    """It ends with a word or a space, and pauses twice."""
    gate = Gate(cut)

    def rest(prompt_ids: Sequence[int], index: int) -> int:
        text = b"Well, it is noon."
        at = len(bytes(prompt_ids).rpartition(b"assistant: ")[2]) + index
        return text[at] if at < len(text) else EOS_ID

    async with serving(tmp_path, FakeBackend(reply=rest, gate=gate)) as api:
        said: list[dict[str, Any]] = []
        for _ in range(2):
            paused = await api.cut_off(ask(api, messages=[*HELLO, *said]), tokens=cut)
            assert paused["stop_reason"] == "pause_turn"
            said.append({"role": "assistant", "content": paused["content"]})
            gate.open()  # a step of the paused answer may wait there, and the next comes before it is taken back
            await until(lambda: not api.backend.has_work())
            gate.close_after(cut)
        gate.open()
        whole = await ask(api, max_tokens=100, messages=[*HELLO, *said])
    parts = [*said, {"content": whole["content"]}]
    assert "".join(part["content"][0]["text"] for part in parts) == "Well, it is noon."
    assert whole["stop_reason"] == "end_turn"


async def test_an_answer_with_nothing_in_it_begins_once_it_is_sent_back(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("Well.", then=EOS_ID))) as api:
        for content in ([], "", [text_block("")], [text_block(" ")], [{"type": "redacted_thinking", "data": "x"}]):
            assert await prompt_of(api, messages=[*HELLO, {"role": "assistant", "content": content}]) == HELLO_PROMPT


async def test_tokens_are_counted_without_an_answer(api: Served) -> None:
    counted = await api.post("/v1/messages/count_tokens", model="fake", system="be kind", messages=HELLO)
    assert counted == {"input_tokens": len("system: be kind\n" + HELLO_PROMPT)}
    assert api.backend.submitted == []


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{**text_block("x"), "mood": 1}]}]}, "messages[0].content[0].mood"),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages[0] starts the answer, and has no text"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 20}}, "thinking.budget_tokens is 20; it must be less than"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "whole"}}, "thinking.display"),
        ({"thinking": {"type": "never"}}, "thinking.type"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "thinking"}]}]}, "content[0].thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format.schema",
        ),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_config"),
        ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "no way", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "x", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"temperature": -1}, "temperature"),
        ({"temprature": 1}, "temprature"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(api: Served, body: dict[str, object], named: str) -> None:
    error = await refusal(api, **body)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


async def test_what_changes_nothing_is_taken(api: Served) -> None:
    inert: list[dict[str, Any]] = [
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": None}},
        {"thinking": {"type": "disabled"}, "service_tier": "auto", "tools": [], "speed": "standard"},
        {"cache_control": None, "metadata": {"user_id": "somebody"}},
    ]
    plain = await ask(api)
    for body in inert:
        assert (await ask(api, **body))["content"] == plain["content"]
    assert len({tuple(request.prompt_ids) for request in api.backend.submitted}) == 1


async def test_errors_have_anthropic_s_types(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, api_key="sesame", max_body_bytes=1000)
    config = EngineConfig(worker_host="thread", max_prompts=1, max_queue=0)
    async with serving(tmp_path, FakeBackend(gate=Gate(1)), settings=settings, config=config) as api:
        assert (await refusal(api, 401))["type"] == "authentication_error"
        api.http.headers["X-API-Key"] = "sesame"
        assert (await refusal(api, 404, model="claude"))["type"] == "not_found_error"
        assert (await refusal(api, 413, system="x" * 2000))["type"] == "request_too_large"
        async with api.http.post("/v1/messages", json={"max_tokens": 9, "messages": HELLO, "stream": True}):
            assert (await refusal(api, 429))["type"] == "rate_limit_error"
        await api.server.switch_dialect("anthropic", False)
        assert (await refusal(api, 404))["type"] == "not_found_error"


async def test_answers_and_errors_carry_their_id_where_anthropic_s_clients_look_for_it(api: Served) -> None:
    headers = {"anthropic-version": "2023-06-01", "X-Request-Id": "mine"}
    for body in ({"max_tokens": 1, "messages": HELLO}, {"max_tokens": 0}):
        async with api.http.post("/v1/messages", json=body, headers=headers) as response:
            assert response.headers["request-id"] == "mine"
            assert (await response.json()).get("request_id", "mine") == "mine"


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "top_k", "top_p", "seed"])
async def test_a_number_beyond_all_bounds_is_refused_by_name(api: Served, field: str) -> None:
    body = json.dumps({"max_tokens": 1, "messages": HELLO})[:-1] + f', "{field}": 1{"0" * 400}}}'
    async with api.http.post("/v1/messages", data=body) as response:
        assert response.status == 400
        assert field in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        None,
        3,
        [None],
        [[]],
        [{}],
        [{"type": None}],
        [{"type": "text"}],
        [{"type": "text", "text": "x", "citations": [{}]}],
        [{"type": "tool_result"}],
        [{"type": "tool_result", "tool_use_id": "x", "is_error": 3}],
        [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
        [{"type": "tool_result", "tool_use_id": "", "content": "x"}],
    ],
)
async def test_content_of_any_shape_is_a_sentence(api: Served, content: object) -> None:
    error = await refusal(api, messages=[{"role": "user", "content": content}])
    assert error["message"].startswith("messages[0]")


async def test_a_deeply_nested_input_is_no_server_error(api: Served) -> None:
    deep = '{"a":' * 150 + "1" + "}" * 150
    call = f'{{"type": "tool_use", "id": "t", "name": "x", "input": {deep}}}'
    body = f'{{"max_tokens": 1, "messages": [{{"role": "assistant", "content": [{call}]}}]}}'
    async with api.http.post("/v1/messages", data=body) as response:
        assert response.status == 400


async def test_limits_of_the_server_are_told_in_anthropic_s_words(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_stops=1)) as api:
        error = await refusal(api, stop_sequences=["a", "b"])
    assert error["message"] == "stop_sequences has 2 strings; the limit is 1"
