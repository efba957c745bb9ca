"""Who may do what over HTTP: keys with scopes, revoked ones, dialects switched off; and what is counted of it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from console.api.errors import CannotListen, Unprotected
from console.api.key_file import KeysUnavailable
from console.api.keys import Keys
from console.api.server import ApiSettings
from console.links.api import Scope
from engine.errors import InvalidRequest
from tests.api.harness import PATIENCE_S, Served, serving, until
from tests.api.operators import FolderOperator
from tests.fakes.link import FakeLink

PROMPT = {"prompt": "x", "max_tokens": 2}


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with the settings' key, whose made keys are kept in a folder."""
    settings = ApiSettings(port=0, api_key="open sesame", state_dir=tmp_path / "state")
    async with serving(tmp_path, settings=settings, operator=FolderOperator(tmp_path)) as api:
        yield api


@pytest.fixture
async def unlocked(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that may be open to everybody."""
    async with serving(tmp_path, settings=ApiSettings(port=0, no_auth=True)) as api:
        yield api


async def bearer(api: Served, name: str, *scopes: Scope) -> dict[str, str]:
    """The headers of a new key."""
    made = await api.server.make_key(name, scopes)
    return {"Authorization": f"Bearer {made.key}"}


async def answer(api: Served, method: str, path: str, headers: dict[str, str], **body: Any) -> tuple[int, str]:
    """The status and the error's sentence, "" where there is none."""
    options = {"json": body} if method == "POST" else {}
    async with api.http.request(method, path, headers=headers, **options) as response:
        if response.content_type != "application/json":
            return response.status, ""
        return response.status, (await response.json()).get("error", {}).get("message", "")


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        ("use", {"/v1/models", "/v1/completions", "/"}),
        ("watch", {"/metrics", "/admin/snapshot", "/"}),
        ("admin", {"/v1/models", "/v1/completions", "/", "/metrics", "/admin/snapshot", "/admin/unload"}),
    ],
)
async def test_a_key_does_what_its_scope_says_and_nothing_else(keyed: Served, scope: Scope, allowed: set[str]) -> None:
    headers = await bearer(keyed, "k", scope)
    asked = [
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("GET", "/"),
        ("GET", "/metrics"),
        ("GET", "/admin/snapshot"),
        ("POST", "/admin/unload"),
    ]
    for method, path in asked:
        body = PROMPT if "completions" in path else {}
        status, sentence = await answer(keyed, method, path, headers, **body)
        assert status == (200 if path in allowed else 403), path
        if path not in allowed:
            assert sentence.startswith("The key k may only")
            assert "needs the scope" in sentence
    assert (keyed.engine.status.state == "unloaded") == (scope == "admin")


async def test_a_key_that_watches_can_look_and_not_order(keyed: Served) -> None:
    headers = await bearer(keyed, "watcher", "watch")
    assert (await answer(keyed, "GET", "/admin/snapshot", headers))[0] == 200
    for path in ("/admin/reconfigure", "/admin/load", "/admin/estimate", "/admin/cancel-load"):
        status, sentence = await answer(keyed, "POST", path, headers, workers=3)
        assert (status, sentence) == (
            403,
            f"The key watcher may only watch; POST {path} needs the scope admin",
        )


async def test_a_revoked_key_is_refused_at_once(keyed: Served) -> None:
    headers = await bearer(keyed, "app", "use")
    assert (await answer(keyed, "POST", "/v1/completions", headers, **PROMPT))[0] == 200
    await keyed.server.revoke_key("app")
    assert await answer(keyed, "POST", "/v1/completions", headers, **PROMPT) == (401, "That key is not valid here")


async def test_a_revoked_key_is_shown_no_more_of_what_it_watches(tmp_path: Path) -> None:
    async with serving(tmp_path, operator=FolderOperator(tmp_path), link=FakeLink, load=False) as api:
        open_to_all = await api.http.get("/admin/events?hz=10")
        watching = await api.http.get("/admin/events?hz=10", headers=await bearer(api, "watcher", "watch"))
        kept = await api.http.get("/admin/events?hz=10", headers=await bearer(api, "other", "watch"))
        await api.server.revoke_key("watcher")
        for ended in (open_to_all, watching):
            async with asyncio.timeout(PATIENCE_S):
                assert "That key is not valid here any more" in (await ended.text()).splitlines()[-2]
        assert not kept.content.at_eof()
        kept.close()


async def test_keys_are_compared_in_constant_time(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[object, object]] = []
    compare = hmac.compare_digest

    def noted(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    for key in ("open sesame", "open", "x" * 4000):
        await answer(keyed, "GET", "/v1/models", {"X-API-Key": key})
    assert len(compared) == 3
    assert {len(each) for pair in compared for each in pair} == {32}


async def test_a_made_key_s_hash_is_compared_in_constant_time(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = await bearer(keyed, "app", "use")
    compared: list[int] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(len(a)) or compare(a, b))
    assert (await answer(keyed, "GET", "/v1/models", headers))[0] == 200
    assert compared == [32, 64]


async def test_what_a_key_did_is_counted(keyed: Served) -> None:
    headers = await bearer(keyed, "app", "use")
    for _ in range(2):
        await answer(keyed, "POST", "/v1/completions", headers, **PROMPT)
    reading = next(key for key in keyed.server.report().keys if key.name == "app")
    assert (reading.requests, reading.prompt_tokens, reading.output_tokens) == (2, 2, 4)
    assert reading.last_used_at is not None


async def test_the_first_key_closes_a_server_that_was_open_and_the_last_opens_it_again(api: Served) -> None:
    assert (await answer(api, "GET", "/metrics", {}))[0] == 200
    headers = await bearer(api, "app", "use")
    assert api.server.status().key_required
    assert (await answer(api, "GET", "/v1/models", {}))[0] == 401
    assert (await answer(api, "GET", "/v1/models", headers))[0] == 200
    await api.server.revoke_key("app")
    assert (await answer(api, "GET", "/v1/models", {}))[0] == 200


async def test_the_last_key_of_a_server_that_others_reach_is_not_revoked(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, host="127.0.0.1"), load=False) as api:
        await bearer(api, "app", "use")
        await api.server.listen("0.0.0.0", 0)
        with pytest.raises(InvalidRequest, match="app is the last key"):
            await api.server.revoke_key("app")
        await api.server.listen("127.0.0.1", 0)
        await api.server.revoke_key("app")


async def test_a_file_of_keys_that_cannot_be_read_keeps_the_server_shut(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("no JSON")
    async with serving(tmp_path, load=False) as api:
        shut = type(api.server)(api.engine, ApiSettings(port=0, state_dir=tmp_path))
        with pytest.raises(KeysUnavailable, match=r"keys\.json cannot be read"):
            await shut.start()
        assert not shut.status().running
        assert shut.status().error is not None


# -- dialects -----------------------------------------------------------------------------------------------------


async def test_a_dialect_that_is_off_says_so_and_the_others_answer(api: Served) -> None:
    await api.server.switch_dialect("openai", False)
    for path in ("/v1/completions", "/v1/chat/completions"):
        error = await api.refusal(path, status=404, **PROMPT)
        assert error["code"] == "dialect_off"
        assert error["message"] == f"{path} is switched off: this server does not answer the OpenAI dialect now"
    for path in ("/v1/models", "/v1/models/any"):
        assert (await answer(api, "GET", path, {}))[0] == 404
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
    with pytest.raises(InvalidRequest, match="no dialect called smoke; there are: openai, generate"):
        await api.server.switch_dialect("smoke", False)


async def test_who_has_no_key_is_not_told_which_dialects_are_off(keyed: Served) -> None:
    await keyed.server.switch_dialect("openai", False)
    assert (await answer(keyed, "POST", "/v1/completions", {}, **PROMPT))[0] == 401


async def test_every_dialect_says_its_routes_and_how_often_it_was_asked(api: Served) -> None:
    await api.post("/v1/completions", **PROMPT)
    await api.refusal("/v1/completions", prompt=3)
    openai, generate, *_ = api.server.report().dialects
    assert openai.routes[:4] == ("/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions")
    assert (openai.requests, generate.requests) == (2, 0)


# -- clients and failures -----------------------------------------------------------------------------------------


async def test_clients_are_told_apart_by_address_key_and_program(keyed: Served) -> None:
    app, watcher = await bearer(keyed, "app", "use"), await bearer(keyed, "watcher", "watch")
    for headers, path in ((app, "/v1/models"), (app, "/v1/models"), (watcher, "/metrics")):
        await answer(keyed, "GET", path, {**headers, "User-Agent": "test/1"})
    await answer(keyed, "GET", "/v1/models", {"Authorization": "Bearer wrong"})
    clients = keyed.server.report().clients
    assert {(each.address, each.key, each.agent, each.requests) for each in clients} == {
        ("127.0.0.1", "app", "test/1", 2),
        ("127.0.0.1", "watcher", "test/1", 1),
    }
    assert all(each.under_way == 0 for each in clients)


async def test_workers_are_shared_by_made_keys_and_else_by_addresses(keyed: Served) -> None:
    app = await bearer(keyed, "app", "use")
    for headers in (app, {"X-API-Key": "open sesame"}):
        await answer(keyed, "POST", "/generate", headers, **PROMPT)
    assert {row.client for row in keyed.engine.snapshot().requests} == {"app", "127.0.0.1"}


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
    assert (newest.method, newest.path, newest.message) == ("POST", "/nowhere", "There is nothing at /nowhere")
    assert (oldest.path, oldest.client) == ("/generate", "127.0.0.1")
    assert report.failures_per_min == 3
    assert report.requests_per_min == 3


async def test_no_more_than_fifty_failures_are_kept(api: Served) -> None:
    for at in range(55):
        await answer(api, "GET", f"/nowhere/{at}", {})
    failures = api.server.report().failures
    assert len(failures) == 50
    assert failures[0].path == "/nowhere/54"


async def test_a_stream_that_fails_after_it_began_counts_as_a_failure(paced_api: Served) -> None:
    stream = asyncio.create_task(paced_api.events("/v1/completions", prompt="x"))
    await until(lambda: paced_api.engine.snapshot().running == 1)
    paced_api.engine.cancel(paced_api.engine.snapshot().requests[0].id)
    await stream
    assert [failure.code for failure in paced_api.server.report().failures] == ["request_cancelled"]


async def test_a_client_that_leaves_is_a_failure_of_its_own_kind(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.post("/generate", **PROMPT))
    await paced_api.until_row(state="prefill")
    asking.cancel()
    await until(lambda: bool(paced_api.server.report().failures))
    assert paced_api.server.report().failures[0].code == "client_left"


# -- the address --------------------------------------------------------------------------------------------------


async def test_listening_elsewhere_loses_no_request(paced_api: Served) -> None:
    before = paced_api.url
    asking = asyncio.create_task(paced_api.post("/generate", **PROMPT))
    await paced_api.until_row(state="prefill")
    await paced_api.server.listen("127.0.0.1", 0)
    assert paced_api.url != before
    paced_api.backend.gate.open()  # type: ignore[union-attr]
    assert len((await asking)["text"]) == 3
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{paced_api.url}/ready") as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{before}/ready")


async def test_another_address_with_the_same_port_can_be_taken(unlocked: Served) -> None:
    api = unlocked
    port = api.server.status().port
    await api.server.listen("0.0.0.0", port)
    status = api.server.status()
    assert (status.host, status.port) == ("0.0.0.0", port)
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/ready") as response:
        assert response.status == 200


async def test_connections_without_a_request_end_when_the_address_changes(api: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.status().port)
    writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"}")
    await api.server.listen("127.0.0.1", 0)
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()


async def test_a_port_that_is_taken_leaves_the_old_address_as_it_was(api: Served) -> None:
    before = api.server.status()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(
            CannotListen, match=r"another program listens there.* It goes on listening on 127\.0\.0\.1"
        ) as no,
    ):
        await api.server.listen("127.0.0.1", taken.getsockname()[1])
    assert no.value.message.count("\n") == 0
    assert api.server.status() == before
    await api.get("/ready")


async def test_an_address_that_cannot_be_had_puts_the_old_one_back(unlocked: Served) -> None:
    api = unlocked
    before = api.server.status()
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1 is no address of this machine.*It goes on listening"):
        await api.server.listen("192.0.2.1", before.port)
    assert (api.server.status().running, api.server.status().url) == (True, before.url)
    async with aiohttp.ClientSession(api.url) as http, http.get("/ready") as response:
        assert response.status == 200


async def test_an_address_set_while_it_is_off_holds_when_it_is_started(api: Served) -> None:
    await api.server.stop()
    await api.server.listen("127.0.0.2", 0)
    assert not api.server.status().running
    await api.server.start()
    assert api.server.status().host == "127.0.0.2"


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("::1", None, False)]
)
async def test_serving_others_without_a_key_is_warned_about_where_it_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, key: str | None, warned: bool
) -> None:
    settings = ApiSettings(port=0, host=host, api_key=key, no_auth=True)
    with caplog.at_level(logging.WARNING, logger="api"):
        async with serving(tmp_path, settings=settings, load=False) as api:
            assert api.server.status().is_open == warned
            assert await answer(api, "GET", "/v1/models", {"X-API-Key": key or ""}) == (200, "")
    assert any("--no-auth" in line for line in caplog.messages) == warned


async def test_serving_others_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unprotected, match=r"Not listening on 0\.0\.0\.0 port 0 without a key.*--api-key.*--no-auth"):
        async with serving(tmp_path, settings=ApiSettings(port=0, host="0.0.0.0"), load=False):
            pass


async def test_listening_for_others_without_a_key_is_refused_and_changes_nothing(api: Served) -> None:
    before = api.server.status()
    with pytest.raises(Unprotected):
        await api.server.listen("0.0.0.0", 0)
    assert api.server.status() == before
    await bearer(api, "app", "use")
    await api.server.listen("0.0.0.0", 0)
    assert not api.server.status().is_open


async def test_a_server_whose_last_key_was_revoked_from_outside_lets_nobody_in(tmp_path: Path) -> None:
    outside = Keys(tmp_path / "state")
    key = outside.make("app", ("use",)).key
    async with serving(tmp_path, settings=ApiSettings(port=0, host="0.0.0.0", state_dir=tmp_path / "state")) as api:
        headers = {"Authorization": f"Bearer {key}"}
        assert (await answer(api, "GET", "/v1/models", headers))[0] == 200
        outside.revoke("app")
        await until(lambda: not api.server.report().keys)
        for given in (headers, {}):
            assert (await answer(api, "GET", "/v1/models", given))[0] == 401


async def test_keys_made_and_revoked_by_another_program_hold_without_a_restart(tmp_path: Path) -> None:
    outside = Keys(tmp_path / "state")
    kept = outside.make("kept", ("use",)).key
    async with serving(tmp_path, settings=ApiSettings(port=0, state_dir=tmp_path / "state")) as api:
        assert (await answer(api, "GET", "/v1/models", {"X-API-Key": kept}))[0] == 200
        new = outside.make("new", ("use",)).key
        await until(lambda: len(api.server.report().keys) == 2)
        assert (await answer(api, "GET", "/v1/models", {"X-API-Key": new}))[0] == 200
        outside.revoke("kept")
        await until(lambda: len(api.server.report().keys) == 1)
        assert (await answer(api, "GET", "/v1/models", {"X-API-Key": kept}))[0] == 401
        assert (await answer(api, "GET", "/v1/models", {"X-API-Key": new}))[0] == 200
