"""How quick the console is under load: the real one in a pseudo-terminal, with clients that stream and keys pressed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import msgspec
import psutil

from console.bench.progress import Show
from console.bench.pty_child import PtyChild
from console.bench.screen_report import Goal, ScreenReport
from console.chats.records import ChatSettings
from console.chats.store import ChatStore
from console.settings.schema import APP_NAME
from engine.errors import WorkerFailed
from engine.system.child_process import child_environment, python_command

FIRST_FRAME = "Dashboard"
PAST_REQUESTS = 10_000
PAST_TOKENS = 100_000
PAST_TURNS = 400
KEY_PAUSE_S = 0.25
SETTLE_S = 2.0
_F = {"dashboard": b"\x1bOP", "chat": b"\x1bOR", "requests": b"\x1bOS", "logs": b"\x1b[18~"}
_SHOWN = {"dashboard": "Throughput", "requests": "filters by id", "logs": "then a word"}
"""What stands on a screen and on no other."""
_CHAT_SHOWN = "of 1,048,576 tokens"


async def measure_screen(model: str, clients: int, seconds: float, show: Show) -> ScreenReport:
    """Open the console on `model`, leave it alone, load it, press keys, and quit; then do so again where much has been
    asked and said before, and quit with a worker that hangs. Raises WorkerFailed where the console does not do what is
    asked."""
    with tempfile.TemporaryDirectory(prefix="ericllm-bench-") as folder:
        show("starting the console")
        async with _console(model, Path(folder)) as console:
            first_frame_s = await console.first_frame_s()
            await console.ready()
            show("leaving it alone")
            await asyncio.sleep(SETTLE_S)
            idle = await console.cpu_share(seconds)
            show(f"{clients} clients and the chat open")
            fresh = await _under_load(console, clients, seconds, asks=False)
            show(f"{clients} clients and a chat that streams")
            asked = await _under_load(console, clients, seconds, asks=True)
            show("quitting")
            quit_s = await console.quit_s()
            fresh_late_s, asked_late_s = console.late_s(*fresh.between), console.late_s(*asked.between)
        remember(Path(folder))
        async with _console(model, Path(folder), past_requests=PAST_REQUESTS) as console:
            await console.first_frame_s()
            await console.ready()
            show(f"the same after {PAST_REQUESTS:,} requests and with {PAST_TOKENS:,} tokens in the chat")
            open_full = await _under_load(console, clients, seconds, asks=False)
            full = await _under_load(console, clients, seconds, asks=True)
            show("quitting with a worker that hangs")
            console.hang_workers()
            hung_quit_s = await console.quit_s()
            open_full_late_s, full_late_s = console.late_s(*open_full.between), console.late_s(*full.between)
    goals = (
        Goal("first frame", 1e3 * first_frame_s, 1000, "ms"),
        Goal("quit", 1e3 * quit_s, 1000, "ms"),
        Goal("quit with a worker that hangs", 1e3 * hung_quit_s, 1000, "ms"),
        Goal("CPU of the screen, idle", 100 * idle, 2, "%"),
        *_goals(fresh, fresh_late_s, ""),
        *_goals(open_full, open_full_late_s, ", much before"),
        *_goals(asked, asked_late_s, ", chat streams"),
        *_goals(full, full_late_s, ", chat streams, much before"),
    )
    loads = (fresh, asked, open_full, full)
    rates = [each.tokens / (each.between[1] - each.between[0]) for each in loads]
    return ScreenReport(
        clients=clients,
        seconds=seconds,
        keys=sum(len(each.keys_s) for each in loads),
        tokens_per_s=sum(rates) / len(rates),
        goals=goals,
    )


def _goals(loaded: _Loaded, late_s: Sequence[float], when: str) -> tuple[Goal, ...]:
    return (
        Goal(f"gap of the loop, p99{when}", 1e3 * _percentile(late_s, 0.99), 50, "ms"),
        Goal(f"key shown, p99{when}", 1e3 * _percentile(loaded.keys_s, 0.99), 100, "ms"),
        Goal(f"another screen shown, p99{when}", 1e3 * _percentile(loaded.screens_s, 0.99), 100, "ms"),
        Goal(f"CPU of the screen{when}", 100 * loaded.cpu_share, 10, "%"),
    )


def remember(folder: Path) -> None:
    """Put a long conversation where the console under test keeps them; a word counts for a token."""
    store = ChatStore(folder / "data" / APP_NAME / "chats.db")
    conversation = store.create(ChatSettings(), title="Long before")
    leaf: int | None = None
    for number in range(PAST_TURNS):
        said = " ".join(f"word{number}-{word}" for word in range(PAST_TOKENS // PAST_TURNS))
        leaf = store.add(conversation, leaf, "assistant" if number % 2 else "user", said).id
    store.show(conversation, leaf)
    store.close()


class _Loaded(msgspec.Struct, frozen=True):
    """What was seen while clients streamed. between: from when to when, on the monotonic clock."""

    between: tuple[float, float]
    keys_s: list[float]
    screens_s: list[float]
    cpu_share: float
    tokens: int


class _Console:
    """The console under test, as its operator and its clients reach it."""

    def __init__(self, model: str, folder: Path, past_requests: int) -> None:
        self._report = folder / "beats"
        self._port = _free_port()
        flags = ("--model", model, "--port", str(self._port), "--max-prompts", "64")
        homes = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
        self.terminal = PtyChild(
            python_command("-m", "console.tui.probe", str(self._report), str(past_requests), *flags),
            columns=120,
            rows=40,
            env={**child_environment(), **homes, "TERM": "xterm-256color"},
        )

    @property
    def url(self) -> str:
        """Where its API is."""
        return f"http://127.0.0.1:{self._port}"

    async def first_frame_s(self) -> float:
        """Seconds from its start to its first picture."""
        await self.terminal.shown_s(FIRST_FRAME)
        return time.monotonic() - self.terminal.started_s

    async def ready(self, timeout_s: float = 120.0) -> None:
        """Wait until its model answers. Raises WorkerFailed if it does not."""
        until_s = time.monotonic() + timeout_s
        async with aiohttp.ClientSession(self.url) as http:
            while time.monotonic() < until_s:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get("/ready") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.1)
        raise WorkerFailed(f"the console had no model ready within {timeout_s:g} s")

    async def cpu_share(self, seconds: float) -> float:
        """The share of a core that its screen takes while it is left alone for so long."""
        before_s = self.screen_cpu_s()
        await asyncio.sleep(seconds)
        return (self.screen_cpu_s() - before_s) / seconds

    def screen_cpu_s(self) -> float:
        """CPU that its main thread, where the screen lives, has used so far."""
        pid = self.terminal.process.pid
        main = next(thread for thread in psutil.Process(pid).threads() if thread.id == pid)
        return float(main.user_time + main.system_time)

    def hang_workers(self) -> None:
        """Stop its worker processes where they are."""
        for child in psutil.Process(self.terminal.process.pid).children(recursive=True):
            child.send_signal(signal.SIGSTOP)

    async def quit_s(self) -> float:
        """Seconds from the key to the end of the process, the question answered at once if there is one."""
        began_s = time.monotonic()
        self.terminal.press(b"\x11")
        asking = asyncio.get_running_loop().call_later(0.1, self.terminal.press, b"y")
        ended_s = await self.terminal.ended_s()
        asking.cancel()
        return ended_s - began_s

    def late_s(self, from_s: float, to_s: float) -> list[float]:
        """How late its loop was, at each look in that time. Raises WorkerFailed where it kept no record."""
        if not self._report.exists():
            raise WorkerFailed("the console ended badly: it left no record of its loop")
        beats = msgspec.msgpack.decode(self._report.read_bytes())
        return [late for at, late in zip(beats["at"], beats["late"], strict=True) if from_s <= at <= to_s]


@contextlib.asynccontextmanager
async def _console(model: str, folder: Path, past_requests: int = 0) -> AsyncIterator[_Console]:
    console = _Console(model, folder, past_requests)
    try:
        yield console
    finally:
        console.terminal.close()


async def _under_load(console: _Console, clients: int, seconds: float, *, asks: bool) -> _Loaded:
    """Stream to clients, have the chat answer a question where one `asks`, press keys."""
    tokens = itertools.count()
    async with aiohttp.ClientSession(console.url, timeout=aiohttp.ClientTimeout(total=None)) as http:
        streams = [asyncio.create_task(_stream(http, number, tokens)) for number in range(clients)]
        try:
            await console.terminal.shown_s(_SHOWN["logs"], _F["logs"])
            await console.terminal.shown_s(_CHAT_SHOWN, _F["chat"])
            if asks:
                console.terminal.press(b"Tell me.\r")
            await asyncio.sleep(1.0)
            began_s, cpu_s, counted = time.monotonic(), console.screen_cpu_s(), next(tokens)
            keys_s, screens_s = await _press_keys(console.terminal, began_s + seconds)
            ended_s, cpu_s = time.monotonic(), console.screen_cpu_s() - cpu_s
            counted = next(tokens) - counted
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    return _Loaded((began_s, ended_s), keys_s, screens_s, cpu_s / (ended_s - began_s), counted)


async def _press_keys(terminal: PtyChild, until_s: float) -> tuple[list[float], list[float]]:
    """Type into the chat, each time a character that nothing else shows; now and then go to another screen and back."""
    keys_s: list[float] = []
    screens_s: list[float] = []
    others = itertools.cycle(_SHOWN)
    for number in itertools.count():
        if time.monotonic() >= until_s and screens_s:
            return keys_s, screens_s
        character = chr(0x4E00 + number)
        keys_s.append(await terminal.shown_s(character, character.encode()))
        await asyncio.sleep(KEY_PAUSE_S)
        if number % 4 == 3:
            other = next(others)
            screens_s.append(await terminal.shown_s(_SHOWN[other], _F[other]))
            await asyncio.sleep(2 * KEY_PAUSE_S)
            await terminal.shown_s(_CHAT_SHOWN, _F["chat"])
            await asyncio.sleep(KEY_PAUSE_S)
    raise AssertionError("it counts for ever")


async def _stream(http: aiohttp.ClientSession, number: int, tokens: itertools.count[int]) -> None:
    """Ask for long answers, one after the other, and count what streams."""
    body = {"prompt": f"Client {number} says", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    while True:
        async with http.post("/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    next(tokens)


def _percentile(values: Sequence[float], share: float) -> float:
    """Of one value at least."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
