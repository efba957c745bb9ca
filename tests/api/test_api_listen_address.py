"""The address: moved while requests run, taken, refused without a key."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import threading
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from console.api.http.errors import CannotListen, Unprotected
from console.api.http.listening import Address, Listener
from console.api.server import ApiSettings
from console.settings.sources import load_settings
from engine.errors import InvalidRequest
from tests.api.harness import PATIENCE_S, PROMPT, Served, bearer, serving, told


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
        pytest.raises(CannotListen, match=r"port in use by another program.* Still listening on 127\.0\.0\.1") as no,
    ):
        await api.server.listen("127.0.0.1", taken.getsockname()[1])
    assert no.value.message.count("\n") == 0
    assert api.server.status() == before
    await api.get("/ready")


async def test_an_address_that_cannot_be_had_puts_the_old_one_back(unlocked: Served) -> None:
    api = unlocked
    before = api.server.status()
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1 is not an address of this machine.*Still listening"):
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
            assert await told(api, "GET", "/v1/models", {"X-API-Key": key or ""}) == (200, "")
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


# -- a socket in the file system, and both versions of IP -----------------------------------------------------------


async def asked(path: Path, url: str = "http://localhost/ready") -> int:
    """The status of an answer through a socket in the file system."""
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http, http.get(url) as response:
        return response.status


async def test_it_listens_at_a_socket_that_others_cannot_open_and_takes_it_away(api: Served, tmp_path: Path) -> None:
    path = tmp_path / "ericllm.sock"
    before = api.url
    await api.server.listen(f"unix:{path}", 8000)
    assert (api.url, api.server.status().is_open) == (f"unix:{path}", False)
    assert path.stat().st_mode & 0o777 == 0o660
    assert await asked(path) == 200
    assert await asked(path, "http://elsewhere.example/ready") == 421
    assert api.server.report().clients[0].address == "unix"
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{before}/ready")
    await api.server.listen("127.0.0.1", 0)
    assert not path.exists()
    await api.server.listen(f"unix:{path}", 0)
    await api.server.stop()
    assert not path.exists()


async def test_a_socket_that_a_dead_server_left_is_replaced_and_nothing_else(api: Served, tmp_path: Path) -> None:
    path = tmp_path / "ericllm.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    await api.server.listen(f"unix:{path}", 0)
    assert await asked(path) == 200
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other.sock"))
        other.listen()
        (tmp_path / "file").write_text("precious")
        (tmp_path / "link").symlink_to(path)
        for name, reason in {
            "other.sock": "socket in use by another program; choose another file",
            "file": "the file exists and is not a socket",
            "link": "the file exists and is not a socket",
            "none/x.sock": f"there is no folder {tmp_path}/none",
        }.items():
            with pytest.raises(
                CannotListen, match=rf"^Cannot listen on unix:\S+: {reason}( with --host)?\. Still listening"
            ):
                await api.server.listen(f"unix:{tmp_path}/{name}", 0)
    assert (tmp_path / "file").read_text() == "precious"
    assert await asked(path) == 200


async def test_a_server_leaves_the_socket_that_another_one_put_in_the_place_of_its_own(
    api: Served, tmp_path: Path
) -> None:
    path = tmp_path / "ericllm.sock"
    await api.server.listen(f"unix:{path}", 0)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        await api.server.stop()
        assert path.exists()


async def test_of_two_servers_that_find_an_abandoned_socket_at_once_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ericllm.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    ended: list[str] = []
    waits = threading.Event()
    lock, unlink = fcntl.flock, Path.unlink

    async def listen() -> None:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        try:
            await Listener(runner).open(Address(f"unix:{path}", 0))
        except CannotListen as error:
            ended.append(error.message)
        else:
            ended.append("listens")
            await runner.cleanup()
        waits.set()

    def locking(file: int, how: int) -> None:
        try:
            lock(file, how)
        except BlockingIOError:
            waits.set()
            raise

    def unlinking(file: Path, missing_ok: bool = False) -> None:
        if not second.ident:
            second.start()
            waits.wait()
        unlink(file, missing_ok)

    second = threading.Thread(target=lambda: asyncio.run(listen()))
    monkeypatch.setattr(fcntl, "flock", locking)
    monkeypatch.setattr(Path, "unlink", unlinking)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await Listener(runner).open(Address(f"unix:{path}", 0))
    await asyncio.to_thread(second.join)
    assert ended == [f"Cannot listen on unix:{path}: socket in use by another program; choose another file with --host"]
    await runner.cleanup()


async def test_a_folder_that_another_program_has_locked_is_not_waited_for_for_ever(api: Served, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(CannotListen, match="the folder is locked by another program"):
            await api.server.listen(f"unix:{tmp_path}/s", 0)
    finally:
        os.close(folder)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("unix:", "a socket needs a path"),
        ("unix:/" + "x" * 107, "the path of a socket has max 107 bytes"),
        ("127.0.0.1:8000", "the port is a separate setting"),
        ("http://127.0.0.1", "without scheme or path"),
        (" ", "enter an address"),
        ("foo bar", "not an address or host name"),
    ],
)
async def test_what_is_no_address_is_refused_by_what_it_lacks(api: Served, host: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await api.server.listen(host, 0)
    with pytest.raises(InvalidRequest, match=f"--host.*{reason}"):
        load_settings({"host": host})


@pytest.mark.parametrize(
    ("typed", "taken"),
    [("[::1]", "::1"), (" localhost ", "localhost"), ("::ffff:127.0.0.1", "127.0.0.1"), ("[::]", "::"), ("*", "*")],
)
def test_an_address_is_taken_as_it_is_written_in_a_url(typed: str, taken: str) -> None:
    assert load_settings({"host": typed}).host == taken


async def test_a_socket_whose_server_takes_no_more_connections_is_in_use_and_not_waited_for(
    api: Served, tmp_path: Path
) -> None:
    path = str(tmp_path / "busy.sock")
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as queued:
        busy.bind(path)
        busy.listen(0)
        queued.connect(path)
        with socket.socket(socket.AF_UNIX) as refused, pytest.raises(BlockingIOError):
            refused.setblocking(False)
            refused.connect(path)
        with pytest.raises(CannotListen, match="in use by another program"):
            await api.server.listen(f"unix:{path}", 0)


async def test_a_proxy_at_a_socket_is_trusted_where_one_at_loopback_is(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for proxies, client in (((), "unix"), ((ipaddress.ip_network("127.0.0.1"),), "203.0.113.7")):
        settings = ApiSettings(port=0, trusted_proxies=proxies)
        async with serving(tmp_path, settings=settings) as api:
            await api.server.listen(f"unix:{path}", 0)
            connector = aiohttp.UnixConnector(str(path))
            headers = {"X-Forwarded-For": "203.0.113.7"}
            async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
                await http.get("http://localhost/v1/models")
            assert [each.address for each in api.server.report().clients] == [client]


async def test_every_address_of_both_versions_of_ip_is_one_star(unlocked: Served) -> None:
    await unlocked.server.listen("*", 0)
    port = unlocked.server.status().port
    async with aiohttp.ClientSession() as http:
        for host in ("127.0.0.1", "[::1]"):
            async with http.get(f"http://{host}:{port}/ready") as response:
                assert response.status == 200
    assert {each.address for each in unlocked.server.report().clients} >= {"127.0.0.1", "::1"}


async def test_a_machine_without_ipv6_listens_on_all_that_it_has(
    unlocked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = socket.create_server

    def without(address: tuple[str, int], *, family: int = socket.AF_INET, **options: object) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no such family")
        return create(address)

    monkeypatch.setattr(socket, "create_server", without)
    await unlocked.server.listen("*", 0)
    url = f"http://127.0.0.1:{unlocked.server.status().port}/ready"
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        assert response.status == 200


async def test_everywhere_needs_a_key_and_a_socket_none(api: Served, tmp_path: Path) -> None:
    with pytest.raises(Unprotected, match=r"Not listening on \* port 0 without a key"):
        await api.server.listen("*", 0)
    await api.server.listen(f"unix:{tmp_path}/s", 0)
    assert api.server.status().running
