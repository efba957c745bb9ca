"""Dialects that are switched off, and clients and failures as the operator sees them."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from engine.errors import InvalidRequest
from tests.api.harness import PROMPT, Served, bearer, told, until


async def test_a_dialect_that_is_off_says_so_and_the_others_answer(api: Served) -> None:
    await api.server.switch_dialect("openai", False)
    for path in ("/v1/completions", "/v1/chat/completions"):
        error = await api.refusal(path, status=404, **PROMPT)
        assert error["code"] == "dialect_off"
        assert error["message"] == f"{path} is off: the OpenAI dialect is disabled on this server"
    for path in ("/v1/models", "/v1/models/any"):
        assert (await told(api, "GET", path, {}))[0] == 404
    await api.post("/generate", **PROMPT)
    await api.get("/health")
    await api.server.switch_dialect("openai", True)
    await api.post("/v1/completions", **PROMPT)


async def test_a_dialect_stays_off_when_the_server_is_started_again(api: Served) -> None:
    await api.server.switch_dialect("generate", False)
    await api.server.stop()
    await api.server.start()
    async with aiohttp.ClientSession(api.url) as http, http.post("/generate", json=PROMPT) as response:
        assert response.status == 404


async def test_a_dialect_that_there_is_not_is_refused_by_name(api: Served) -> None:
    with pytest.raises(InvalidRequest, match="Unknown dialect smoke; available: openai, generate"):
        await api.server.switch_dialect("smoke", False)


async def test_who_has_no_key_is_not_told_which_dialects_are_off(keyed: Served) -> None:
    await keyed.server.switch_dialect("openai", False)
    assert (await told(keyed, "POST", "/v1/completions", {}, **PROMPT))[0] == 401


async def test_every_dialect_says_its_routes_and_how_often_it_was_asked(api: Served) -> None:
    await api.post("/v1/completions", **PROMPT)
    await api.refusal("/v1/completions", prompt=3)
    openai, generate, *_ = api.server.report().dialects
    assert openai.routes[:4] == ("/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions")
    assert (openai.requests, generate.requests) == (2, 0)


async def test_clients_are_told_apart_by_address_key_and_program(keyed: Served) -> None:
    app, watcher = await bearer(keyed, "app", "use"), await bearer(keyed, "watcher", "watch")
    for headers, path in ((app, "/v1/models"), (app, "/v1/models"), (watcher, "/metrics")):
        await told(keyed, "GET", path, {**headers, "User-Agent": "test/1 (of its kind)"})
    await told(keyed, "GET", "/v1/models", {"Authorization": "Bearer wrong"})
    clients = keyed.server.report().clients
    assert {(each.address, each.key, each.program, each.requests) for each in clients} == {
        ("127.0.0.1", "app", "test/1", 2),
        ("127.0.0.1", "watcher", "test/1", 1),
    }
    assert all(each.under_way == 0 for each in clients)


async def test_requests_and_the_report_name_the_same_clients(keyed: Served) -> None:
    app = await bearer(keyed, "app", "use")
    for agent in ("test/1 (of its kind)", "test/2"):
        await told(keyed, "POST", "/v1/completions", {**app, "User-Agent": agent}, **PROMPT)
    rows = {(row.address, row.key_name, row.program) for row in keyed.engine.publish().requests}
    assert rows == {("127.0.0.1", "app", "test/1"), ("127.0.0.1", "app", "test/2")}
    assert rows == {(each.address, each.key, each.program) for each in keyed.server.report().clients}


async def test_workers_are_shared_by_made_keys_and_else_by_addresses(keyed: Served) -> None:
    app = await bearer(keyed, "app", "use")
    for headers in (app, {"X-API-Key": "open sesame"}):
        await told(keyed, "POST", "/generate", headers, **PROMPT)
    assert {row.client for row in keyed.engine.publish().requests} == {"app", "127.0.0.1"}


async def test_requests_under_way_are_seen_at_their_client(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.post("/generate", **PROMPT))
    await paced_api.until_row(state="prefill")
    (client,) = paced_api.server.report().clients
    assert (client.under_way, paced_api.server.report().under_way) == (1, 1)
    paced_api.backend.gate.open()  # type: ignore[union-attr]
    await asking
    assert paced_api.server.report().under_way == 0


async def test_failures_are_counted_and_the_last_are_told_without_bodies(api: Served) -> None:
    await api.refusal("/generate?secret=1", prompt=3)
    await api.refusal("/generate", prompt=4)
    await api.refusal("/nowhere", status=404)
    report = api.server.report()
    assert {(each.status, each.code): each.count for each in report.failure_counts} == {
        (400, "invalid_request"): 2,
        (404, "not_found"): 1,
    }
    newest, *_, oldest = report.failures
    assert (newest.method, newest.path, newest.message) == ("POST", "/nowhere", "Not found: /nowhere")
    assert (oldest.path, oldest.client) == ("/generate", "127.0.0.1")
    assert report.failures_per_min == 3
    assert report.requests_per_min == 3


async def test_no_more_than_fifty_failures_are_kept(api: Served) -> None:
    for at in range(55):
        await told(api, "GET", f"/nowhere/{at}", {})
    failures = api.server.report().failures
    assert len(failures) == 50
    assert failures[0].path == "/nowhere/54"


async def test_a_stream_that_fails_after_it_began_counts_as_a_failure(paced_api: Served) -> None:
    stream = asyncio.create_task(paced_api.events("/v1/completions", prompt="x"))
    await until(lambda: paced_api.engine.publish().running == 1)
    paced_api.engine.cancel(paced_api.engine.publish().requests[0].id)
    await stream
    assert [failure.code for failure in paced_api.server.report().failures] == ["request_cancelled"]


async def test_a_client_that_leaves_is_a_failure_of_its_own_kind(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.post("/generate", **PROMPT))
    await paced_api.until_row(state="prefill")
    asking.cancel()
    await until(lambda: bool(paced_api.server.report().failures))
    assert paced_api.server.report().failures[0].code == "client_left"
