"""Fixtures of the API tests."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from console.api.server import ApiSettings
from tests.api.harness import Served, serving
from tests.api.operators import FolderOperator
from tests.fakes.backend import FakeBackend, Gate


@pytest.fixture(autouse=True)
def no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose answer takes a second to begin, as on a busy machine, says so in comments; here only where a test
    asks for them."""
    monkeypatch.setattr("console.api.requests.stream.COMMENT_S", 3600.0)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose model answers at once."""
    async with serving(tmp_path) as served:
        yield served


@pytest.fixture
async def paced_api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose backend steps only as often as the test allows."""
    async with serving(tmp_path, FakeBackend(gate=Gate())) as served:
        yield served


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


@pytest.fixture
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks anybody but this machine fails: a name that is looked up, or an address that is asked."""
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def local_look_up(host: Any, *others: Any, **more: Any) -> Any:
        _check_local(host)
        return look_up(host, *others, **more)

    def local_connect(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple):
            _check_local(address[0])
        connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", local_look_up)
    monkeypatch.setattr(socket.socket, "connect", local_connect)


def _check_local(host: str | bytes | None) -> None:
    name = host.decode() if isinstance(host, bytes) else host or "localhost"
    try:
        local = ipaddress.ip_address(name).is_loopback
    except ValueError:
        local = name == "localhost"
    assert local, f"{name} was asked"
