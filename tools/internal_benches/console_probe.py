"""The console with a probe of its event loop: python -m tools.internal_benches.console_probe REPORT ROWS FLAGS...

Its history has ROWS finished requests, and a chat is answered with words at a steady pace until it is stopped; the rest
is the console itself. At its end it writes the time and the delay of every probe.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from console.cli.parser import Parser, add_every_setting, parse, with_dashes
from console.link.chat import ChatDelta, ChatMessage, DraftCount
from console.link.protocol import EngineLink
from console.runtime.loading import choose_model
from console.settings.sources import Sources
from console.tui.app import EricApp
from console.tui.terminal import run_console
from engine.config import SamplingParams
from engine.snapshot import RequestRow

BEAT_S = 0.05
WORD_S = 0.02
_ANSWER = """The **queue** holds waiting requests, and `max_prompts` is the number of requests that a worker computes at
once. Each has its own pages of keys and values, so more concurrent requests need more memory; the rest of it keeps
prefixes of earlier prompts, which need not be computed again. When a worker is full, the next request waits until one
of those before it has ended, and the console shows for how long. Another worker takes half of them.

* **One worker** is best where memory is short.
* **More workers** are best where cores wait for each other, or GPUs are idle.
* Watch the time to the first token while you change a setting: the page *Tune* compares before and after.

"""
_CONTEXT = 1 << 20
_BATCH_ROWS = 500


class Beats(msgspec.Struct, frozen=True):
    """at: the monotonic clock, in seconds.  late: the loop's delay at that time, in seconds."""

    at: list[float]
    late: list[float]


class PacedChat:
    """ConversationLink: the same answer, repeated until it is stopped; a word counts as a token."""

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        model: str = "",
        *,
        continue_answer: bool = False,
        enable_thinking: bool | None = None,
    ) -> AsyncIterator[ChatDelta]:
        """Yield a word every WORD_S."""
        tokens = 0
        while True:
            for line in _ANSWER.splitlines(keepends=True):
                for piece in line.split(" "):
                    await asyncio.sleep(WORD_S)
                    tokens += 1
                    yield ChatDelta(text=piece if piece.endswith("\n") else f"{piece} ", output_tokens=tokens)

    async def count_tokens(self, messages: Sequence[ChatMessage], draft: str, model: str = "") -> DraftCount:
        """Count words; the context is never full."""
        history = sum(len(message.content.split()) for message in messages)
        return DraftCount(history=history, draft=len(draft.split()), context=_CONTEXT)


class PastRequests:
    """RequestsLink: `rows` made-up finished requests, then those of the real link."""

    def __init__(self, behind: Callable[[], Any], rows: int) -> None:
        self._behind = behind
        self._rows = rows

    def finished(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Finished requests, the made-up ones first."""
        if after >= self._rows:
            total, rows = self._behind().finished(after - self._rows)
            return self._rows + total, rows
        until = min(self._rows, after + _BATCH_ROWS)
        return until, [_row(number) for number in range(after, until)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind(), name)


class ProbedApp(EricApp):
    """Records the delays of its event loop."""

    def __init__(self, link: EngineLink, **options: Any) -> None:
        super().__init__(link, **options)
        self.beats = Beats([], [])

    def on_mount(self) -> None:
        """Start the probe."""
        super().on_mount()
        self.run_worker(self._beat(), group="probe", exit_on_error=False)

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            self.beats.at.append(now)
            self.beats.late.append(now - before - BEAT_S)


def main(argv: Sequence[str]) -> int:
    """Run the console with `argv[2:]` as its flags, and write Beats to the file `argv[0]`."""
    apps: list[ProbedApp] = []

    def make(link: Any, **options: Any) -> EricApp:
        link.conversation = PacedChat()
        link.requests = PastRequests(lambda: link.__getattr__("requests"), int(argv[1]))
        apps.append(ProbedApp(link, **options))
        return apps[0]

    parser = Parser()
    add_every_setting(parser, "")
    sources = Sources.read(parse(with_dashes(argv[2:]), parser))
    settings = sources.settings()
    code = run_console(settings, choose_model(settings), sources, make)
    Path(argv[0]).write_bytes(msgspec.msgpack.encode(apps[0].beats if apps else Beats([], [])))
    return code


def _row(number: int) -> RequestRow:
    return RequestRow(
        id=f"past-{number}",
        source="api",
        state="finished",
        worker=f"w{number % 4}",
        prompt_tokens=100 + number % 900,
        computed_tokens=100 + number % 900,
        output_tokens=number % 500,
        max_tokens=500,
        age_s=1 + number % 60,
        queued_s=number % 10 / 10,
        ttft_s=0.1 + number % 7 / 10,
        itl_s=0.01 + number % 5 / 100,
        tokens_per_s=50.0,
        finish="stop",
        client=f"10.0.0.{number % 20}",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
