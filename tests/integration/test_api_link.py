"""`link.api` at a real runtime: keys that outlive it, an address that moves, and what is told of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from console.link.local import LocalLink
from console.link.protocol import EngineLink
from console.link.rpc import as_link
from console.runtime.loops import CurrentLoop
from console.runtime.runtime import Runtime
from console.settings.schema import Settings


@asynccontextmanager
async def linked(state: Path) -> AsyncIterator[EngineLink]:
    """A link to a runtime that listens and has no model."""
    runtime = Runtime(Settings(port=0), state_dir=state)
    await runtime.start()
    try:
        yield as_link(LocalLink(runtime, CurrentLoop()))
    finally:
        await runtime.close(drain_s=0.0)


async def status(link: EngineLink, key: str) -> int:
    """What the server answers to who asks for its models with that key."""
    address = f"{link.api_status().url}/v1/models"
    async with aiohttp.ClientSession() as http, http.get(address, headers={"X-API-Key": key}) as response:
        return response.status


async def test_keys_and_what_they_did_are_there_after_the_next_start(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        made = await link.api.make_key("app", ("use",))
        assert await status(link, made.key) == 200
        assert await status(link, "none") == 401
    async with linked(tmp_path) as link:
        assert link.api_status().key_required
        assert [(key.name, key.requests) for key in link.api.report().keys] == [("app", 1)]
        assert await status(link, made.key) == 200
        await link.api.revoke_key("app")
        assert not link.api_status().key_required


async def test_the_address_moves_and_the_report_goes_on(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        assert await status(link, "") == 200
        before = link.api_status().port
        await link.api.listen("127.0.0.1", 0)
        assert link.api_status().port != before
        await link.api.switch_dialect("openai", False)
        assert await status(link, "") == 404
        report = link.api.report()
        assert report.requests == 2
        assert [failure.code for failure in report.failures] == ["dialect_off"]
        await link.stop_api()
        assert not link.api_status().running
        await link.start_api()
        assert await status(link, "") == 404
