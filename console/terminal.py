"""The console: a Textual app on the main thread, the engine and the API on a loop of their own thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, cast

from console.link import ApiStatus, EngineLink
from console.modes import import_screens
from console.native_stderr import native_stderr_logged
from console.opening import OpeningLink
from console.output import say
from console.settings import Settings, data_dir, state_dir
from console.sources import Sources
from engine.errors import EngineError
from engine.pauses import collect_rarely

if TYPE_CHECKING:
    from console.app import EricApp
    from console.loading import ModelChoice
    from console.runtime import Runtime

QUIT_PATIENCE_S = 0.1
"""What a worker gets to end by itself: whoever quits does not wait for one that hangs."""


def run_console(
    settings: Settings, choice: ModelChoice, sources: Sources, make_app: Callable[..., EricApp] | None = None
) -> int:
    """Open the console, and the engine with `choice` behind it; returns the exit code when the operator leaves.

    sources: what the settings were made from, for the screen that shows and saves them.
    make_app: what makes the app, with EricApp's arguments, where that is not EricApp itself.
    """
    from console.app import EricApp

    with _Engine(settings, choice, sources) as engine:
        if settings.cluster != "local":  # which takes too long to have a screen wait for it
            say(f"joining the cluster {settings.cluster}")
            engine.open()
            engine.opened.result()
        link: Any = OpeningLink(engine.opened, ApiStatus(host=settings.host, port=settings.port))
        app = (make_app or EricApp)(
            _read_only(link) if settings.read_only else link,
            theme=settings.theme,
            chats=data_dir() / "chats.db",
            refresh_hz=settings.refresh_hz,
            on_shown=engine.open,
            on_leaving=engine.begin_to_close,
        )
        engine.on_failure = lambda: app.call_from_thread(app.exit)
        engine.on_ready = lambda: app.call_later(app.make_screens_ahead)  # waits for no app that is leaving
        collect_rarely()
        with _recording(link, settings), native_stderr_logged():
            app.run()
    return app.return_code or 0


def _read_only(link: Any) -> EngineLink:
    from console.called import as_link
    from console.readonly import ReadOnlyLink

    return as_link(ReadOnlyLink(link))


def _recording(link: Any, settings: Settings) -> AbstractContextManager[object]:
    if settings.record is None:
        return contextlib.nullcontext()
    from console.recording.recorder import recording

    return recording(link, settings.record)


class _Engine:
    """The engine behind the screens, opened on a thread of its own once the first frame is there: what it imports would
    hold that up. Leaving it closes all there is; what it could not be opened for is raised then.

    opened: its link.  on_ready, on_failure: called on that thread.
    """

    def __init__(self, settings: Settings, choice: ModelChoice, sources: Sources) -> None:
        self.opened: Future[EngineLink] = Future()
        self.on_ready: Callable[[], object] = lambda: None
        self.on_failure: Callable[[], object] = lambda: None
        self._settings = settings
        self._choice = choice
        self._sources = sources
        self._left_behind = ExitStack()
        self._close: Callable[[], Future[None]] | None = None
        self._closing: Future[None] | None = None
        self._thread = threading.Thread(target=self._open, name="opening", daemon=True)

    def open(self) -> None:
        """Begin; nothing happens where it has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def begin_to_close(self) -> None:
        """Begin to end what there is; `with` waits for it."""
        if self._close is not None and self._closing is None:
            self._closing = self._close()

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        say("stopping")
        if self._thread.ident is not None:
            self._thread.join()
        self.begin_to_close()
        self._left_behind.close()
        if self.opened.done() and (error := self.opened.exception()) is not None:
            raise error

    def _open(self) -> None:
        try:
            link = self._link()
        except Exception as error:
            self.opened.set_exception(error)
            with contextlib.suppress(RuntimeError):  # the app has ended already
                self.on_failure()
        else:
            self.opened.set_result(link)
            import_screens()
            with contextlib.suppress(RuntimeError):  # the app has ended already
                self.on_ready()

    def _link(self) -> EngineLink:
        from console.local import LocalLink
        from console.logs import logging_to, own_log_folder
        from console.runtime import LoopThread, Runtime

        loop = LoopThread()
        self._left_behind.callback(loop.stop)
        folder = self._left_behind.enter_context(own_log_folder())
        opening = Runtime.open(self._settings, log_dir=folder, state_dir=state_dir(), sources=self._sources)
        runtime = loop.submit(opening).result()
        level = self._settings.effective_log_level
        self._left_behind.enter_context(logging_to(runtime.engine.log, folder, level=level))
        self._left_behind.callback(lambda: self._closing.result() if self._closing is not None else None)
        self._close = lambda: loop.submit(runtime.close(drain_s=0.0, patience_s=QUIT_PATIENCE_S))
        runtime.starting = True
        loop.submit(_load(runtime, self._choice))
        return cast("EngineLink", LocalLink(runtime, loop))


async def _load(runtime: Runtime, choice: ModelChoice) -> None:
    """Start engine and API, then load. What fails is in the snapshot and the log, where the screens show it."""
    with contextlib.suppress(EngineError):
        await runtime.start()
    try:
        await runtime.load(choice)
    except EngineError:
        pass
    finally:
        runtime.starting = False
