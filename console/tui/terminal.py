"""The console: a Textual app on the main thread, the engine and the API on a loop of their own thread."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, cast

from console.link.protocol import ApiStatus, EngineLink
from console.link.status import LinkStatus, link_status
from console.runtime.output import say
from console.settings.schema import Settings, data_dir, state_dir
from console.settings.sources import Sources
from console.tui.modes import import_screens
from engine.errors import EngineError
from engine.snapshot import LogEntry, Snapshot
from engine.system.tasks import reduce_gc_pauses
from engine.worker_process.logs import NATIVE_LOGGER

if TYPE_CHECKING:
    from console.runtime.loading import ModelChoice
    from console.runtime.runtime import Runtime
    from console.tui.app import EricApp


# What libraries write to stderr past Python while a screen is drawn there.

_STDERR = 2
_MAX_LINE = 2000
_LAST_LINES_S = 1.0


@contextmanager
def native_stderr_logged() -> Iterator[None]:
    """Send to the log what libraries and child processes write to this process's stderr, such as a panic: it would
    garble the screen, unfiltered. Python's own stderr stays the terminal, which the screen is drawn in."""
    terminal = os.dup(_STDERR)
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)  # who writes may hold what the reader waits for: what finds no room is lost
    os.dup2(write_fd, _STDERR)
    os.close(write_fd)
    reader = threading.Thread(target=_log_lines, args=(read_fd,), name="native-stderr", daemon=True)
    reader.start()
    before = sys.stderr, sys.__stderr__
    encoding = getattr(sys.__stderr__, "encoding", None)
    with open(terminal, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False) as stream:
        sys.stderr = sys.__stderr__ = stream  # type: ignore[misc]
        try:
            yield
        finally:
            sys.stderr, sys.__stderr__ = before  # type: ignore[misc]
            os.dup2(terminal, _STDERR)
    os.close(terminal)
    reader.join(_LAST_LINES_S)  # a child process may still have the pipe


def _log_lines(read_fd: int) -> None:
    log = logging.getLogger(NATIVE_LOGGER)
    with open(read_fd, encoding="utf-8", errors="replace") as stream:
        while line := stream.readline(_MAX_LINE):
            if line := line.strip():
                log.warning("%s", line)


# OpeningLink: the link of an engine that is still being opened, so that the first frame need not wait for it.


class OpeningLink:
    """A link that polls empty until the engine is there; other calls wait for it, well under a second.

    opening: gives the link of the engine.  api: what is said of the HTTP server until then, model: that will be loaded.
    """

    def __init__(self, opening: Future[EngineLink], api: ApiStatus, model: str = "") -> None:
        self._opening = opening
        self._model = model
        self._api = api

    def snapshot(self) -> Snapshot:
        """That of the engine; one with nothing in it before."""
        link = self._link
        return link.snapshot() if link is not None else Snapshot(at=time.time())

    def api_status(self) -> ApiStatus:
        """That of the engine's server."""
        link = self._link
        return link.api_status() if link is not None else self._api

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """Those of the engine."""
        link = self._link
        return link.logs(after) if link is not None else (after, ())

    def standing(self) -> LinkStatus:
        """That of the engine; starting before."""
        link = self._link
        return link_status(link) if link is not None else LinkStatus(reach="starting", model=self._model)

    @property
    def _link(self) -> EngineLink | None:
        opening = self._opening
        return opening.result() if opening.done() and opening.exception() is None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opening.result(), name)


QUIT_PATIENCE_S = 0.1
"""Time for a worker to end by itself: quitting does not wait for one that hangs."""


def run_console(
    settings: Settings, choice: ModelChoice, sources: Sources, make_app: Callable[..., EricApp] | None = None
) -> int:
    """Open the console, and the engine with `choice` behind it; returns the exit code when the operator leaves.

    sources: what the settings were made from, for the screen that shows and saves them.
    make_app: what makes the app, with EricApp's arguments, where that is not EricApp itself.
    """
    from console.tui.app import EricApp

    with _Engine(settings, choice, sources) as engine:
        if settings.cluster != "local":  # which takes too long to have a screen wait for it
            say(f"joining the cluster {settings.cluster}")
            engine.open()
            engine.opened.result()
        link: Any = OpeningLink(
            engine.opened, ApiStatus(host=settings.host, port=settings.port), PurePath(choice.name).name
        )
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
        reduce_gc_pauses()
        with _recording(link, settings), native_stderr_logged():
            app.run()
    return app.return_code or 0


def _read_only(link: Any) -> EngineLink:
    from console.link.readonly import ReadOnlyLink
    from console.link.rpc import as_link

    return as_link(ReadOnlyLink(link))


def _recording(link: Any, settings: Settings) -> AbstractContextManager[object]:
    if settings.record is None:
        return contextlib.nullcontext()
    from console.link.recording.recorder import recording

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
        from console.runtime.loading import importing_workers
        from console.runtime.loops import LoopThread

        loop = LoopThread()
        self._left_behind.callback(loop.stop)
        forks = loop.submit(importing_workers(self._settings, self._choice)).result()
        if forks is not None:
            self._left_behind.callback(lambda: loop.submit(forks.close()).result())
        from console.link.local import LocalLink
        from console.runtime.logs import logging_to, own_log_folder
        from console.runtime.runtime import Runtime

        folder = self._left_behind.enter_context(own_log_folder())
        opening = Runtime.open(
            self._settings, log_dir=folder, state_dir=state_dir(), sources=self._sources, forks=forks
        )
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
