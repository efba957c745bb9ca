"""Tools and output formats in POST /v1/messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema
import pytest
from pydantic import BaseModel

from console.api.server import ApiSettings
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, Gate, Reply, saying
from tests.fakes.model import EOS_ID, fake_spec
from tests.fakes.tool_templates import HERMES, write_tool_model

HELLO = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Tell the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PARIS = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
MALFORMED = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris" oh}}</tool_call>'
BROKEN = '<tool_call>{"name": "get_weather", "arguments": {"city" oh'
USED = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    here: bool


@asynccontextmanager
async def calling(folder: Path, reply: Reply) -> AsyncIterator[Served]:
    """A server whose model calls tools as Hermes does, and gives this answer."""
    write_tool_model(folder, HERMES)
    async with serving(folder, FakeBackend(reply=reply), spec=fake_spec(folder)) as api:
        yield api


async def ask(api: Served, **body: Any) -> dict[str, Any]:
    return await api.post("/v1/messages", **{"max_tokens": 200, "messages": HELLO, "tools": [WEATHER], **body})


async def events_of(api: Served, **body: Any) -> list[dict[str, Any]]:
    """What the events of a streamed answer hold."""
    body = {"max_tokens": 200, "messages": HELLO, "tools": [WEATHER], "stream": True, **body}
    async with api.http.post("/v1/messages", json=body) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def prompt_of(api: Served) -> str:
    return bytes(api.backend.submitted[-1].prompt_ids).decode()


async def test_calls_are_tool_use_blocks_after_the_text(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(f"Let me look.\n{PARIS}{PARIS}", then=EOS_ID)) as api:
        answer = await ask(api)
    text, *used = answer["content"]
    assert text == {"type": "text", "text": "Let me look.", "citations": None}
    assert len({block.pop("id") for block in used}) == 2
    assert (
        used
        == [{"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}, "caller": {"type": "direct"}}] * 2
    )
    assert answer["stop_reason"] == "tool_use"


async def test_a_stream_gives_each_call_in_a_block_of_its_own_and_its_input_as_it_comes(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(f"Hm. {PARIS}{PARIS}", then=EOS_ID)) as api:
        events = await events_of(api)
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    assert starts[1]["content_block"]["name"] == "get_weather"
    assert starts[1]["content_block"]["input"] == {}
    for index in (1, 2):
        deltas = [
            event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == index
        ]
        assert {delta["type"] for delta in deltas} == {"input_json_delta"}
        assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"city": "Paris"}
    order = [(event["type"], event["index"]) for event in events if "index" in event]
    within = [index for kind, index in order if kind == "content_block_delta"]
    assert within == sorted(within)
    assert [index for kind, index in order if kind == "content_block_stop"] == [0, 1, 2]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_the_client_puts_a_streamed_call_together(tmp_path: Path) -> None:
    async with (
        calling(tmp_path, saying(PARIS, then=EOS_ID)) as api,
        anthropic.AsyncAnthropic(base_url=api.url, api_key="x", max_retries=0) as client,
        client.messages.stream(
            model="fake",
            max_tokens=200,
            messages=[{"role": "user", "content": "hello"}],
            tools=[{"name": "get_weather", "description": "Tell the weather", "input_schema": WEATHER["input_schema"]}],
        ) as stream,
    ):
        message = await stream.get_final_message()
    [block] = message.content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"


async def test_a_call_that_max_tokens_cuts_off_is_a_block_of_what_is_whole_streamed_or_not(tmp_path: Path) -> None:
    named = {"type": "tool", "name": "get_weather"}
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "zone": "CET"}}\n</tool_call>'
    cuts = (("get_w", None), ('get_weather", ', {}), ('{"city": "Par', {}), ('"zone": "C', {"city": "Paris"}))
    async with calling(tmp_path, saying(call, then=EOS_ID)) as api:
        for last, used in cuts:
            body: dict[str, Any] = {"max_tokens": call.index(last) + len(last), "messages": HELLO, "model": "fake"}
            body["tool_choice"] = named
            answer = await ask(api, **body)
            tools: Any = [WEATHER]
            async with (
                anthropic.AsyncAnthropic(base_url=api.url, api_key="x", max_retries=0) as client,
                client.messages.stream(**body, tools=tools) as stream,
            ):
                message = await stream.get_final_message()
            blocks = [] if used is None else [("tool_use", "get_weather", used)]
            assert [(block["type"], block["name"], block["input"]) for block in answer["content"]] == blocks
            assert [(block.type, block.name, block.input) for block in message.content] == blocks
            assert answer["stop_reason"] == message.stop_reason == "max_tokens"


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_with_calls_does_not_pause_when_its_time_is_up(tmp_path: Path, streams: bool) -> None:
    """Complete calls are to be made. A call that is cut off cannot go on: it ends as one that max_tokens cuts off."""

    async def reason(api: Served) -> str:
        if not streams:
            return str((await ask(api))["stop_reason"])
        return str((await events_of(api))[-2]["delta"]["stop_reason"])

    for index, (last, expected) in enumerate((("</tool_call>", "tool_use"), ('{"city": "Par', "max_tokens"))):
        cut = PARIS.index(last) + len(last)
        gate = Gate(cut)
        folder = tmp_path / str(index)
        write_tool_model(folder, HERMES)
        async with serving(
            folder, FakeBackend(reply=saying(PARIS + "!" * 9), gate=gate), spec=fake_spec(folder)
        ) as api:
            assert await api.cut_off(reason(api), tokens=cut) == expected


async def test_a_named_tool_is_used_once_and_has_an_id_as_anthropic_writes_them(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(PARIS * 9, then=EOS_ID)) as api:
        answer = await ask(api, tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=400)
        events = await events_of(api, tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=400)
    [block] = answer["content"]
    [started] = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for each in (block, started):
        assert (each["type"], each["name"], each["id"][:6]) == ("tool_use", "get_weather", "toolu_")
    assert answer["stop_reason"] == "tool_use"


async def test_a_call_that_breaks_off_is_text(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(BROKEN, then=EOS_ID)) as api:
        answer = await ask(api)
    assert answer["content"] == [{"type": "text", "text": BROKEN, "citations": None}]
    assert answer["stop_reason"] == "end_turn"


async def test_a_streamed_call_that_turns_out_malformed_never_stops_and_the_client_gets_an_error(
    tmp_path: Path,
) -> None:
    """The client makes the call of every block that stops."""
    async with calling(tmp_path, saying(f"Hm. {PARIS}{MALFORMED}And more.", then=EOS_ID)) as api:
        events = await events_of(api)
        async with anthropic.AsyncAnthropic(base_url=api.url, api_key="x", max_retries=0) as client:
            tools: Any = [WEATHER]
            body: Any = {"max_tokens": 200, "messages": HELLO, "model": "fake", "tools": tools}
            async with client.messages.stream(**body) as stream:
                with pytest.raises(anthropic.APIStatusError, match="malformed call of the tool get_weather"):
                    await stream.until_done()
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1]
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {
        "type": "api_error",
        "message": "the model wrote a malformed call of the tool get_weather",
    }


async def test_a_malformed_call_beside_a_complete_one_is_text_in_a_whole_answer(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(f"{PARIS}{MALFORMED}", then=EOS_ID)) as api:
        answer = await ask(api)
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
    assert (answer["content"][0]["text"], answer["content"][1]["input"]) == (MALFORMED, {"city": "Paris"})
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("before", ["", PARIS])
async def test_a_call_that_the_model_ends_within_is_one_that_was_cut_streamed_or_not(
    tmp_path: Path, before: str
) -> None:
    async with calling(tmp_path, saying(f'{before}{PARIS.removesuffix("""is"}}</tool_call>""")}', then=EOS_ID)) as api:
        answer, events = await ask(api), await events_of(api)
    assert answer["content"][-1]["input"] == {}
    sent = [event["delta"]["partial_json"] for event in events if event.get("delta", {}).get("partial_json")]
    assert "".join(sent).endswith('{"city": "Par')
    assert answer["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_the_model_is_told_of_tools_and_of_what_they_gave(tmp_path: Path) -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, USED]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    async with calling(tmp_path, saying("ok", then=EOS_ID)) as api:
        await ask(api, messages=messages)
        told, *turns = prompt_of(api).splitlines()
        counted = await api.post("/v1/messages/count_tokens", messages=messages, tools=[WEATHER])
        assert counted == {"input_tokens": len(prompt_of(api))}
    assert json.loads(told.removeprefix("tools: "))[0]["function"]["parameters"] == WEATHER["input_schema"]
    assert turns == [
        "user: hello",
        f"assistant: Hm.{PARIS}",
        "result get_weather toolu_1: rain",
        "user: So?",
        "assistant: ",
    ]


async def test_a_tool_that_failed_is_told_so(tmp_path: Path) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True}
    messages = [*HELLO, {"role": "assistant", "content": [USED]}, {"role": "user", "content": [result]}]
    async with calling(tmp_path, saying("ok", then=EOS_ID)) as api:
        await ask(api, messages=messages)
        assert "result get_weather toolu_1: Error: no such city\n" in prompt_of(api)


async def test_a_call_whose_result_is_missing_is_refused(tmp_path: Path) -> None:
    messages = [*HELLO, {"role": "assistant", "content": [USED]}]
    async with (
        calling(tmp_path, saying("ok", then=EOS_ID)) as api,
        api.http.post("/v1/messages", json={"max_tokens": 9, "messages": messages}) as response,
    ):
        assert response.status == 400
        assert "tool_result" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "held"),
    [({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, True)],
)
async def test_a_choice_that_demands_a_call_holds_the_answer_to_one(
    tmp_path: Path, choice: dict[str, Any], held: bool
) -> None:
    async with calling(tmp_path, saying(PARIS, then=EOS_ID)) as api:
        await ask(api, tool_choice={**choice, "disable_parallel_tool_use": True})
        assert (api.backend.submitted[-1].params.grammar is not None) == held


async def test_none_tells_the_model_of_no_tools(tmp_path: Path) -> None:
    async with calling(tmp_path, saying("ok", then=EOS_ID)) as api:
        await ask(api, tool_choice={"type": "none"})
        assert prompt_of(api) == "user: hello\nassistant: "


async def test_one_call_at_a_time_where_parallel_ones_are_off(tmp_path: Path) -> None:
    async with calling(tmp_path, saying(PARIS + PARIS, then=EOS_ID)) as api:
        answer = await ask(api, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(answer["content"]) == 1


async def test_an_output_format_holds_the_answer_to_its_schema(api: Served) -> None:
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = await ask(api, tools=[], output_config=output)
    jsonschema.validate(json.loads(answer["content"][0]["text"]), SCHEMA)
    assert answer["stop_reason"] == "end_turn"
    deltas = [event["delta"] for event in await events_of(api, tools=[], output_config=output) if "delta" in event]
    jsonschema.validate(json.loads("".join(delta.get("text", "") for delta in deltas)), SCHEMA)


async def test_the_client_s_own_types_come_back(api: Served) -> None:
    async with anthropic.AsyncAnthropic(base_url=api.url, api_key="x", max_retries=0) as client:
        message = await client.messages.parse(
            model="fake", max_tokens=200, messages=[{"role": "user", "content": "who?"}], output_format=Person
        )
    assert isinstance(message.parsed_output, Person)


async def test_a_schema_beyond_what_the_operator_allows_is_refused(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, settings=ApiSettings(port=0, max_schema_bytes=20)) as api,
        api.http.post(
            "/v1/messages",
            json={
                "max_tokens": 9,
                "messages": HELLO,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
        ) as response,
    ):
        assert response.status == 400
        assert "output_config.format.schema has" in (await response.json())["error"]["message"]


async def test_a_stop_sequence_takes_nothing_from_json_that_the_answer_is_held_to(api: Served) -> None:
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = await ask(api, tools=[], output_config=output, stop_sequences=["}"])
    jsonschema.validate(json.loads(answer["content"][0]["text"]), SCHEMA)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    events = await events_of(api, tools=[], output_config=output, stop_sequences=["}"])
    said = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
    jsonschema.validate(json.loads(said), SCHEMA)


@pytest.mark.parametrize("value", ["1e999", '"\\ud800"'], ids=["number", "text"])
async def test_arguments_that_programs_can_hardly_read_are_passed_on_as_they_are(tmp_path: Path, value: str) -> None:
    call = PARIS.replace('"Paris"', f"\n{value}")
    async with calling(tmp_path, saying(call, then=EOS_ID)) as api:
        body = {"max_tokens": 200, "messages": HELLO, "tools": [WEATHER]}
        async with api.http.post("/v1/messages", json=body) as response:
            assert response.status == 200
            assert f'"input":{{"city":  {value}}}' in await response.text()
