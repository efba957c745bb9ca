"""Two settings of a plugin, flag to load: `python -m tests.integration.added_setting FOLDER`, with models/tiny in it.

Prints as JSON what the doors make of them. It needs an interpreter of its own, for a plugin's settings are added before
the options of a load are read.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from console.settings.schema import Flag, Settings, add_setting

FOLDER = Path(sys.argv[1])
EVERYWHERE = Annotated[
    int | None,
    Flag("Engine", "N", example=3, when="load"),
    Field(ge=1, le=9, description="Greetings to a client"),
]
ELSEWHERE = Annotated[
    str, Flag("Engine", "WORD", ("exllamav2",), when="load"), Field(description="Last word to a client")
]
if __name__ == "__main__":
    add_setting("greetings", EVERYWHERE, None)
    add_setting("farewell", ELSEWHERE, "bye")

import aiohttp  # noqa: E402

from console.cli.parser import Parser, add_every_setting, parse  # noqa: E402
from console.runtime.loading import requested_spec  # noqa: E402
from console.runtime.runtime import Runtime  # noqa: E402
from console.settings.config_file import sample  # noqa: E402
from console.settings.load_options import LoadOptions  # noqa: E402
from console.settings.running_settings import LiveSettings  # noqa: E402
from console.settings.sources import Sources, changed  # noqa: E402
from console.tui.app import EricApp  # noqa: E402
from console.tui.screens.dialogs import LineScreen  # noqa: E402
from console.tui.screens.models.form import LoadFormView  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.errors import InvalidRequest  # noqa: E402
from tests.fakes import scenes  # noqa: E402
from tests.fakes.link import FakeLink, FakeSettings  # noqa: E402
from tests.ui.seen import rows, until  # noqa: E402
from tools.docs_pages.settings import page  # noqa: E402


def value(sources: Sources) -> object:
    """The setting, as these sources have it."""
    return dict(sources.settings())["greetings"]


def refusal(attempt: Callable[[], object]) -> str:
    """The sentence of what must be refused."""
    try:
        attempt()
    except (InvalidRequest, RuntimeError) as error:
        return str(error)
    return ""


def sources() -> dict[str, Any]:
    """The setting as a flag, a variable and a key of config.toml."""
    parser = Parser()
    add_every_setting(parser, "")
    file = FOLDER / "config.toml"
    found: dict[str, Any] = {
        "help": parser.format_help(),
        "flag": value(Sources.read(parse(["--greetings", "2"], parser), env={}, file=file)),
        "variable": value(Sources.read({}, env={"ERICLLM_GREETINGS": "4"}, file=file)),
    }
    file.write_text("greetings = 5\n")
    found["file"] = value(Sources.read({}, env={}, file=file))
    return found


async def saved() -> list[str]:
    """The setting once the Settings screen saved it: its row, and config.toml."""
    file = FOLDER / "saved.toml"
    live = LiveSettings(Engine(EngineConfig()), Settings(), Sources(file=file))
    return [(await live.save("greetings", "7")).value, file.read_text().strip()]


async def line() -> list[str]:
    """Lines of the Settings screen with the setting."""
    link = FakeLink()
    link.settings = FakeSettings(link, Sources(saved={"greetings": 7}), names=("greetings",))
    async with EricApp(link, start="settings").run_test(size=(120, 30)) as pilot:
        await pilot.pause()
        return [row for row in rows(pilot.app) if "greetings" in row]


async def form() -> object:
    """The arguments of a load in whose form the setting was typed."""
    link = FakeLink(scenes.empty())
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 60)) as pilot:
        await until(pilot, lambda: bool(link.models.asked))
        await pilot.press("e", "m")
        form = app.screen.query_one(LoadFormView).form
        assert form is not None
        names = [field.name for field in form.fields]
        await pilot.press(*["down"] * names.index("greetings"), "t")
        await until(pilot, lambda: isinstance(app.screen, LineScreen))
        await pilot.press("6", "enter")
        await until(pilot, lambda: link.models.asked[-1][1].given() == {"greetings": 6})
        await pilot.press("m", "enter")
        await until(pilot, lambda: any(name == "load" for name, _ in link.commands))
        return next(arguments for name, arguments in link.commands if name == "load")


async def loads() -> dict[str, Any]:
    """Orders of a load over HTTP, with each of the settings, and what is remembered of them."""
    runtime = Runtime(Settings(port=0, models_dir=(FOLDER / "models",), worker_host="thread"))
    await runtime.start()
    try:
        async with aiohttp.ClientSession(runtime.api_status().url) as http:

            async def ordered(**order: Any) -> tuple[int, dict[str, Any]]:
                async with http.post("/admin/load", json={"model": "tiny", **order}) as response:
                    status, report = response.status, await response.json()
                while report.get("state") == "loading":
                    async with http.get("/admin/load") as response:
                        report = await response.json()
                return status, report

            loaded = (await ordered(greetings=8))[1].get("state")
            return {
                "loaded": loaded,
                "remembered": (await runtime.link().models.remembered("tiny")).given(),
                "out of range": await ordered(greetings=10),
                "unsupported": await ordered(farewell="later"),
            }
    finally:
        await runtime.close(drain_s=0.0)


def spec(**values: Any) -> Any:
    """What a worker is told to load."""
    return requested_spec(changed(Settings(), values), "tiny", FOLDER / "models" / "tiny", "torch")


if __name__ == "__main__":
    report = {
        **sources(),
        "sample": sample(),
        "saved": asyncio.run(saved()),
        "line": asyncio.run(line()),
        "form": asyncio.run(form()),
        "page": page(),
        "out of range": refusal(lambda: changed(Settings(), {"greetings": 10})),
        "too late": refusal(lambda: add_setting("later", EVERYWHERE, None)),
        "options": LoadOptions(greetings=1, farewell="later").given(),
        "same spec": spec(greetings=2) == spec(),
        "http": asyncio.run(loads()),
    }
    print(json.dumps(report))
