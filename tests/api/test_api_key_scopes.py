"""What a key may do, and what becomes of keys that are revoked, unreadable or made by another program."""

from __future__ import annotations

import asyncio
import hmac
from pathlib import Path
from typing import Any

import pytest

from console.api.http.key_file import KeysUnavailable
from console.api.http.keys import Keys
from console.api.server import ApiSettings
from console.link.api import Scope
from engine.errors import InvalidRequest
from tests.api.harness import PATIENCE_S, PROMPT, Served, bearer, serving, told, until
from tests.api.operators import FolderOperator
from tests.fakes.link import FakeLink


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
        status, sentence = await told(keyed, method, path, headers, **body)
        assert status == (200 if path in allowed else 403), path
        if path not in allowed:
            assert sentence.startswith("The key k may only")
            assert "needs the scope" in sentence
    assert (keyed.engine.status.state == "unloaded") == (scope == "admin")


async def test_a_key_that_watches_can_look_and_not_order(keyed: Served) -> None:
    headers = await bearer(keyed, "watcher", "watch")
    assert (await told(keyed, "GET", "/admin/snapshot", headers))[0] == 200
    for path in ("/admin/reconfigure", "/admin/load", "/admin/estimate", "/admin/cancel-load"):
        status, sentence = await told(keyed, "POST", path, headers, workers=3)
        assert (status, sentence) == (
            403,
            f"The key watcher may only read status; POST {path} needs the scope admin",
        )


async def test_a_revoked_key_is_refused_at_once(keyed: Served) -> None:
    headers = await bearer(keyed, "app", "use")
    assert (await told(keyed, "POST", "/v1/completions", headers, **PROMPT))[0] == 200
    await keyed.server.revoke_key("app")
    assert await told(keyed, "POST", "/v1/completions", headers, **PROMPT) == (401, "The API key is not valid")


async def test_a_revoked_key_is_shown_no_more_of_what_it_watches(tmp_path: Path) -> None:
    async with serving(tmp_path, operator=FolderOperator(tmp_path), link=FakeLink, load=False) as api:
        open_to_all = await api.http.get("/admin/events?hz=10")
        watching = await api.http.get("/admin/events?hz=10", headers=await bearer(api, "watcher", "watch"))
        kept = await api.http.get("/admin/events?hz=10", headers=await bearer(api, "other", "watch"))
        await api.server.revoke_key("watcher")
        for ended in (open_to_all, watching):
            async with asyncio.timeout(PATIENCE_S):
                assert "The API key is no longer valid" in (await ended.text()).splitlines()[-2]
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
        await told(keyed, "GET", "/v1/models", {"X-API-Key": key})
    assert len(compared) == 3
    assert {len(each) for pair in compared for each in pair} == {32}


async def test_a_made_key_s_hash_is_compared_in_constant_time(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = await bearer(keyed, "app", "use")
    compared: list[int] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(len(a)) or compare(a, b))
    assert (await told(keyed, "GET", "/v1/models", headers))[0] == 200
    assert compared == [32, 64]


async def test_what_a_key_did_is_counted(keyed: Served) -> None:
    headers = await bearer(keyed, "app", "use")
    for _ in range(2):
        await told(keyed, "POST", "/v1/completions", headers, **PROMPT)
    reading = next(key for key in keyed.server.report().keys if key.name == "app")
    assert (reading.requests, reading.prompt_tokens, reading.output_tokens) == (2, 2, 4)
    assert reading.last_used_at is not None


async def test_the_first_key_closes_a_server_that_was_open_and_the_last_opens_it_again(api: Served) -> None:
    assert (await told(api, "GET", "/metrics", {}))[0] == 200
    headers = await bearer(api, "app", "use")
    assert api.server.status().key_required
    assert (await told(api, "GET", "/v1/models", {}))[0] == 401
    assert (await told(api, "GET", "/v1/models", headers))[0] == 200
    await api.server.revoke_key("app")
    assert (await told(api, "GET", "/v1/models", {}))[0] == 200


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


async def test_a_server_whose_last_key_was_revoked_from_outside_lets_nobody_in(tmp_path: Path) -> None:
    outside = Keys(tmp_path / "state")
    key = outside.make("app", ("use",)).key
    async with serving(tmp_path, settings=ApiSettings(port=0, host="0.0.0.0", state_dir=tmp_path / "state")) as api:
        headers = {"Authorization": f"Bearer {key}"}
        assert (await told(api, "GET", "/v1/models", headers))[0] == 200
        outside.revoke("app")
        await until(lambda: not api.server.report().keys)
        for given in (headers, {}):
            assert (await told(api, "GET", "/v1/models", given))[0] == 401


async def test_keys_made_and_revoked_by_another_program_hold_without_a_restart(tmp_path: Path) -> None:
    outside = Keys(tmp_path / "state")
    kept = outside.make("kept", ("use",)).key
    async with serving(tmp_path, settings=ApiSettings(port=0, state_dir=tmp_path / "state")) as api:
        assert (await told(api, "GET", "/v1/models", {"X-API-Key": kept}))[0] == 200
        new = outside.make("new", ("use",)).key
        await until(lambda: len(api.server.report().keys) == 2)
        assert (await told(api, "GET", "/v1/models", {"X-API-Key": new}))[0] == 200
        outside.revoke("kept")
        await until(lambda: len(api.server.report().keys) == 1)
        assert (await told(api, "GET", "/v1/models", {"X-API-Key": kept}))[0] == 401
        assert (await told(api, "GET", "/v1/models", {"X-API-Key": new}))[0] == 200
