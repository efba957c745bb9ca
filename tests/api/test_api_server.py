"""ApiServer: starting, stopping, and what it says of itself."""

from __future__ import annotations

import asyncio
import math
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from console.api.http.errors import CannotListen
from console.api.server import ApiServer, ApiSettings
from engine.config import EngineConfig
from engine.engine import Engine
from tests.api.harness import Served, serving, until


def server_on(**settings: object) -> ApiServer:
    """A server of an engine that was never started."""
    return ApiServer(Engine(EngineConfig(worker_host="thread")), ApiSettings(**settings))  # type: ignore[arg-type]


async def test_port_zero_takes_a_free_one_and_says_which() -> None:
    server = server_on(port=0)
    assert not server.status().running
    await server.start()
    try:
        assert server.status().running
        assert server.status().port > 0
    finally:
        await server.stop()
    assert not server.status().running


async def test_a_taken_port_is_one_sentence_that_the_status_keeps() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = server_on(port=port)
        with pytest.raises(CannotListen, match=f"port {port}: port in use by another program"):
            await server.start()
    error = server.status().error
    assert error is not None
    assert str(port) in error.message
    await server.start()
    assert server.status().error is None
    await server.stop()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
async def test_a_host_that_is_not_ours_is_one_sentence(host: str) -> None:
    with pytest.raises(CannotListen, match=f"{host} is not an address of this machine"):
        await server_on(host=host, port=0, no_auth=True).start()


async def test_a_port_out_of_range_is_one_sentence() -> None:
    with pytest.raises(CannotListen, match="ports are 0 to 65535"):
        await server_on(port=70000).start()


async def test_it_can_be_started_and_stopped_again_and_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        for _ in range(3):
            await api.server.stop()
            await api.server.stop()
            await api.server.start()
            await api.server.start()
            async with aiohttp.ClientSession(api.url) as http, http.get("/ready") as response:
                assert response.status == 200


async def test_the_status_counts_requests_and_open_connections(api: Served) -> None:
    before = api.server.status().requests
    await api.post("/generate", prompt="x", max_tokens=1)
    await api.refusal("/generate", prompt=3)
    assert api.server.status().requests == before + 2
    assert api.server.status().connections == 1


async def test_stopping_lets_requests_under_way_end(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.post("/generate", prompt="x", max_tokens=3))
    await paced_api.until_row(state="prefill")
    stopping = asyncio.create_task(paced_api.server.stop(drain_s=20))
    paced_api.backend.gate.open()  # type: ignore[union-attr]
    assert len((await asking)["text"]) == 4
    await stopping


async def test_stopping_tells_those_that_it_cannot_wait_for(paced_api: Served) -> None:
    whole = asyncio.create_task(paced_api.refusal("/generate", status=503, prompt="x"))
    stream = asyncio.create_task(paced_api.events("/v1/completions", prompt="x"))
    await until(lambda: paced_api.engine.publish().running == 2)
    await paced_api.server.stop(drain_s=0.0)
    assert (await whole)["code"] == "engine_closed"
    assert [event["error"]["code"] for event in await stream] == ["engine_closed"]


async def test_a_drain_can_be_cut_short_by_stopping_again(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.refusal("/generate", status=503, prompt="x"))
    await paced_api.until_row(state="prefill")
    draining = asyncio.create_task(paced_api.server.stop(drain_s=1000))
    await paced_api.draining()
    draining.cancel()
    await paced_api.server.stop(drain_s=0.0)
    assert (await asking)["code"] == "engine_closed"
    assert paced_api.server.status().connections == 0


async def test_a_server_that_stops_says_so_and_refuses_what_is_new_until_the_last_request_has_ended(
    paced_api: Served,
) -> None:
    asking = asyncio.create_task(paced_api.post("/generate", prompt="x", max_tokens=3))
    await paced_api.until_row(state="prefill")
    stopping = asyncio.create_task(paced_api.server.stop(drain_s=math.inf))
    await paced_api.draining()
    status = paced_api.server.status()
    assert (status.running, status.stopping) == (True, True)
    assert (await paced_api.refusal("/generate", status=503, prompt="y"))["code"] == "engine_closed"
    paced_api.backend.gate.open()  # type: ignore[union-attr]
    assert len((await asking)["text"]) == 4
    await stopping
    status = paced_api.server.status()
    assert (status.running, status.stopping) == (False, False)


async def test_stopping_at_once_cuts_what_an_earlier_stop_waits_for(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.refusal("/generate", status=503, prompt="x"))
    await paced_api.until_row(state="prefill")
    stopping = asyncio.create_task(paced_api.server.stop(drain_s=math.inf))
    await paced_api.draining()
    await paced_api.server.stop(drain_s=0.0)
    await stopping
    assert (await asking)["code"] == "engine_closed"


async def test_an_api_that_stops_can_be_kept_on_while_its_requests_finish(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.post("/generate", prompt="x", max_tokens=3))
    await paced_api.until_row(state="prefill")
    stopping = asyncio.create_task(paced_api.server.stop(drain_s=math.inf, reason="api"))
    await paced_api.draining()
    await paced_api.server.start()
    assert await stopping is False
    status = paced_api.server.status()
    assert (status.running, status.stopping) == (True, False)
    paced_api.backend.gate.open()  # type: ignore[union-attr]
    assert len((await asking)["text"]) == 4
    assert (await paced_api.post("/generate", prompt="y", max_tokens=1))["text"]
    assert await paced_api.server.stop(drain_s=math.inf, reason="api") is True
    assert not paced_api.server.status().running


async def test_a_program_that_ends_is_not_kept_on(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.post("/generate", prompt="x", max_tokens=3))
    await paced_api.until_row(state="prefill")
    stopping = asyncio.create_task(paced_api.server.stop(drain_s=math.inf))
    await paced_api.draining()
    starting = asyncio.create_task(paced_api.server.start())
    await asyncio.sleep(0)
    assert paced_api.server.status().stopping
    paced_api.backend.gate.open()  # type: ignore[union-attr]
    assert len((await asking)["text"]) == 4
    assert await stopping is True
    await starting


async def test_a_stop_at_once_after_one_that_was_taken_back_cuts_as_ever(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.refusal("/generate", status=503, prompt="x"))
    await paced_api.until_row(state="prefill")
    stopping = asyncio.create_task(paced_api.server.stop(drain_s=math.inf, reason="api"))
    await paced_api.draining()
    await paced_api.server.start()
    assert await stopping is False
    assert await paced_api.server.stop(drain_s=0.0, reason="api") is True
    assert (await asking)["code"] == "api_stopping"


async def test_what_is_refused_while_the_api_is_switched_off_says_so_when_to_retry_and_in_an_alert(
    paced_api: Served,
) -> None:
    asking = asyncio.create_task(paced_api.post("/generate", prompt="x", max_tokens=3))
    await paced_api.until_row(state="prefill")
    stopping = asyncio.create_task(paced_api.server.stop(drain_s=math.inf, reason="api"))
    await paced_api.draining()
    async with paced_api.http.post("/v1/completions", json={"prompt": "y"}) as response:
        error = (await response.json())["error"]
        assert (response.status, response.headers["Retry-After"]) == (503, "30")
    assert (error["code"], error["message"]) == (
        "api_stopping",
        "The API is being switched off, new requests are refused",
    )
    assert paced_api.server.status().refused_per_min == 1
    (alert,) = paced_api.engine.alerts.latest
    assert "the API is being switched off" in alert.text
    paced_api.backend.gate.open()  # type: ignore[union-attr]
    await asking
    await stopping


async def test_what_a_draining_engine_refuses_is_counted_and_makes_an_alert(api: Served) -> None:
    await api.engine.drain()
    for _ in range(3):
        assert (await api.refusal("/generate", status=503, prompt="y"))["code"] == "draining"
    async with api.http.get("/ready") as response:
        assert response.status == 503
    assert api.server.status().refused_per_min == 3
    (alert,) = api.engine.alerts.latest
    assert (alert.count, alert.cause, alert.subject) == (3, "clients_refused", "engine")


async def test_a_stop_without_patience_leaves_no_haste_for_the_next_one(paced_api: Served) -> None:
    await paced_api.server.stop(drain_s=0.0)
    await paced_api.server.start()
    async with aiohttp.ClientSession(paced_api.url) as http:
        asking = asyncio.create_task(http.post("/generate", json={"prompt": "x", "max_tokens": 3}))
        await paced_api.until_row(state="prefill")
        stopping = asyncio.create_task(paced_api.server.stop(drain_s=math.inf))
        await until(lambda: paced_api.server.status().stopping)
        paced_api.backend.gate.open()  # type: ignore[union-attr]
        async with await asking as answer:
            assert answer.status == 200
        await stopping


async def test_clients_are_told_apart_by_address_key_and_program_however_many_connections_they_have(
    api: Served,
) -> None:
    async with (
        aiohttp.ClientSession(api.url, headers={"User-Agent": "loop"}) as one,
        aiohttp.ClientSession(api.url, headers={"User-Agent": "loop"}) as two,
        aiohttp.ClientSession(api.url, headers={"User-Agent": "other"}) as three,
    ):
        before = api.server.status()
        for session in (one, two, three):
            await (await session.get("/v1/models")).read()
        status = api.server.status()
    assert status.connections - before.connections == 3
    assert status.clients - before.clients == 2
    assert status.clients == len(api.server.report().clients)


async def test_starting_twice_at_once_listens_once(tmp_path: Path) -> None:
    async with serving(tmp_path, load=False) as api:
        await api.server.stop()
        await asyncio.gather(api.server.start(), api.server.start())
        assert api.server.status().error is None


async def test_a_server_that_drains_opens_no_websocket(paced_api: Served) -> None:
    api = paced_api
    asking = asyncio.create_task(api.post("/generate", prompt="x", max_tokens=2))
    await api.until_row(state="prefill")
    stopping = asyncio.create_task(api.server.stop(drain_s=60.0))
    await api.draining()
    with pytest.raises(aiohttp.WSServerHandshakeError) as no:
        await api.http.ws_connect("/api/v1/stream")
    assert no.value.status == 503
    assert api.backend.gate is not None
    api.backend.gate.open()
    await asyncio.gather(asking, stopping)


async def test_a_server_that_drains_refuses_new_work_and_goes_on_telling_how_it_is(paced_api: Served) -> None:
    api = paced_api
    asking = asyncio.create_task(api.post("/generate", prompt="x", max_tokens=1))
    await api.until_row(state="prefill")
    stopping = asyncio.create_task(api.server.stop(drain_s=20))
    await api.draining()
    assert api.server.status().running
    async with aiohttp.ClientSession(api.url) as newcomer, newcomer.post("/generate", json={"prompt": "y"}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "engine_closed"
    assert (await api.get("/health"))["status"] == "draining"
    await api.get("/ready", status=503)
    await api.get("/v1/models")
    assert api.backend.gate is not None
    api.backend.gate.open()
    assert len((await asking)["text"]) == 2
    await stopping
    assert not api.server.status().running


def test_the_api_loads_neither_textual_nor_torch() -> None:
    code = "import console.api.server, sys; print([m for m in ('textual', 'torch', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
