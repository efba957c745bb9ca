"""Who a client is behind a proxy: whoever a trusted one says asked it, for log, limits and fairness; else the peer."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

import pytest

from console.api.server import ApiSettings
from console.settings.sources import load_settings
from engine.errors import InvalidRequest
from tests.api.harness import serving

TRUSTED = tuple(map(ipaddress.ip_network, ("127.0.0.1", "10.0.0.0/8", "2001:db8::/32")))
CLIENT = "203.0.113.7"


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ((CLIENT,), CLIENT),
        ((f"{CLIENT}:4711",), CLIENT),
        (("[2001:db9::1]:4711",), "2001:db9::1"),
        (("::ffff:203.0.113.7",), CLIENT),
        ((f"198.51.100.1, {CLIENT}",), CLIENT),
        ((f"{CLIENT}, 10.1.2.3,2001:db8::5",), CLIENT),
        ((CLIENT, "10.1.2.3"), CLIENT),
        (("10.1.2.3",), "10.1.2.3"),
        ((f"{CLIENT}, unknown",), "127.0.0.1"),
        ((f"{CLIENT}, unknown, 10.1.2.3",), "10.1.2.3"),
        ((f"{CLIENT}, ",), "127.0.0.1"),
        ((",,,,",), "127.0.0.1"),
        ((), "127.0.0.1"),
    ],
)
async def test_a_trusted_proxy_says_who_asks_and_nobody_before_it(
    tmp_path: Path, forwarded: tuple[str, ...], client: str
) -> None:
    log = tmp_path / "access.jsonl"
    settings = ApiSettings(port=0, access_log=str(log), trusted_proxies=TRUSTED)
    async with serving(tmp_path, settings=settings) as api:
        headers = [("X-Forwarded-For", each) for each in forwarded]
        async with api.http.get("/v1/models", headers=headers) as response:
            assert response.status == 200
    assert json.loads(log.read_text())["client"] == client


async def test_nobody_else_is_believed(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    settings = ApiSettings(port=0, access_log=str(log), trusted_proxies=TRUSTED[1:])
    async with serving(tmp_path, settings=settings) as api:
        await api.get("/v1/models", headers={"X-Forwarded-For": CLIENT})
    assert json.loads(log.read_text())["client"] == "127.0.0.1"


async def test_each_client_behind_a_proxy_has_the_requests_of_an_address(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, address_rate=1, trusted_proxies=TRUSTED)
    async with serving(tmp_path, settings=settings) as api:
        for client in (CLIENT, "203.0.113.8"):
            await api.get("/v1/models", headers={"X-Forwarded-For": client})
            await api.get("/v1/models", status=429, headers={"X-Forwarded-For": client})
        reported = {client.address for client in api.server.report().clients}
    assert {CLIENT, "203.0.113.8"} <= reported


def test_what_is_neither_an_address_nor_a_network_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"10\.0\.0\.1/8 is not an address or network"):
        load_settings({"trusted_proxies": "127.0.0.1,10.0.0.1/8"}, env={}, file=Path("nowhere.toml"))
