"""A sampler in a folder of its own, from request to token: `python -m tests.integration.added_sampler FOLDER MODEL`.

Prints as JSON what requests, the chat's form, the documentation and the backends make of its parameter. It needs an
interpreter of its own, for samplers are found when the engine is imported.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import engine.samplers

engine.samplers.__path__.append(sys.argv[1])

import aiohttp  # noqa: E402
from textual.widgets import Input  # noqa: E402

from console.api.server import ApiServer, ApiSettings  # noqa: E402
from console.tui.screens.chat.settings import ChatSettingsScreen  # noqa: E402
from engine.backends.parameters import refuse_lacking  # noqa: E402
from engine.config import EngineConfig, ModelSpec, SamplingParams  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.errors import InvalidRequest  # noqa: E402
from tests.fakes.link import FakeLink  # noqa: E402
from tests.ui.chatting import ask, console, ended, opened  # noqa: E402
from tests.ui.seen import until  # noqa: E402
from tools.docs_pages.parameters import page  # noqa: E402
from tools.docs_pages.sampling import table  # noqa: E402

PROMPT = {"prompt": "hello", "model": "tiny"}
TALK = {"messages": [{"role": "user", "content": "hello"}], "model": "tiny", "max_tokens": 4}
DIALECTS: dict[str, Any] = {
    "/v1/completions": {**PROMPT, "top_n_sigma": -1},
    "/v1/chat/completions": {**TALK, "top_n_sigma": -1},
    "/v1/messages": {**TALK, "top_n_sigma": -1},
    "/generate": {**PROMPT, "top_n_sigma": -1},
    "/api/latest/generate": {"prompt": "hello", "top_n_sigma": -1},
    "/api/generate": {**PROMPT, "stream": False, "options": {"top_n_sigma": -1}},
}
"""A value out of range, as each dialect takes it."""


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """The torch backend behind the whole API."""
    engine = Engine(EngineConfig(worker_host="thread"))
    server = ApiServer(engine, ApiSettings(port=0))
    await engine.start()
    try:
        await engine.load(ModelSpec(path=model, name="tiny", threads=1, kv_cache_tokens=2048, dtype="float32"))
        await server.start()
        async with aiohttp.ClientSession(server.status().url) as http:
            yield http
    finally:
        await server.stop(drain_s=0.0)
        await engine.close(drain_s=0.0)


async def requests(model: Path) -> dict[str, Any]:
    """Texts by the parameter, and what each dialect says of a value out of range."""
    async with served(model) as http:

        async def text(**fields: Any) -> str:
            body = {**PROMPT, "max_tokens": 12, "ignore_eos": True, "seed": 1, **fields}
            async with http.post("/v1/completions", json=body) as response:
                answer = await response.json()
                return str(answer["choices"][0]["text"])

        refusals = {}
        for path, body in DIALECTS.items():
            async with http.post(path, json=body) as response:
                refusals[path] = [response.status, await response.text()]
        return {
            "greedy": await text(temperature=0.0),
            "drawn": await text(temperature=5.0),
            "neutral": await text(temperature=5.0, nsigma=0.0),
            "narrow": await text(temperature=5.0, nsigma=1e-6),
            "by_alias": await text(temperature=5.0, top_n_sigma=1e-6),
            "half": await text(temperature=5.0, nsigma=0.5),
            "half_ordered": await text(temperature=5.0, nsigma=0.5, sampler_priority=["top_n_sigma", "temperature"]),
            "refusals": refusals,
        }


async def form() -> float:
    """The parameter of a chat in whose form it was typed."""
    link = FakeLink(answer="A")
    async with console(link).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(pilot.app.screen, ChatSettingsScreen))
        pilot.app.screen.query_one("#nsigma", Input).value = "1.5"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: not isinstance(pilot.app.screen, ChatSettingsScreen))
        await ask(pilot, "Q")
        await until(pilot, lambda: ended(pilot))
    return float(getattr(link.chats[-1][1], "nsigma"))  # noqa: B009 - a field that mypy cannot know


def refusal(backend: str) -> str:
    """Why a backend refuses the parameter, "" where it does not."""
    values: dict[str, Any] = {"nsigma": 1.0}
    try:
        refuse_lacking(SamplingParams(**values).validate(), backend)
    except InvalidRequest as error:
        return error.message
    return ""


if __name__ == "__main__":
    report = {
        **asyncio.run(requests(Path(sys.argv[2]))),
        "form": asyncio.run(form()),
        "torch": refusal("torch"),
        "exllamav2": refusal("exllamav2"),
        "documentation": [line for line in (page() + "\n" + table()).splitlines() if "nsigma" in line],
    }
    print(json.dumps(report))
