"""Makes the pictures of the README and of docs/console.md: the real console and engine on two simulated cards, while
clients stream.

.venv/bin/python docs/pictures.py            # about two minutes; writes docs/*.svg
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from textual.pilot import Pilot

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

if TYPE_CHECKING:
    from console.bench.bench_runs import Benches
    from console.runtime.loops import LoopThread

SIZE = (136, 42)
SIZES = ((80, 24), (100, 30), (160, 48), (220, 60))
"""Of terminals that the Dashboard is pictured in, besides SIZE."""
INSTALLED = "/opt/ericllm"
CELL = 12.2
"""Width of a character in a picture."""
CLIENTS = 24
WARM_S = 25.0
KNOB_S = 20.0


async def main() -> None:
    """Open the console, load it, and take a picture of each screen worth one."""
    from console.link.local import LocalLink
    from console.runtime.loops import LoopThread
    from console.runtime.runtime import Runtime
    from console.settings.sources import load_settings
    from console.tui.app import EricApp

    flags = {"devices": "sim:24,24", "num_workers": 2, "max_prompts": 8, "gpu_balance": True, "port": 8000}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("CONFIG", "DATA", "STATE"):
            os.environ[f"XDG_{kind}_HOME"] = folder
        loop = LoopThread()
        opened = Runtime.open(load_settings(flags), log_dir=Path(folder), state_dir=Path(folder))
        runtime = await asyncio.wrap_future(loop.submit(opened))
        app = EricApp(LocalLink(runtime, loop), theme="ericllm-dark", chats=Path(folder) / "chats.db")
        try:
            await asyncio.wrap_future(loop.submit(runtime.start()))
            await asyncio.wrap_future(loop.submit(runtime.load("demo")))
            async with app.run_test(size=SIZE) as pilot:
                async with _clients(runtime.api_status().url):
                    await _take(pilot)
                await _take_benches(pilot, runtime.benches, loop)
        finally:
            await asyncio.wrap_future(loop.submit(runtime.close(drain_s=0.0, patience_s=1.0)))
            loop.stop()


async def _take(pilot: Pilot[None]) -> None:
    await pilot.pause(WARM_S)
    await pilot.press("plus", "plus", "plus", "plus")
    await pilot.pause(KNOB_S)
    _save(pilot, "dashboard")
    for width, height in SIZES:
        await pilot.resize_terminal(width, height)
        await pilot.pause(2)
        _save(pilot, f"dashboard-{width}x{height}")
    await pilot.resize_terminal(*SIZE)
    await pilot.press("2")
    await pilot.pause(2)
    _save(pilot, "models")
    await pilot.press("3")
    await pilot.pause(1)
    for question in ("What does max_prompts do?", "And how many workers do I need?"):
        await pilot.press(*question, "enter")
        await pilot.pause(6)
    _save(pilot, "chat")
    await pilot.press("f5")
    await pilot.pause(2)
    _save(pilot, "tune")
    await pilot.press("v", "v")
    await pilot.pause(2)
    _save(pilot, "workload")


async def _take_benches(pilot: Pilot[None], benches: Benches, loop: LoopThread) -> None:
    from console.link.benches import BenchOrder

    for bench in ("latency", "users"):
        await asyncio.wrap_future(loop.submit(benches.start(BenchOrder(bench=bench))))
        await asyncio.wrap_future(loop.submit(benches.finished()))
    await pilot.press("b")
    await pilot.pause(2)
    _save(pilot, "benches")


def _save(pilot: Pilot[None], name: str) -> None:
    file = HERE / f"{name}.svg"
    file.write_text(_moved(pilot.app.export_screenshot()), encoding="utf-8")
    sys.stderr.write(f"docs/{name}.svg\n")


def _moved(svg: str) -> str:
    """Show the folder of this checkout as INSTALLED, whose text is as much longer or shorter."""
    cells = len(INSTALLED) - len(str(HERE.parent))
    text = re.compile(rf'textLength="([\d.]+)"([^>]*>[^<]*){re.escape(str(HERE.parent))}')
    return text.sub(lambda at: f'textLength="{float(at[1]) + cells * CELL:.1f}"{at[2]}{INSTALLED}', svg)


@contextlib.asynccontextmanager
async def _clients(url: str) -> AsyncIterator[None]:
    """Clients that stream answers of many lengths, with a prompt that they share, until this ends."""
    async with aiohttp.ClientSession(url) as http:
        tasks = [asyncio.create_task(_client(http, number)) for number in range(CLIENTS)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _client(http: aiohttp.ClientSession, number: int) -> None:
    for turn in itertools.count():
        shared = "You help an operator of GPUs. " * 8
        body = {
            "messages": [
                {"role": "system", "content": shared},
                {"role": "user", "content": f"Client {number}, {turn}"},
            ],
            "max_tokens": 120 + 40 * (number % 9),
            "ignore_eos": True,
            "stream": True,
        }
        async with http.post("/v1/chat/completions", json=body) as answer:
            async for _ in answer.content:
                pass


if __name__ == "__main__":
    began_s = time.monotonic()
    asyncio.run(main())
    sys.stderr.write(f"made in {time.monotonic() - began_s:.0f} s\n")
