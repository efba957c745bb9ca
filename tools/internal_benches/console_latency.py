"""Response times of the console in a pseudo-terminal, with streaming clients and keys pressed."""

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
from console.bench.text import table
from console.chats.records import ChatSettings
from console.chats.store import ChatStore
from console.settings.schema import APP_NAME
from engine.errors import WorkerFailed
from engine.metrics.distributions import percentiles
from engine.system.child_process import child_environment, python_command
from tools.internal_benches.pty_child import PtyChild

FIRST_FRAME = "Dashboard"
PAST_REQUESTS = 10_000
PAST_TOKENS = 100_000
PAST_TURNS = 400
KEY_PAUSE_S = 0.25
SETTLE_S = 2.0
_F = {"dashboard": b"\x1bOP", "chat": b"\x1bOR", "requests": b"\x1bOS", "logs": b"\x1b[18~"}
_SHOWN = {"dashboard": "Throughput", "requests": "filters by id", "logs": "following"}
"""Text that appears on this screen only."""
_CHAT_SHOWN = "of 1,048,576 tokens"


class Goal(msgspec.Struct, frozen=True):
    """A measured value and its limit, in the same unit."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def is_reached(self) -> bool:
        """True if the value is below the limit."""
        return self.value < self.limit


class ScreenReport(msgspec.Struct, frozen=True, kw_only=True):
    """keys: key presses that were timed.  tokens_per_s: of all clients together."""

    clients: int
    seconds: float
    keys: int
    tokens_per_s: float
    goals: tuple[Goal, ...]


async def measure_screen(model: str, clients: int, seconds: float, show: Show) -> ScreenReport:
    """Open the console on `model`: idle, under load with keys pressed, quit; then again with a long history, and quit
    with a hanging worker. Raises WorkerFailed where the console does not respond."""
    with tempfile.TemporaryDirectory(prefix="ericllm-bench-") as folder:
        show("starting the console")
        async with _console(model, Path(folder)) as console:
            first_frame_s = await console.first_frame_s()
            await console.ready()
            show("idle")
            await asyncio.sleep(SETTLE_S)
            idle = await console.cpu_share(seconds)
            show(f"{clients} clients and the chat open")
            fresh = await _under_load(console, clients, seconds, asks=False)
            show(f"{clients} clients and a chat that streams")
            streaming = await _under_load(console, clients, seconds, asks=True)
            show("quitting")
            quit_s = await console.quit_s()
            fresh_late_s, streaming_late_s = console.late_s(*fresh.between), console.late_s(*streaming.between)
        add_history(Path(folder))
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
        *_goals(streaming, streaming_late_s, ", chat streams"),
        *_goals(full, full_late_s, ", chat streams, much before"),
    )
    loads = (fresh, streaming, open_full, full)
    rates = [each.tokens / (each.between[1] - each.between[0]) for each in loads]
    return ScreenReport(
        clients=clients,
        seconds=seconds,
        keys=sum(len(each.keys_s) for each in loads),
        tokens_per_s=sum(rates) / len(rates),
        goals=goals,
    )


def screen_text(report: ScreenReport) -> str:
    """The report as text."""
    rows = [
        [goal.name, f"{goal.value:.1f} {goal.unit}", f"{goal.limit:g} {goal.unit}", "yes" if goal.is_reached else "NO"]
        for goal in report.goals
    ]
    return "\n".join(
        (
            f"{report.clients} clients that stream {report.tokens_per_s:.0f} chunks/s, "
            f"{report.seconds:g} s of each, {report.keys} keys pressed",
            "",
            table(["", "measured", "limit", "reached"], rows),
        )
    )


def _goals(loaded: _Loaded, late_s: Sequence[float], when: str) -> tuple[Goal, ...]:
    return (
        Goal(f"gap of the loop, p99{when}", _p99_ms(late_s), 50, "ms"),
        Goal(f"key shown, p99{when}", _p99_ms(loaded.keys_s), 100, "ms"),
        Goal(f"another screen shown, p99{when}", _p99_ms(loaded.screens_s), 100, "ms"),
        Goal(f"CPU of the screen{when}", 100 * loaded.cpu_share, 10, "%"),
    )


def add_history(folder: Path) -> None:
    """Store a long conversation for the console under test; a word counts as a token."""
    store = ChatStore(folder / "data" / APP_NAME / "chats.db")
    conversation = store.create(ChatSettings(), title="Long before")
    leaf: int | None = None
    for number in range(PAST_TURNS):
        text = " ".join(f"word{number}-{word}" for word in range(PAST_TOKENS // PAST_TURNS))
        leaf = store.add(conversation, leaf, "assistant" if number % 2 else "user", text).id
    store.show(conversation, leaf)
    store.close()


class _Loaded(msgspec.Struct, frozen=True):
    """Measurements while clients stream. between: start and end on the monotonic clock."""

    between: tuple[float, float]
    keys_s: list[float]
    screens_s: list[float]
    cpu_share: float
    tokens: int


class _Console:
    """The console under test: its terminal and its API."""

    def __init__(self, model: str, folder: Path, past_requests: int) -> None:
        self._report = folder / "beats"
        self._port = free_port()
        flags = ("--model", model, "--port", str(self._port), "--max-prompts", "64")
        homes = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
        self.terminal = PtyChild(
            python_command("-m", "tools.internal_benches.console_probe", str(self._report), str(past_requests), *flags),
            columns=120,
            rows=40,
            env={**child_environment(), **homes, "TERM": "xterm-256color"},
        )

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return f"http://127.0.0.1:{self._port}"

    async def first_frame_s(self) -> float:
        """Seconds from its start to its first frame."""
        await self.terminal.shown_s(FIRST_FRAME)
        return time.monotonic() - self.terminal.started_s

    async def ready(self, timeout_s: float = 120.0) -> None:
        """Wait until its model is ready. Raises WorkerFailed if it does not get ready in time."""
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
        """Share of a core that its screen uses while idle, over `seconds`."""
        before_s = self.screen_cpu_s()
        await asyncio.sleep(seconds)
        return (self.screen_cpu_s() - before_s) / seconds

    def screen_cpu_s(self) -> float:
        """CPU seconds of its main thread, which runs the screen, so far."""
        pid = self.terminal.process.pid
        main = next(thread for thread in psutil.Process(pid).threads() if thread.id == pid)
        return float(main.user_time + main.system_time)

    def hang_workers(self) -> None:
        """Suspend its worker processes."""
        for child in psutil.Process(self.terminal.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # one of those that come and go
                child.send_signal(signal.SIGSTOP)

    async def quit_s(self) -> float:
        """Seconds from the key to the end of the process; a confirmation is answered at once."""
        began_s = time.monotonic()
        self.terminal.press(b"\x11")
        asking = asyncio.get_running_loop().call_later(0.1, self.terminal.press, b"y")
        ended_s = await self.terminal.ended_s()
        asking.cancel()
        return ended_s - began_s

    def late_s(self, from_s: float, to_s: float) -> list[float]:
        """Delays of its event loop in that time. Raises WorkerFailed where it left no record."""
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
    """Stream to clients, with an answer in the chat where `asks`, and press keys."""
    tokens = itertools.count()
    async with aiohttp.ClientSession(console.url, timeout=aiohttp.ClientTimeout(total=None)) as http:
        streams = [asyncio.create_task(_stream(http, number, tokens)) for number in range(clients)]
        try:
            await console.terminal.shown_s(_SHOWN["logs"], _F["logs"])
            await console.terminal.shown_s(_CHAT_SHOWN, _F["chat"])
            if asks:
                console.terminal.press(b"Go on.\r")
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
    """Type unique characters into the chat; after every fourth, open another screen and return."""
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
    raise AssertionError("unreachable")


async def _stream(http: aiohttp.ClientSession, number: int, tokens: itertools.count[int]) -> None:
    """Request long answers, one after the other, and count the events."""
    body = {"prompt": f"Client {number} says", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    while True:
        async with http.post("/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    next(tokens)


def _p99_ms(seconds: Sequence[float]) -> float:
    """Of one value at least."""
    (value,) = percentiles(seconds, 0.99)
    return 1e3 * (value or 0.0)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
