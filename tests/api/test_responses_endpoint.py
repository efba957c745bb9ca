"""POST /v1/responses and what is stored of it, by the openai package and by plain requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel

from console.api.dialects.openai import responses
from console.api.http import auth
from console.api.server import ApiSettings
from tests.api.harness import Served, serving
from tests.api.test_api_thinking import ENDED, THINKS, THOUGHT, prompt_of
from tests.api.test_api_tools import PARIS, serving_tools
from tests.fakes.backend import FakeBackend, Gate, Reply, expected_text, saying
from tests.fakes.model import EOS_ID, fake_spec
from tests.fakes.tool_templates import HERMES

pytestmark = pytest.mark.usefixtures("only_loopback")

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PROMPT = b"user: hello\nassistant: "
MALFORMED = '<tool_call>{"name": "get_weather", "arguments": {"city" "Paris"}}</tool_call>'
CUT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "zone": "CE'


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def client_of(api: Served) -> openai.AsyncOpenAI:
    """A client that tries once."""
    return openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)


@asynccontextmanager
async def saying_at(folder: Path, reply: Reply) -> AsyncIterator[Served]:
    """A server whose model gives this answer."""
    async with serving(folder, FakeBackend(reply=reply), spec=fake_spec(folder)) as api:
        yield api


async def streamed(api: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer, whose names and numbers are right."""
    async with api.http.post(PATH, json={"stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).splitlines() if line and not line.startswith(":")]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events: list[dict[str, Any]] = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_text_is_answered_in_a_message(api: Served) -> None:
    async with client_of(api) as client:
        answer = await client.responses.create(model="fake", input="hello", max_output_tokens=16)
    assert answer.output_text == expected_text(PROMPT, 16)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(PROMPT), 16)
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


async def test_an_answer_that_ends_by_itself_is_complete(tmp_path: Path) -> None:
    async with saying_at(tmp_path, saying("Good day", then=EOS_ID)) as api, client_of(api) as client:
        answer = await client.responses.create(model="fake", input="hello", instructions="be kind")
        assert prompt_of(api) == "system: be kind\nuser: hello\nassistant: "
    assert (answer.status, answer.output_text, answer.instructions) == ("completed", "Good day", "be kind")
    assert answer.completed_at is not None


async def test_a_stream_ends_with_what_the_plain_answer_is(tmp_path: Path) -> None:
    async with (
        saying_at(tmp_path, saying("Good day", then=EOS_ID)) as api,
        client_of(api) as client,
        client.responses.stream(model="fake", input="hello") as stream,
    ):
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_response()
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert answer.output_text == "Good day"


async def test_events_are_named_and_numbered(tmp_path: Path) -> None:
    async with saying_at(tmp_path, saying("Hi", then=EOS_ID)) as api:
        first, *_, last = await streamed(api, input="hello")
    assert (first["type"], last["type"]) == ("response.created", "response.completed")


async def test_calls_are_items_and_their_outputs_go_back(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying(PARIS, then=EOS_ID)) as api, client_of(api) as client:
        answer = await client.responses.create(model="fake", input="weather?", tools=[WEATHER])  # type: ignore[list-item]
        [call] = answer.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Paris"}, "completed")
        async with client.responses.stream(model="fake", input="weather?", tools=[WEATHER]) as stream:  # type: ignore[list-item]
            kinds = [event.type async for event in stream]
            streamed = (await stream.get_final_response()).output[0]
        assert isinstance(streamed, ResponseFunctionToolCall)
        assert json.loads(streamed.arguments) == {"city": "Paris"}
        assert "response.function_call_arguments.delta" in kinds and "response.function_call_arguments.done" in kinds
        items = [
            {"role": "user", "content": "weather?"},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        await client.responses.create(model="fake", input=items, tools=[WEATHER])  # type: ignore[arg-type, list-item]
        assert f"result get_weather {call.call_id}: rain\n" in prompt_of(api)


async def test_a_malformed_call_is_text_alone(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying(f"Hm. {MALFORMED}", then=EOS_ID)) as api:
        answer = await api.post(PATH, input="weather?", tools=[WEATHER])
        follow = {"input": "again", "previous_response_id": answer["id"], "tools": [WEATHER]}
        await api.post(PATH, **follow)
        assert f"assistant: Hm. {MALFORMED}\nuser: again\n" in prompt_of(api)
    assert [item["type"] for item in answer["output"]] == ["message", "message"]
    assert "".join(item["content"][0]["text"] for item in answer["output"]) == f"Hm. {MALFORMED}"
    assert answer["status"] == "completed"


async def test_a_malformed_call_in_a_stream_ends_incomplete_and_is_no_part_of_the_response(tmp_path: Path) -> None:
    body: dict[str, Any] = {"input": "weather?", "tools": [WEATHER]}
    async with serving_tools(tmp_path, HERMES, saying(f"Hm. {MALFORMED}", then=EOS_ID)) as api:
        events = await streamed(api, **body)
        async with client_of(api) as client, client.responses.stream(model="fake", **body) as stream:
            kinds = [event.type async for event in stream]
    ended = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in ended] == [0, 1, 2]
    assert [(event["item"]["type"], event["item"]["status"]) for event in ended] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "message"]
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("limit", [len(CUT), None], ids=["max_output_tokens", "the model's end"])
async def test_a_call_that_the_answer_s_end_cut_is_incomplete_and_can_be_followed(
    tmp_path: Path, streams: bool, limit: int | None
) -> None:
    """limit: None where the model itself ends the answer within the call."""
    body: dict[str, Any] = {"input": "weather?", "tools": [WEATHER]}
    shown = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    async with serving_tools(tmp_path, HERMES, saying(CUT, then=EOS_ID)) as api:
        if streams:
            *_, last = await streamed(api, max_output_tokens=limit, **body)
            answer = last["response"]
        else:
            answer = await api.post(PATH, max_output_tokens=limit, **body)
        [call] = answer["output"]
        assert (call["arguments"], call["status"]) == ('{"city": "Paris", "zone": "CE', "incomplete")
        assert answer["status"] == ("completed" if limit is None else "incomplete")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "broken"}
        without_status = {name: value for name, value in call.items() if name != "status"}
        for follow in (
            {"input": [result], "previous_response_id": answer["id"]},
            {"input": [{"role": "user", "content": "weather?"}, call, result]},
            {"input": [{"role": "user", "content": "weather?"}, without_status, result]},
        ):
            await api.post(PATH, tools=[WEATHER], **follow)
            assert f"assistant: {shown}\nresult get_weather {call['call_id']}: broken\n" in prompt_of(api)
        await api.post(PATH, input="again", previous_response_id=answer["id"])
        assert f"assistant: {shown}\nuser: again\n" in prompt_of(api)


async def test_text_on_both_sides_of_a_call_is_remembered(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying(f"Before. {PARIS} After.", then=EOS_ID)) as api:
        answer = await api.post(PATH, input="weather?", tools=[WEATHER])
        text, call, more = answer["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        for follow in (
            {"input": [result], "previous_response_id": answer["id"]},
            {"input": [{"role": "user", "content": "weather?"}, text, call, more, result]},
        ):
            await api.post(PATH, tools=[WEATHER], **follow)
            told = prompt_of(api).partition("assistant: ")[2]
            assert told.startswith("Before. After.<tool_call>")
            assert told.splitlines()[1] == f"result get_weather {call['call_id']}: rain"


async def test_functions_of_a_namespace_are_called_by_their_full_names(tmp_path: Path) -> None:
    space = {"type": "namespace", "name": "sky", "description": "Up there.", "tools": [WEATHER]}
    call = PARIS.replace("get_weather", "sky.get_weather")
    async with serving_tools(tmp_path, HERMES, saying(call, then=EOS_ID)) as api, client_of(api) as client:
        answer = await client.responses.create(model="fake", input="weather?", tools=[WEATHER, space])  # type: ignore[list-item]
        assert '"name": "sky.get_weather", "description": "Up there."' in prompt_of(api)
        [called] = answer.output
        assert isinstance(called, ResponseFunctionToolCall)
        assert (called.namespace, called.name) == ("sky", "get_weather")
        result = {"type": "function_call_output", "call_id": called.call_id, "output": "rain"}
        for body in (
            {"input": [{"role": "user", "content": "weather?"}, called.model_dump(), result]},
            {"input": [result], "previous_response_id": answer.id},
        ):
            await client.responses.create(model="fake", tools=[space], **body)  # type: ignore[call-overload]
            assert f"result sky.get_weather {called.call_id}: rain\n" in prompt_of(api)


async def test_thinking_is_an_item_of_its_own_and_goes_back(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api, client_of(api) as client:
        answer = await client.responses.create(model="fake", input="hello")
        reasoning = answer.output[0]
        assert isinstance(reasoning, ResponseReasoningItem)
        assert reasoning.content is not None
        assert ([part.text for part in reasoning.content], reasoning.summary) == ([THOUGHT], [])
        assert answer.output_text == "Yes."
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        sent = [{"role": "user", "content": "hello"}, *(item.model_dump() for item in answer.output)]
        await client.responses.create(model="fake", input=[*sent, {"role": "user", "content": "why?"}])  # type: ignore[list-item]
        assert f"<think>{THOUGHT}</think>Yes." in prompt_of(api)


async def test_thinking_is_a_summary_where_one_is_requested(tmp_path: Path) -> None:
    async with (
        serving_tools(tmp_path, THINKS, ENDED) as api,
        client_of(api) as client,
        client.responses.stream(model="fake", input="hello", reasoning={"effort": "low", "summary": "auto"}) as stream,
    ):
        kinds = [event.type async for event in stream]
        reasoning = (await stream.get_final_response()).output[0]
    assert isinstance(reasoning, ResponseReasoningItem)
    assert [part.text for part in reasoning.summary] == [THOUGHT]
    assert "response.reasoning_summary_text.delta" in kinds and "response.reasoning_summary_part.done" in kinds


async def test_a_schema_is_parsed(tmp_path: Path) -> None:
    async with saying_at(tmp_path, saying('{"name":"Ann","age":7}', then=EOS_ID)) as api, client_of(api) as client:
        answer = await client.responses.parse(model="fake", input="who?", text_format=Person)
        assert api.backend.submitted[-1].params.grammar is not None
    assert answer.output_parsed == Person(name="Ann", age=7)


async def test_a_stored_response_is_followed_shown_and_deleted(tmp_path: Path) -> None:
    async with saying_at(tmp_path, saying("Good day", then=EOS_ID)) as api, client_of(api) as client:
        first = await client.responses.create(model="fake", input="hello", instructions="be kind", metadata={"a": "b"})
        second = await client.responses.create(model="fake", input="again", previous_response_id=first.id)
        assert prompt_of(api) == "user: hello\nassistant: Good day\nuser: again\nassistant: "
        assert second.previous_response_id == first.id
        found = await client.responses.retrieve(first.id)
        assert (found.output_text, found.metadata) == ("Good day", {"a": "b"})
        named = {"role": "user", "content": "hm", "id": None}
        third = await client.responses.create(model="fake", input=[named])  # type: ignore[list-item]
        assert (await client.responses.input_items.list(third.id)).data[0].id
        items = await client.responses.input_items.list(first.id)
        assert [item.content[0].text for item in items.data] == ["hello"]  # type: ignore[union-attr]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            await client.responses.create(model="fake", input="x", previous_response_id=first.id)


async def test_nothing_is_stored_where_that_was_not_wanted(tmp_path: Path) -> None:
    async with saying_at(tmp_path, saying("Good day", then=EOS_ID)) as api, client_of(api) as client:
        answer = await client.responses.create(model="fake", input="hello", store=False)
        assert answer.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)


@pytest.mark.parametrize(
    ("headers", "peer", "stores"),
    [
        ({}, "127.0.0.1", True),
        ({}, "203.0.113.7", False),
        ({"X-Forwarded-For": "203.0.113.7"}, "127.0.0.1", False),
        ({"Forwarded": "for=203.0.113.7"}, "127.0.0.1", False),
        ({"Origin": "https://app.example"}, "127.0.0.1", False),
    ],
    ids=["a program of this machine", "another machine", "a proxy", "a modern proxy", "a page"],
)
async def test_without_a_wish_responses_are_stored_for_programs_of_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], peer: str, stores: bool
) -> None:
    monkeypatch.setattr(auth, "peer_of", lambda request: peer)
    settings = ApiSettings(port=0, cors_origins=("https://app.example",))
    async with serving(tmp_path, settings=settings) as api:
        for wish, expected in ((None, stores), (True, True), (False, False)):
            body = {"input": "hello", "max_output_tokens": 2, "store": wish}
            async with api.http.post(PATH, json=body, headers=headers) as response:
                assert (response.status, (await response.json())["store"]) == (200, expected)


def test_the_store_is_bounded_and_each_client_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_STORED", 2)
    store = responses.ResponseStore()

    def stored(name: str, tenant: str = "", size: int = 1) -> responses.StoredResponse:
        response = responses.Response(
            id=name,
            created_at=0,
            status="completed",
            model="m",
            output=[],
            instructions=None,
            previous_response_id=None,
            tools=[],
            tool_choice="auto",
            parallel_tool_calls=True,
            text={},
            reasoning=responses.ReasoningEcho(None, None),
            temperature=1.0,
            top_p=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            top_logprobs=0,
            max_output_tokens=None,
            store=True,
            metadata={},
        )
        return responses.StoredResponse(tenant=tenant, response=response, messages=[], input=[], size_bytes=size)

    for name in ("a", "b", "c"):
        store.add(stored(name))
    with pytest.raises(responses.ResponseNotFound):
        store.find("a", "")
    with pytest.raises(responses.ResponseNotFound):
        store.find("b", "key:other")
    store.add(stored("d", size=responses.MAX_STORED_BYTES))
    with pytest.raises(responses.ResponseNotFound):
        store.find("c", "")
    store.delete("d", "")
    with pytest.raises(responses.ResponseNotFound):
        store.delete("d", "")


async def test_a_response_is_cancelled_while_it_streams(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, FakeBackend(gate=gate), spec=fake_spec(tmp_path)) as api, client_of(api) as client:
        stream = await client.responses.create(model="fake", input="hello", stream=True)
        gate.allow(3)
        created = await anext(aiter(stream))
        assert created.type == "response.created"
        cancelling = asyncio.create_task(client.responses.cancel(created.response.id))
        kinds = [event.type async for event in stream]
        cancelled = await cancelling
    assert kinds[-1] == "response.incomplete"
    assert (cancelled.id, cancelled.status) == (created.response.id, "cancelled")


async def test_tokens_of_a_conversation_are_counted(api: Served) -> None:
    async with client_of(api) as client:
        counted = await client.responses.input_tokens.count(model="fake", input="hello")
    assert counted.input_tokens == len(PROMPT)


async def test_log_probabilities_stand_by_the_text(api: Served) -> None:
    async with client_of(api) as client:
        answer = await client.responses.create(
            model="fake",
            input="hello",
            max_output_tokens=16,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
    logprobs = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert logprobs is not None
    assert len(logprobs) == 16
    assert api.backend.submitted[-1].params.logprobs == 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "is empty"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type", "computer_call is not supported"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "user, assistant"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None, "input_image"),
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input[0].colour", "is not a field"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "a string"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]},
            "input[0].arguments",
            "JSON object",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{city: Paris}"}]},
            "input[0].arguments",
            "JSON object",
        ),
        ({"input": "x", "tools": [{"type": "web_search_preview"}]}, "tools[0]", "web_search_preview is not supported"),
        ({"input": "x", "tools": [{"type": "function", "name": 5}]}, "tools[0].name", "wrong type"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "array of functions"),
        ({"input": "x", "tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "a string"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]}]},
            "tools[0].tools[0]",
            "custom is not supported",
        ),
        ({"input": "x", "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "mcp is not supported"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f'"),
        ({"input": "x", "background": True}, "background", "while the client waits"),
        ({"input": "x", "truncation": "auto"}, "truncation", "refused, not truncated"),
        ({"input": "x", "conversation": "c"}, "conversation", "previous_response_id"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"input": "x", "text": {"verbosity": "huge"}}, "text.verbosity", "'low', 'medium' or 'high'"),
        ({}, "input", ""),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_by_its_name(
    api: Served, body: dict[str, Any], param: str | None, words: str
) -> None:
    error = await api.refusal(PATH, **body)
    assert param is None or error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    "asked",
    [
        *({"text": {"verbosity": verbosity}} for verbosity in ("low", "medium", "high", None)),
        *({"reasoning": {"effort": effort}} for effort in ("none", "low", "medium", "xhigh")),
    ],
    ids=str,
)
async def test_a_verbosity_and_the_effort_of_a_model_that_does_not_think_change_nothing(
    api: Served, asked: dict[str, Any]
) -> None:
    await api.post(PATH, input="hello", max_output_tokens=2, seed=1)
    await api.post(PATH, input="hello", max_output_tokens=2, seed=1, **asked)
    plain, same = api.backend.submitted
    assert (same.prompt_ids, same.params) == (plain.prompt_ids, plain.params)


async def test_allowed_tools_are_the_only_ones_that_may_be_called(tmp_path: Path) -> None:
    other = {**WEATHER, "name": "other"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    async with serving_tools(tmp_path, HERMES, saying(PARIS, then=EOS_ID)) as api:
        answer = await api.post(PATH, input="x", tools=[WEATHER, other], tool_choice=choice)
        assert "other" in prompt_of(api)
        hidden = await api.post(PATH, input="x", tools=[WEATHER, other], tool_choice="none")
    assert answer["output"][0]["name"] == "get_weather"
    for each in (answer, hidden):
        assert [tool["name"] for tool in each["tools"]] == ["get_weather", "other"]


async def test_items_of_agents_are_taken_as_they_come_back(tmp_path: Path) -> None:
    """As Codex and openai-agents send a conversation: every item with its id and status, calls beside the text."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be kind"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}], "id": None},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "content": None},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "a",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call", "id": "fc_2", "call_id": "call_2", "name": "b", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "1"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    body = {
        "input": items,
        "tools": [{**WEATHER, "name": name, "description": None, "strict": False} for name in ("a", "b")],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "reasoning": None,
        "text": None,
        "service_tier": None,
    }
    async with serving_tools(tmp_path, HERMES, saying("Done.", then=EOS_ID)) as api:
        answer = await api.post(PATH, **body)
        prompt = prompt_of(api)
    assert answer["output"][0]["content"][0]["text"] == "Done."
    assert "system: be kind\nuser: look\nassistant: Looking.<tool_call>" in prompt
    assert "result a call_1: 1\nresult b call_2: 2\n" in prompt


async def test_a_turn_of_codex_is_streamed(tmp_path: Path) -> None:
    """As Codex sends it: its whole conversation, calls without a status, functions alone. It reads each item once that
    is done, and the usage at the end."""
    functions = {
        "exec_command": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
        "update_plan": {"plan": {"type": "array", "items": {"type": "object", "properties": {}}}},
    }
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "l', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "failed to parse function arguments"},
    ]
    body = {
        "model": "fake",
        "instructions": "You are Codex.",
        "input": items,
        "tools": [
            {
                "type": "function",
                "name": name,
                "description": "A tool.",
                "strict": False,
                "parameters": {"type": "object", "properties": properties, "additionalProperties": False},
            }
            for name, properties in functions.items()
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198b2b6",
        "text": {"verbosity": "medium"},
    }
    call = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
    reply = saying(f"<think>Hm.</think>Again.\n{call}", then=EOS_ID)
    async with serving_tools(tmp_path, HERMES + "{# <think> #}", reply) as api:
        events = await streamed(api, **body)
        prompt = prompt_of(api)
    assert "system: You are Codex.\nsystem: <permissions>\nuser: <environment_context>\nuser: look\n" in prompt
    assert "assistant: Looking.<tool_call>" in prompt
    assert "result exec_command call_1: failed to parse function arguments\n" in prompt
    thinking, text, called = (e["item"] for e in events if e["type"] == "response.output_item.done")
    assert (thinking["type"], thinking["summary"][0]["text"]) == ("reasoning", "Hm.")
    assert (text["role"], text["content"][0]["text"]) == ("assistant", "Again.")
    assert (called["name"], json.loads(called["arguments"])) == ("exec_command", {"cmd": "ls"})
    assert called["call_id"] and called["status"] == "completed"
    summary = [e["delta"] for e in events if e["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(summary) == "Hm."
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    usage = events[-1]["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
