"""Anthropic's list of models, and its shape for errors wherever its clients ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.api.harness import Served, serving
from tests.api.operators import named_spec
from tests.fakes.engines import Backends

VERSION = {"anthropic-version": "2023-06-01"}


def client_of(api: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=api.url, api_key="x", max_retries=0)


async def test_the_client_s_models_have_every_field(api: Served) -> None:
    async with client_of(api) as client:
        page = await client.models.list()
        one = await client.models.retrieve("fake")
    [model] = page.data
    assert model == one
    assert (model.id, model.type, model.display_name, model.lifecycle) == ("fake", "model", "fake", "active")
    assert (model.max_input_tokens, model.max_tokens) == (4095, 4095)
    assert model.created_at.tzinfo is not None
    assert (page.has_more, page.first_id, page.last_id) == (False, "fake", "fake")


async def test_openai_s_clients_get_openai_s_list(api: Served) -> None:
    listed = await api.get("/v1/models")
    assert (listed["object"], listed["data"][0]["object"]) == ("list", "model")
    assert (await api.get("/v1/models/fake"))["owned_by"] == "ericllm"


async def test_the_client_turns_the_pages(tmp_path: Path) -> None:
    async with serving(tmp_path / "a", others=Backends()) as api:
        for name in ("b", "c"):
            await api.engine.load(named_spec(tmp_path, name), beside=True)
        async with client_of(api) as client:
            seen = [model.id async for model in await client.models.list(limit=2)]
            page = await client.models.list(limit=1, before_id="c")
    assert seen == ["fake", "b", "c"]
    assert ([model.id for model in page.data], page.has_more) == (["b"], True)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after_id=none", "before_id="])
async def test_a_page_that_there_cannot_be_is_refused(api: Served, query: str) -> None:
    answer = await api.get(f"/v1/models?{query}", 400, headers=VERSION)
    assert answer["error"]["type"] == "invalid_request_error"
    assert query.partition("=")[0] in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("GET", "/v1/messages/batches/b_1/results", {}, 404, "not_found_error"),
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("GET", "/v1/files", VERSION, 404, "not_found_error"),
        ("POST", "/v1/complete", VERSION, 404, "not_found_error"),
        ("GET", "/v1/models/none", VERSION, 404, "not_found_error"),
        ("POST", "/v1/models", VERSION, 405, "invalid_request_error"),
    ],
)
async def test_errors_have_anthropic_s_shape_wherever_its_clients_ask(
    api: Served, method: str, path: str, headers: dict[str, str], status: int, kind: str
) -> None:
    async with api.http.request(method, path, headers=headers) as response:
        answer: Any = await response.json()
        assert response.status == status
    assert set(answer) == {"type", "error", "request_id"}
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)


async def test_others_keep_openai_s_shape(api: Served) -> None:
    for path in ("/v1/files", "/v1/messagesx", "/v1/models/none"):
        answer = await api.get(path, 404)
        assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_a_key_that_is_wrong_is_told_in_anthropic_s_shape_there_too(keyed: Served) -> None:
    for path in ("/v1/models", "/v1/messages/batches", "/v1/files"):
        answer = await keyed.get(path, 401, headers=VERSION)
        assert answer["error"]["type"] == "authentication_error"


async def test_a_dialect_that_is_off_leaves_the_other_its_list(api: Served) -> None:
    await api.server.switch_dialect("anthropic", False)
    assert (await api.get("/v1/models"))["object"] == "list"
    assert (await api.get("/v1/models", 404, headers=VERSION))["type"] == "error"
    await api.server.switch_dialect("anthropic", True)
    await api.server.switch_dialect("openai", False)
    assert (await api.get("/v1/models", headers=VERSION))["has_more"] is False
    assert (await api.get("/v1/models", 404))["error"]["code"] == "dialect_off"
