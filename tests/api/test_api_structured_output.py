"""Structured output over HTTP: every field that asks for a format, in every dialect that has it, and refusals."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from console.api.server import ApiSettings
from tests.api.harness import Served, serving, text_of, until
from tests.fakes.backend import FakeBackend, Gate

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_FIELDS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"json_schema": SCHEMA},
]
TEXT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
    ({"regex_pattern": "^[a-c]{3}-[0-9]{2}$"}, "[a-c]{3}-[0-9]{2}"),
    ({"guided_choice": ["yes", "no", 'may"be\n']}, 'yes|no|may"be\n'),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_grammar": 'start: "<" DIGITS ">"\nDIGITS: /[0-9]{2}/'}, "<[0-9]{2}>"),
    ({"structured_outputs": {"grammar": 'root ::= "<" digit digit ">"\ndigit ::= [0-9]'}}, "<[0-9]{2}>"),
    ({"grammar_string": 'root ::= "<" digit digit ">"\ndigit ::= [0-9]'}, "<[0-9]{2}>"),
]
PATHS = ["/v1/completions", "/v1/chat/completions", "/generate"]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "who?"}]} if "chat" in path else {"prompt": "who?"}
    return {"max_tokens": 400, **asked, **fields}


async def answer(api: Served, path: str, **fields: Any) -> str:
    """The text of the one answer, which must have ended by itself where the dialect tells."""
    whole = await api.post(path, **body_of(path, **fields))
    if path == "/generate":
        return str(whole["text"]).removeprefix("who?")
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if "chat" in path else choice["text"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", JSON_FIELDS)
async def test_a_json_schema_holds_the_answer(api: Served, path: str, fields: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(await answer(api, path, **fields)), SCHEMA)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "pattern"), TEXT_FIELDS)
async def test_a_regex_a_choice_and_a_grammar_hold_the_answer(
    api: Served, path: str, fields: dict[str, Any], pattern: str
) -> None:
    assert re.fullmatch(pattern, await answer(api, path, **fields))


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
async def test_any_json_object_is_one(tmp_path: Path, fields: dict[str, Any]) -> None:
    closing = FakeBackend(reply=lambda prompt_ids, index: ord("}"))
    async with serving(tmp_path, closing) as api:
        assert json.loads(await answer(api, "/v1/chat/completions", **fields)) == {}


async def test_every_choice_and_every_piece_of_a_stream_is_held(api: Served) -> None:
    whole = await api.post("/v1/completions", **body_of("", n=3, guided_json=SCHEMA))
    for choice in whole["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    events = await api.events("/v1/completions", **body_of("", guided_json=SCHEMA))
    jsonschema.validate(json.loads(text_of(events)), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "objekt"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"guided_json": False}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": {"$ref": "http://127.0.0.1/x"}}, "guided_json"),
        ({"guided_json": {"type": "string", "x-guidance": {}}}, "guided_json"),
        ({"json_schema": {"type": "objekt"}}, "json_schema"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"regex_pattern": "(?=a)b"}, "regex_pattern"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_grammar": "start: a"}, "guided_grammar"),
        ({"grammar_string": "root ::= ("}, "grammar_string"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "json_schema": SCHEMA}, "json_schema"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
        ({"structured_outputs": {"regex": "a|" * 40_000}}, "structured_outputs.regex"),
    ],
)
async def test_what_nothing_can_be_held_to_is_refused_by_name_before_any_token(
    api: Served, fields: dict[str, Any], param: str
) -> None:
    for path in PATHS:
        for stream in (False, True):
            assert (await api.refusal(path, **body_of(path, stream=stream, **fields)))["param"] == param
    assert not api.backend.submitted


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"guided_choice": []},
        {"json_schema": {}},
        {"regex_pattern": "", "grammar_string": ""},
        {"guided_json": None, "structured_outputs": None},
        {"guided_decoding_backend": "auto"},
    ],
)
async def test_what_asks_for_no_format_changes_nothing(api: Served, fields: dict[str, Any]) -> None:
    body = {"prompt": "x", "max_tokens": 9}
    plain, same = await api.post("/v1/completions", **body), await api.post("/v1/completions", **body, **fields)
    assert plain["choices"] == same["choices"]


async def test_without_strictness_keywords_that_cannot_be_held_to_are_left_aside(api: Served) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "minItems": 2, "uniqueItems": True}
    lenient = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    jsonschema.validate(
        json.loads(await answer(api, "/v1/chat/completions", response_format=lenient)), schema | {"uniqueItems": False}
    )


async def test_max_tokens_ends_it_with_length_and_the_last_token_of_the_whole_with_stop(api: Served) -> None:
    for max_tokens, finish in ((2, "length"), (3, "stop"), (9, "stop")):
        whole = await api.post("/v1/completions", **body_of("", guided_choice=["abc"]) | {"max_tokens": max_tokens})
        [choice] = whole["choices"]
        assert (choice["finish_reason"], choice["text"]) == (finish, "abc"[:max_tokens])


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["a", '"', "}", ":"]},
        {"stop": ["}"], "include_stop_str_in_output": True},
        {"stop_token_ids": [ord("}"), ord("a"), ord('"')]},
        {"min_tokens": 300},
        {"ignore_eos": True},
        {"skip_special_tokens": False},
        {"temperature": 0},
        {"logit_bias": {str(ord("}")): -100, "256": 100}},
        {"banned_strings": ["Grace", " "]},
    ],
)
async def test_no_other_field_makes_the_json_invalid(api: Served, fields: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(await answer(api, "/v1/completions", guided_json=SCHEMA, **fields)), SCHEMA)


async def test_banned_strings_that_leave_the_grammar_no_way_on_are_an_error_not_a_broken_answer(api: Served) -> None:
    body = body_of("", guided_choice=["abc"], banned_strings=["abc"])
    async with api.http.post("/v1/completions", json=body) as response:
        assert response.status >= 400
        assert "banned_strings" in (await response.json())["error"]["message"]


async def test_a_text_that_goes_on_may_be_ended_by_a_stop_string(api: Served) -> None:
    whole = await api.post("/v1/completions", **body_of("", guided_regex="(abc ){5}", stop=["c a"]))
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")


async def test_a_longer_schema_is_let_in_where_the_setting_says_so(tmp_path: Path) -> None:
    schema = {"enum": ["x" * 70_000]}
    async with serving(tmp_path, settings=ApiSettings(port=0, max_schema_bytes=2**17)) as api:
        begun = await api.post("/v1/completions", **body_of("", guided_json=schema) | {"max_tokens": 8})
        assert begun["choices"][0]["text"].startswith('"xxx')
    async with serving(tmp_path, settings=ApiSettings(port=0, max_schema_bytes=8)) as api:
        error = await api.refusal("/v1/completions", **body_of("", guided_json=SCHEMA))
        assert "has more than 8 bytes" in error["message"]


async def test_a_hostile_schema_ends_neither_the_server_nor_its_worker(api: Served) -> None:
    links = "".join(f"R{i}: R{i + 1}\n" for i in range(5000))
    deep = {"$ref": "#/a0", **{f"a{i}": {"items": {"$ref": f"#/a{i + 1}"}} for i in range(1500)}, "a1500": {}}
    await api.post("/v1/completions", **body_of("", guided_grammar=f'start: R0\n{links}R5000: "a"\n'))
    await api.post("/v1/completions", **body_of("", guided_json=deep) | {"max_tokens": 4})
    nested: dict[str, Any] = {}
    for _ in range(14):
        nested = {"allOf": [{"anyOf": [{"title": "x"}, {"properties": {"y": nested}}]}, nested]}
    async with api.http.post("/v1/completions", json=body_of("", guided_json={"anyOf": [nested]})) as response:
        assert response.status in (200, 400)
    assert await answer(api, "/v1/completions", guided_choice=["ok"]) == "ok"


async def test_a_request_that_is_cancelled_while_its_grammar_compiles_leaves_nothing(tmp_path: Path) -> None:
    backend = FakeBackend(gate=Gate())
    async with serving(tmp_path, backend) as api:
        asking = asyncio.create_task(api.post("/v1/completions", **body_of("", guided_choice=["a", "b"])))
        await api.until_row(state="prefill")
        asking.cancel()
        await api.until_row(finish="cancelled")
        assert backend.gate is not None
        backend.gate.open()
        assert await answer(api, "/v1/completions", guided_choice=["ok"]) == "ok"
        await until(lambda: not backend.has_work())
