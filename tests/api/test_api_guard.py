"""Who is turned away whatever they ask: names pointed at loopback, pages from elsewhere, who asks too often."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.web_request import BaseRequest

from console.api import app
from console.api.http import keys
from console.api.http.limits import AddressLimiter, KeyLimiter
from console.api.server import ApiSettings
from console.link.api import KeyLimits
from tests.api.harness import PROMPT, Served, serving, told, until
from tests.api.operators import FolderOperator

PAGE = "https://chat.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def cors_of(response: aiohttp.ClientResponse) -> dict[str, str]:
    """The headers that say which pages may read an answer."""
    return {name: value for name, value in response.headers.items() if name.startswith("Access-Control-")}


async def code(api: Served, method: str, path: str, headers: dict[str, str], **body: Any) -> tuple[int, str | None]:
    """Status, and the code of the error."""
    async with api.http.request(method, path, headers=headers, json=body or None) as response:
        found = await response.json() if response.content_type == "application/json" else {}
        return response.status, found.get("error", {}).get("code")


# -- the name that is asked for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "a b"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/generate"), ("GET", "/health")])
async def test_a_name_that_was_pointed_at_loopback_is_refused(api: Served, host: str, method: str, path: str) -> None:
    assert await code(api, method, path, {"Host": host}) == (421, "misdirected")
    assert api.engine.publish().totals.requests == 0


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.1.2.3:1", "[::1]:8000", "me.localhost"]
)
async def test_loopback_s_own_names_are_taken(api: Served, host: str) -> None:
    assert await code(api, "GET", "/v1/models", {"Host": host}) == (200, None)


@pytest.mark.parametrize(
    "sent",
    [
        "GET /version HTTP/1.1\r\nHost:\r\n",
        "GET /version HTTP/1.1\r\nHost: \r\n",
        "GET http://evil.example/version HTTP/1.1\r\nHost: localhost\r\n",
        "GET http://localhost/version HTTP/1.1\r\nHost: evil.example\r\n",
        "GET http://evil.example/version HTTP/1.0\r\n",
    ],
)
async def test_an_empty_name_and_another_one_in_the_address_are_refused(api: Served, sent: str) -> None:
    assert await answered(api, f"{sent}Connection: close\r\n\r\n") == b"421"


@pytest.mark.parametrize("host", ["Host: localhost\r\n", ""])
async def test_an_address_that_names_loopback_is_taken(api: Served, host: str) -> None:
    sent = f"GET http://127.0.0.1:8000/version HTTP/1.0\r\n{host}Connection: close\r\n\r\n"
    assert await answered(api, sent) == b"200"


async def answered(api: Served, sent: str) -> bytes:
    """The status of the answer to a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.status().port)
    writer.write(sent.encode())
    status = (await reader.read()).split()[1]
    writer.close()
    return status


async def test_a_name_that_is_no_text_is_refused_and_spoils_no_report(api: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.status().port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: \xff\r\nConnection: close\r\n\r\n")
    status, _, rest = (await reader.read()).partition(b"\r\n")
    writer.close()
    assert status.split()[1] == b"421"
    assert rb"Host \\udcff is not allowed" in rest
    assert r"Host \\udcff is not allowed" in msgspec.json.encode(api.server.report()).decode()


async def test_a_name_that_the_settings_know_is_taken_and_no_other(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, allowed_hosts=("llm.home",))
    async with serving(tmp_path, settings=settings, load=False) as api:
        assert (await code(api, "GET", "/v1/models", {"Host": "LLM.home:8000"}))[0] == 200
        assert (await code(api, "GET", "/v1/models", {"Host": "other.home"}))[0] == 421


async def test_beyond_loopback_any_name_will_do(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, host="0.0.0.0", no_auth=True)
    async with serving(tmp_path, settings=settings, load=False) as api:
        assert (await code(api, "GET", "/v1/models", {"Host": "llm.example"}))[0] == 200


# -- pages --------------------------------------------------------------------------------------------------------


async def test_no_page_from_elsewhere_may_ask_or_read(api: Served) -> None:
    for method, path, headers in (
        ("OPTIONS", "/v1/completions", PREFLIGHT),
        ("POST", "/v1/completions", {"Origin": PAGE}),
        ("POST", "/v1/completions", {"Origin": "null"}),
        ("GET", "/v1/models", {"Origin": PAGE, "Upgrade": "websocket"}),
    ):
        async with api.http.request(method, path, headers=headers, json=PROMPT) as response:
            assert response.status == 403, (method, headers)
            assert not cors_of(response)
    async with api.http.get("/v1/models", headers={"Origin": PAGE}) as response:
        assert response.status == 200
        assert not cors_of(response)
    assert api.engine.publish().totals.requests == 0


async def test_a_program_on_this_machine_that_names_no_host_may_do_all(tmp_path: Path) -> None:
    async with serving(tmp_path, operator=FolderOperator(tmp_path), load=False) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.server.status().port)
        writer.write(b"GET /admin/models HTTP/1.0\r\n\r\n")
        assert (await reader.read()).split()[1] == b"200"
        writer.close()


async def test_a_page_of_our_own_may_ask(api: Served) -> None:
    host = api.url.removeprefix("http://")
    assert (await code(api, "POST", "/v1/completions", {"Origin": api.url, "Host": host}, **PROMPT))[0] == 200


async def test_pages_that_the_settings_name_may_ask_and_read_and_no_others(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, api_key="k", cors_origins=(PAGE,))
    async with serving(tmp_path, settings=settings) as api:
        async with api.http.options("/v1/completions", headers=PREFLIGHT) as response:
            assert response.status == 204
            shared = cors_of(response)
            assert shared["Access-Control-Allow-Origin"] == PAGE
            assert "POST" in shared["Access-Control-Allow-Methods"]
            assert "authorization" in shared["Access-Control-Allow-Headers"].lower()
            assert "Access-Control-Allow-Credentials" not in shared
            assert response.headers["Vary"] == "Origin"
        for stream in (False, True):
            headers = {"Origin": PAGE, "Authorization": "Bearer k"}
            async with api.http.post("/v1/completions", headers=headers, json={**PROMPT, "stream": stream}) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        other = {**PREFLIGHT, "Origin": "https://evil.example"}
        async with api.http.options("/v1/completions", headers=other) as response:
            assert (response.status, cors_of(response)) == (403, {})
            assert response.headers["Vary"] == "Origin"
        async with api.http.post("/v1/completions", headers={"Origin": PAGE}, json=PROMPT) as response:
            assert response.status == 401  # and the page may read why
            assert response.headers["Access-Control-Allow-Origin"] == PAGE


async def test_a_star_lets_every_page_in_without_any_cookie(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, settings=ApiSettings(port=0, cors_origins=("*",))) as api,
        api.http.options("/generate", headers=PREFLIGHT) as response,
    ):
        assert cors_of(response)["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Credentials" not in response.headers


async def test_no_page_from_elsewhere_opens_a_websocket_and_a_program_may(api: Served) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as no:
        await api.http.ws_connect("/api/v1/stream", origin=PAGE)
    assert no.value.status == 403
    async with api.http.ws_connect("/api/v1/stream", origin=api.url) as socket:
        assert not socket.closed


# -- how often ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def still_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of limits stands still: nothing refills while a test asks."""
    monkeypatch.setattr(keys, "KeyLimiter", lambda limits, clock: KeyLimiter(limits, lambda: 1000.0))
    monkeypatch.setattr(app, "AddressLimiter", lambda per_min, clock: AddressLimiter(per_min, lambda: 1000.0))


async def limited(api: Served, **limits: int) -> dict[str, str]:
    """The headers of a new key with these limits."""
    made = await api.server.make_key(f"k{len(api.server.report().keys)}", ("use",), KeyLimits(**limits))
    return {"X-API-Key": made.key}


async def refused(api: Served, headers: dict[str, str], path: str = "/v1/completions") -> tuple[str, int]:
    """The sentence and the Retry-After of a 429."""
    async with api.http.post(path, json=PROMPT, headers=headers) as response:
        assert response.status == 429
        error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limited")
        return error["message"], int(response.headers["Retry-After"])


async def test_a_key_that_asks_too_often_is_told_when_to_come_back(api: Served) -> None:
    headers, other = await limited(api, requests_per_min=3), await limited(api)
    for _ in range(3):
        assert (await told(api, "POST", "/v1/completions", headers, **PROMPT))[0] == 200
    sentence, wait_s = await refused(api, headers)
    assert sentence.startswith("Limit of key k0: 3 requests per minute")
    assert wait_s == 20
    assert (await told(api, "GET", "/v1/models", headers))[0] == 200
    assert (await told(api, "POST", "/v1/completions", other, **PROMPT))[0] == 200


async def test_a_key_that_used_its_tokens_waits_until_they_are_made_up_for(api: Served) -> None:
    headers = await limited(api, tokens_per_min=2)  # a prompt of one and an answer of two
    assert (await told(api, "POST", "/v1/completions", headers, **PROMPT))[0] == 200
    sentence, wait_s = await refused(api, headers)
    assert "k0: 2 tokens per minute" in sentence
    assert wait_s == 30


async def test_a_key_has_so_many_requests_under_way_and_no_more(paced_api: Served) -> None:
    api = paced_api
    headers = await limited(api, concurrent=1)
    first = asyncio.create_task(told(api, "POST", "/v1/completions", headers, **PROMPT))
    await api.until_row(state="prefill")
    sentence, wait_s = await refused(api, headers)
    assert "k0: 1 concurrent requests" in sentence
    assert wait_s == 1
    assert api.backend.gate is not None
    api.backend.gate.open()
    assert (await first)[0] == 200
    assert (await told(api, "POST", "/v1/completions", headers, **PROMPT))[0] == 200


async def test_a_websocket_takes_a_place_of_its_key_s(api: Served) -> None:
    headers = await limited(api, concurrent=1)
    async with api.http.ws_connect("/api/v1/stream", headers=headers):
        await refused(api, headers)
    await until(lambda: api.server.report().under_way == 0)
    assert (await told(api, "POST", "/v1/completions", headers, **PROMPT))[0] == 200


async def test_a_client_that_leaves_gives_its_place_back(paced_api: Served) -> None:
    headers = await limited(paced_api, concurrent=1)
    first = asyncio.create_task(told(paced_api, "POST", "/v1/completions", headers, **PROMPT))
    await paced_api.until_row(state="prefill")
    first.cancel()
    await until(lambda: paced_api.server.report().under_way == 0)
    assert paced_api.backend.gate is not None
    paced_api.backend.gate.open()
    assert (await told(paced_api, "POST", "/v1/completions", headers, **PROMPT))[0] == 200


async def test_an_address_beyond_this_machine_that_asks_too_often_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ApiSettings(port=0, api_key="k", address_rate=2)
    async with serving(tmp_path, settings=settings, load=False) as api:
        for _ in range(5):
            assert (await told(api, "GET", "/v1/models", {}))[0] == 401
        monkeypatch.setattr(BaseRequest, "remote", "203.0.113.7")
        for _ in range(2):  # wrong keys count, too
            assert (await told(api, "GET", "/v1/models", {"X-API-Key": "guess"}))[0] == 401
        status, sentence = await told(api, "GET", "/v1/models", {"X-API-Key": "k"})
        assert (status, sentence.startswith("Limit per address: 2 requests per minute")) == (429, True)
        assert (await told(api, "GET", "/health", {}))[0] == 200
        monkeypatch.setattr(BaseRequest, "remote", "203.0.113.8")
        assert (await told(api, "GET", "/v1/models", {"X-API-Key": "k"}))[0] == 200


async def test_one_who_has_many_addresses_of_the_newer_kind_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, address_rate=1), load=False) as api:
        found = []
        for address in ("2001:db8::1", "2001:db8::2", "2001:db8:1::1"):
            monkeypatch.setattr(BaseRequest, "remote", address)
            found.append((await told(api, "GET", "/v1/models", {}))[0])
    assert found == [200, 429, 200]
