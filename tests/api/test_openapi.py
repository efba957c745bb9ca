"""GET /openapi.json: what the server answers, all of it, as it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31

from console.api.requests.schemas import meanings
from tests.api.harness import Served, serving
from tests.api.operators import FolderOperator
from tests.fakes import scenes
from tests.fakes.link import FakeLink

pytestmark = pytest.mark.long

Operation = dict[str, Any]

_HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def whole(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with everything that one can have."""
    async with serving(tmp_path, operator=FolderOperator(tmp_path), link=lambda: FakeLink(scenes.busy())) as served:
        yield served


@pytest.fixture
async def document(whole: Served) -> dict[str, Any]:
    """What it says of itself."""
    return await whole.get("/openapi.json")


async def test_it_is_made_once_however_many_ask_at_once(whole: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def noted(*places: Any) -> bytes:
        made.append(places)
        return b"{}"

    monkeypatch.setattr("console.api.openapi._encode", noted)
    assert await asyncio.gather(*(whole.get("/openapi.json") for _ in range(5))) == [{}] * 5
    assert len(made) == 1


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, Operation]]:
    """Method, path and what is said of it."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def checker(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    """What checks values against one of the document's schemas."""
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


def check(document: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    """Fail where `value` is none of those that the schema describes."""
    wrong = [str(error) for error in checker(document, schema).iter_errors(value)]
    assert wrong == [], value


async def test_it_is_a_valid_openapi_document(document: dict[str, Any]) -> None:
    wrong = [str(error)[:500] for error in jsonschema_rs.Draft202012Validator(OPENAPI_31).iter_errors(document)]
    assert wrong == []
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)


async def test_every_schema_in_it_is_one_and_leads_nowhere_else(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        checker(document, schema)
    references = set(_references(document))
    assert {reference.removeprefix("#/components/schemas/") for reference in references} == set(
        document["components"]["schemas"]
    )


async def test_every_route_is_in_it_and_nothing_else(whole: Served, document: dict[str, Any]) -> None:
    about = await whole.get("/")
    assert set(document["paths"]) == set(about["endpoints"])
    for method, path, operation in operations(document):
        if method in ("get", "delete") or "{" in path:
            continue
        async with whole.http.request(method, path, data="no json") as response:
            assert response.status not in (404, 405), (path, operation)


async def test_every_endpoint_says_what_it_is_for(document: dict[str, Any]) -> None:
    silent = [path for _, path, each in operations(document) if each["summary"] == each["operationId"]]
    assert silent == []


async def test_examples_are_what_their_schema_wants_and_so_are_the_answers_to_them(
    whole: Served, document: dict[str, Any]
) -> None:
    answered = 0
    for method, path, operation in operations(document):
        for example in _examples(operation):
            check(document, operation["requestBody"]["content"]["application/json"]["schema"], example)
            async with whole.http.request(method, path, json=example) as response:
                assert response.status == 200, (path, await response.text())
                await _check_answer(document, operation, response.content_type, await response.text())
                answered += 1
    assert answered > 5


async def test_streams_are_made_of_the_events_that_are_told(whole: Served, document: dict[str, Any]) -> None:
    streamed = 0
    for method, path, operation in operations(document):
        for example in _examples(operation):
            if not _streams(document, operation):
                continue
            async with whole.http.request(method, path, json={**example, "stream": True}) as response:
                assert response.status == 200, (path, await response.text())
                await _check_answer(document, operation, response.content_type, await response.text())
                streamed += 1
    assert streamed > 3


async def test_what_can_be_looked_at_is_as_it_is_told(whole: Served, document: dict[str, Any]) -> None:
    for path in ("/", "/health", "/ready", "/v1/models", "/admin/models", "/admin/snapshot", "/info", "/api/tags"):
        answer = await whole.get(path)
        check(
            document,
            document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"],
            answer,
        )


async def test_errors_are_as_they_are_told(whole: Served, document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        if "requestBody" not in operation:
            continue
        async with whole.http.request(method, path, json={"no such field": 1}) as response:
            assert 400 <= response.status < 500, path
            check(
                document,
                operation["responses"]["default"]["content"]["application/json"]["schema"],
                await response.json(),
            )


async def test_a_refused_parameter_is_told_with_the_values_that_change_nothing(document: dict[str, Any]) -> None:
    body = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert body["suffix"] == {
        "enum": [None, "", [], {}],
        "description": "Not supported: infilling is not supported",
        "x-refused": True,
    }
    assert body["typical"]["description"] == "Alias of typical_p"


async def test_what_a_field_means_is_what_its_class_says(document: dict[str, Any]) -> None:
    body = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert body["priority"]["description"] == "lower values go first, as in vLLM."
    assert body["echo"]["description"].startswith("start each answer with the prompt")


def test_a_docstring_s_fields_may_share_a_meaning_and_a_line() -> None:
    doc = (
        "What it is.\n\none, two: a meaning on\ntwo lines.  three: another: with a colon.\nFour: none\n\nNot of three."
    )
    assert meanings([doc, "three: farther away"]) == {
        "one": "a meaning on two lines.",
        "two": "a meaning on two lines.",
        "three": "another: with a colon. Four: none",
    }


async def test_a_dialect_that_is_off_is_not_in_it(whole: Served) -> None:
    await whole.server.switch_dialect("anthropic", False)
    assert "/v1/messages" not in (await whole.get("/openapi.json"))["paths"]
    await whole.server.switch_dialect("anthropic", True)
    assert "/v1/messages" in (await whole.get("/openapi.json"))["paths"]


async def _check_answer(document: dict[str, Any], operation: Operation, media: str, text: str) -> None:
    told = operation["responses"]["200"]["content"][media]
    if "x-event" not in told:
        check(document, told["schema"], json.loads(text))
        return
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if not line.startswith(("event:", ":"))]
    events = [json.loads(line) for line in lines if line and line != "[DONE]"]
    assert events
    for event in events:
        check(document, told["x-event"], event)


def _told(operation: Operation, status: str) -> dict[str, Any]:
    found: dict[str, Any] = operation["responses"][status]["content"]["application/json"]["schema"]
    return found


def _examples(operation: Operation) -> list[dict[str, Any]]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    several = [each["value"] for each in content.get("examples", {}).values()]
    return [content["example"]] if "example" in content else several


def _streams(document: dict[str, Any], operation: Operation) -> bool:
    content = operation["responses"]["200"].get("content", {})
    return any("x-event" in told for told in content.values()) and len(content) > 1


def _references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


async def test_a_body_within_a_body_has_its_own_names_and_refusals(document: dict[str, Any]) -> None:
    for path, field, known in (
        ("/api/embed", "options", {"repeat_penalty": 1.2, "num_predict": 5, "penalize_newline": True}),
        ("/generate_stream", "parameters", {"watermark": False, "max_new_tokens": 5}),
    ):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][body.rpartition("/")[2]]["properties"][field]
        check(document, schema, known)
        assert not checker(document, schema).is_valid({"n": 2}), "of the server's own, and no client's"


async def test_what_is_never_done_is_not_told_to_be(document: dict[str, Any]) -> None:
    assert set(document["paths"]["/api/pull"]["post"]["responses"]) == {"default"}
    assert set(document["paths"]["/api/v1/stream"]["get"]["responses"]) == {"101", "default"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": -1}),
        ("/v1/completions", {"prompt": "x", "top_p": 0}),
        ("/v1/completions", {"prompt": "x", "stop": [""]}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_schema"}}),
        ("/v1/completions", {"prompt": "x", "guided_json": False}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}),
        ("/v1/chat/completions", {"messages": [{"role": ""}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "some"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": []}]}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "thinking"}]}]}),
        ("/v1/messages", {"max_tokens": 9, "messages": _HELLO, "thinking": {"type": "enabled"}}),
        ("/v1/messages", {"max_tokens": 9, "messages": _HELLO, "thinking": {"type": "disabled", "budget_tokens": 3}}),
        ("/v1/embeddings", {"input": ["a", ""]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/api/chat", {"messages": [{"role": "developer"}]}),
        ("/api/embed", {"input": "x", "keep_alive": [1]}),
        ("/api/generate", {"prompt": "x", "keep_alive": "soon"}),
        ("/api/generate", {"prompt": "x", "format": "xml"}),
        ("/api/generate", {"prompt": "x", "think": "soon"}),
        ("/api/v1/model", {"action": "dance"}),
        ("/admin/reconfigure", {}),
        ("/generate_stream", {"inputs": "x", "parameters": {"grammar": {"type": "lark", "value": ""}}}),
        ("/generate_stream", {"inputs": "x", "parameters": {"temperature": -1}}),
    ],
)
async def test_the_document_allows_nothing_that_is_always_refused(
    whole: Served, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not checker(document, schema).is_valid(body)
    async with whole.http.post(path, json=body) as response:
        assert response.status == 400, await response.text()


@pytest.mark.parametrize("keep_alive", ["5m", "1h30m", "-1m", "1.5h", 300, -1, 0.5, 0, "0", "0s", None])
async def test_a_time_to_keep_a_model_is_as_the_document_has_it(
    whole: Served, document: dict[str, Any], keep_alive: object
) -> None:
    body = {"model": "fake", "prompt": "x", "stream": False, "keep_alive": keep_alive, "options": {"num_predict": 1}}
    check(
        document,
        document["paths"]["/api/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"],
        body,
    )
    assert (await whole.post("/api/generate", **body))["done"] is True
