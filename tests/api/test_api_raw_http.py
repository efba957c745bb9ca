"""HTTP byte by byte: bodies that are too long, cut short or packed in unknown ways, and requests that are no HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from console.api.http import request_body
from console.api.server import ApiSettings
from tests.api.harness import PATIENCE_S, Served, bearer, serving, told, until

LIMIT = 4096
BODY = json.dumps({"prompt": "x" * 500, "max_tokens": 2}).encode()
PACKED = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY),
    "GZip": gzip.compress(BODY),
    "deflate": zlib.compress(BODY),
    "deflate without its header": zlib.compress(BODY)[2:-4],
    "identity": BODY,
}


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that takes bodies of 4 KiB, and waits for them as long as the test does."""
    async with serving(tmp_path, settings=ApiSettings(port=0, max_body_bytes=LIMIT, body_timeout_s=1e6)) as api:
        yield api


async def exchanged(api: Served, sent: bytes) -> tuple[bytes, dict[str, str], bytes]:
    """The first line of the answer to these bytes, its headers and its body; the connection stays open meanwhile."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.status().port)
    try:
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            lines = head.split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
            return lines[0].encode(), headers, await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()


def head(path: str = "/generate", method: str = "POST", version: str = "1.1", **headers: object) -> bytes:
    """The head of a request."""
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("expects", [False, True])
async def test_a_length_that_is_declared_and_too_long_is_refused_before_the_body_comes(
    small: Served, expects: bool
) -> None:
    headers = {"Expect": "100-continue"} if expects else {}
    status, told, body = await exchanged(small, head(Content_Length=10**11, **headers) + (b"" if expects else b"{"))
    assert status == b"HTTP/1.1 413 Request Entity Too Large"
    assert told["connection"] == "close"
    assert json.loads(body)["error"]["code"] == "body_too_large"
    assert str(LIMIT) in json.loads(body)["error"]["message"]


async def test_who_may_not_ask_is_told_before_the_body_comes(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, api_key="k", body_timeout_s=1e6)) as api:
        status, told, _ = await exchanged(api, head(Content_Length=100, Expect="100-continue"))
    assert (status, told["connection"]) == (b"HTTP/1.1 401 Unauthorized", "close")


async def test_who_waits_for_leave_to_send_gets_it_and_an_answer(small: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.server.status().port)
    writer.write(head(Content_Length=len(BODY), Expect="100-Continue", Connection="close"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_an_expectation_that_is_unknown_is_a_417_that_names_it(small: Served) -> None:
    status, _, body = await exchanged(small, head(Content_Length=len(BODY), Expect="a-miracle") + BODY)
    assert status == b"HTTP/1.1 417 Expectation Failed"
    assert json.loads(body)["error"]["message"] == "Expect is a-miracle; only 100-continue is supported"


async def test_no_interim_answer_is_sent_to_clients_of_an_older_http(small: Served) -> None:
    sent = head(version="1.0", Content_Length=len(BODY), Expect="100-continue") + BODY
    status, _, _ = await exchanged(small, sent)
    assert status == b"HTTP/1.0 200 OK"


@pytest.mark.parametrize("name", PACKED)
async def test_a_packed_body_is_unpacked(small: Served, name: str) -> None:
    packed = PACKED[name]
    headers = {"Content-Encoding": name.partition(" ")[0], "Content-Type": "application/json"}
    async with small.http.post("/generate", data=packed, headers=headers) as response:
        assert response.status == 200, await response.text()
    assert bytes(small.backend.submitted[-1].prompt_ids) == b"x" * 500


@pytest.mark.parametrize("name", ["gzip", "deflate", "deflate without its header"])
@pytest.mark.parametrize("kept", [1, 5, -1, -9])
async def test_a_packed_body_that_is_cut_short_is_said_to_be(small: Served, name: str, kept: int) -> None:
    encoding = name.partition(" ")[0]
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with small.http.post("/generate", data=PACKED[name][:kept], headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"] == f"The {encoding} body is truncated"


@pytest.mark.parametrize("name", ["gzip", "deflate"])
async def test_a_body_that_is_not_packed_as_it_says_is_said_to_be_broken(small: Served, name: str) -> None:
    headers = {"Content-Encoding": name, "Content-Type": "application/json"}
    for wrong, more in ((b"x no such thing", ""), (PACKED[name] + b"more", ": there is data after its end")):
        async with small.http.post("/generate", data=wrong, headers=headers) as response:
            assert response.status == 400, wrong
            assert (await response.json())["error"]["message"] == f"The body is not valid {name}{more}"


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "nonsense"])
async def test_an_encoding_that_is_unknown_is_a_415_that_names_those_that_are(small: Served, encoding: str) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with small.http.post("/generate", data=b"{}", headers=headers) as response:
        assert response.status == 415
        assert response.headers["Accept-Encoding"] == "gzip, deflate"
        told = (await response.json())["error"]["message"]
    assert told == f"Content-Encoding {encoding} is not supported: send gzip, deflate or none"


NO_HTTP = {
    "bytes": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "a bare line feed": b"GET /version HTTP/1.1\nHost: localhost\n\n",
    "two lengths": head(Content_Length=5)[:-2] + b"Content-Length: 6\r\n\r\n",
    "a length that is none": head(Content_Length="+5"),
    "a line that is too long": head(path="/" + "a" * 20_000, method="GET"),
    "a header that is too long": head(X="a" * 20_000),
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP)
async def test_what_is_refused_before_it_is_routed_is_answered_in_the_http_of_today(small: Served, sent: bytes) -> None:
    status, told, body = await exchanged(small, sent)
    assert status.startswith(b"HTTP/1.1 4")
    assert told["connection"] == "close"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def half_sent(headers: dict[str, str], sent: int) -> bytes:
    """A request and some bytes of its body, which has a few more."""
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    body = b'{"prompt": "x", "max_tokens": 1' + b" " * (sent - 31)
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {sent + 1}\r\n\r\n".encode() + body
    )


async def test_one_client_s_bodies_may_take_so_much_memory_and_those_of_others_as_much(
    keyed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "max_client_bytes", lambda request: 100_000)
    alice, bob = await bearer(keyed, "alice", "use"), await bearer(keyed, "bob", "use")
    port = keyed.server.status().port
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
    for (_, writer), headers in zip(streams, (alice, alice, alice, bob), strict=True):
        writer.write(half_sent(headers, 40_000))
    reader, writer = streams[2]
    assert b" 429 " in await reader.readline()
    for reader, writer in (streams[0], streams[3]):
        writer.write(b"}")
        assert b" 200 " in await reader.readline()
    await told(keyed, "POST", "/v1/completions", alice, prompt="x" * 3000, max_tokens=1)
    for _, writer in streams:
        writer.close()


async def test_a_body_that_became_a_prompt_takes_nothing_of_what_its_client_may_have(
    paced_api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "max_client_bytes", lambda request: 5000)
    asked = [asyncio.create_task(paced_api.post("/v1/completions", prompt="x" * 3000, max_tokens=1)) for _ in range(3)]
    await until(lambda: len(paced_api.engine._tracker.live) == 3)
    assert paced_api.backend.gate is not None
    paced_api.backend.gate.open()
    await asyncio.gather(*asked)


async def test_what_a_body_unpacks_to_counts(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "max_client_bytes", lambda request: 5000)
    packed = gzip.compress(b'{"prompt": "x", "max_tokens": 1' + b" " * 5000 + b"}")
    async with api.http.post("/v1/completions", data=packed, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 429
        assert "together exceed 5000 bytes" in await response.text()


async def test_websockets_that_wait_for_a_message_count_for_their_client(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_body_bytes=LIMIT)) as api:
        sockets = [await api.http.ws_connect("/api/v1/stream") for _ in range(request_body.MAX_CLIENT_BODIES)]
        async with api.http.ws_connect("/api/v1/stream") as refused:
            message = await refused.receive_json()
        assert (message["event"], message["error"]["code"]) == ("error", "rate_limited")
        await sockets[0].send_json({"prompt": "x", "max_new_tokens": 1})
        assert (await sockets[0].receive_json())["event"] == "text_stream"
        for socket in sockets:
            await socket.close()
