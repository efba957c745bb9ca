"""The console: a Textual app on the main thread, the engine and the API on a loop of their own thread."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from console.called import as_link
from console.loading import ModelChoice
from console.local import LocalLink
from console.logs import logging_to
from console.pauses import collect_rarely
from console.readonly import ReadOnlyLink
from console.recording.recorder import recording
from console.runtime import LoopThread, Runtime
from console.settings import APP_NAME, Settings, data_dir, log_dir, state_dir
from console.sources import Sources
from engine.errors import EngineError

if TYPE_CHECKING:
    from console.app import EricApp

QUIT_PATIENCE_S = 0.4
"""What a worker gets to end by itself: whoever quits does not wait for one that hangs."""


def run_console(
    settings: Settings, choice: ModelChoice, sources: Sources, make_app: Callable[..., EricApp] | None = None
) -> int:
    """Open the console and load `choice` behind it; returns the exit code when the operator leaves.

    sources: what the settings were made from, for the screen that shows and saves them.
    make_app: what makes the app, with EricApp's arguments, where that is not EricApp itself.
    """
    from console.app import EricApp

    loop = LoopThread()
    if settings.cluster != "local":
        print(f"{APP_NAME}: joining the cluster {settings.cluster}", file=sys.stderr)
    try:
        opening = Runtime.open(settings, log_dir=log_dir(), state_dir=state_dir(), sources=sources)
        runtime = loop.submit(opening).result()
    except EngineError as error:
        print(f"{APP_NAME}: {error.message}", file=sys.stderr)
        loop.stop()
        return 1
    with logging_to(runtime.engine.log, log_dir(), verbose=settings.verbose, stderr=False):
        try:
            local = LocalLink(runtime, loop)
            link = as_link(ReadOnlyLink(local)) if settings.read_only else local
            loop.submit(_open(runtime, choice))
            app = (make_app or EricApp)(
                link,
                theme=settings.theme,
                chats=data_dir() / "chats.db",
                refresh_hz=settings.refresh_hz,
            )
            collect_rarely()
            with recording(local, settings.record):
                app.run()
            code = app.return_code or 0
        finally:
            print(f"{APP_NAME}: stopping", file=sys.stderr)
            loop.submit(runtime.close(drain_s=0.0, patience_s=QUIT_PATIENCE_S)).result()
            loop.stop()
    return code


async def _open(runtime: Runtime, choice: ModelChoice) -> None:
    """Start engine and API, then load. What fails is in the snapshot and the log, where the screens show it."""
    with contextlib.suppress(EngineError):
        await runtime.start()
    with contextlib.suppress(EngineError):
        await runtime.load(choice)
