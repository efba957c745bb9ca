"""Engine and API without a screen: one line per event on stderr. SIGINT, SIGTERM and the terminal's end drain and
leave; where there is no terminal, SIGHUP has config.toml read again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from console.runtime.loading import ModelChoice, importing_workers
from console.runtime.logs import logging_to, own_log_folder
from console.settings.schema import APP_NAME, Settings, state_dir
from console.settings.sources import Sources
from engine.errors import EngineError
from engine.models.files import is_file
from engine.system.tasks import reduce_gc_pauses, run_detached
from engine.text.printable import printable

if TYPE_CHECKING:
    from console.runtime.runtime import Runtime
    from engine.worker_process.fork_server import ForkServer

_FAILED, _CANNOT_BE = 1, 2
_RED, _PLAIN = "\x1b[1;31m", "\x1b[0m"


def run_headless(settings: Settings, choice: ModelChoice, sources: Sources) -> int:
    """Serve until a signal comes; returns 0, or 1 where API or model could not be started, or 2 where nothing may be
    served by these settings.

    sources: what the settings were made from, for who asks over HTTP.
    """
    return asyncio.run(_serve(settings, choice, sources))


async def _serve(settings: Settings, choice: ModelChoice, sources: Sources) -> int:
    forks = await importing_workers(settings, choice)
    try:
        return await _serve_with(forks, settings, choice, sources)
    finally:
        if forks is not None:
            await forks.close()


async def _serve_with(forks: ForkServer | None, settings: Settings, choice: ModelChoice, sources: Sources) -> int:
    from console.api.http.errors import Unprotected
    from console.link.recording.recorder import recording
    from console.runtime.runtime import Runtime

    if settings.cluster != "local":
        _say(f"joining the cluster {settings.cluster}")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(own_log_folder())
        try:
            runtime = await Runtime.open(settings, log_dir=folder, state_dir=state_dir(), sources=sources, forks=forks)
        except EngineError as error:
            _say(error.message)
            return _FAILED
        stop = _Stop(lambda: run_detached(_reload(runtime)))
        level = settings.effective_log_level
        stack.enter_context(
            logging_to(runtime.engine.log, folder, level=level, stderr="warning" if settings.quiet else level)
        )
        try:
            await runtime.start()
            if settings.api:
                status = runtime.api_status()
                _say(f"listening on {status.url}")
                if status.is_open:
                    _say(
                        f"--no-auth: anyone who can connect to {status.url} can use the API without a key",
                        alarming=True,
                    )
            with recording(runtime.link(), settings.record):
                if not await _load(runtime, choice, stop):
                    return 0
                _say(f"{choice.name} is ready")
                reduce_gc_pauses()
                await stop.asked.wait()
        except EngineError as error:
            _say(error.message)
            return _CANNOT_BE if isinstance(error, Unprotected) else _FAILED
        finally:
            await _close(runtime, stop, settings.drain_seconds)
    return 0


async def _load(runtime: Runtime, choice: ModelChoice, stop: _Stop) -> bool:
    """Load the model, or give up when asked to stop; whether it is loaded."""
    loading = asyncio.ensure_future(runtime.load(choice))
    asked = asyncio.ensure_future(stop.asked.wait())
    await asyncio.wait((loading, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not loading.done():
        await runtime.cancel_load()
        await asyncio.wait((loading,))
        return loading.exception() is None
    await loading
    return True


async def _close(runtime: Runtime, stop: _Stop, drain_s: float) -> None:
    """Drain; a second signal ends the wait."""
    _say("stopping")
    draining = asyncio.ensure_future(runtime.close(drain_s=drain_s))
    hurried = asyncio.ensure_future(stop.hurried.wait())
    await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await runtime.close(drain_s=0.0)
    hurried.cancel()


async def _reload(runtime: Runtime) -> None:
    """Use what config.toml says now, and say what that changed."""
    try:
        used, later = await runtime.live_settings.reload()
    except EngineError as error:
        _say(f"settings unchanged: {error.message}", alarming=True)
        return
    for how, names in (("applied", used), ("applies to the next load or start", later)):
        if names:
            _say(f"{runtime.live_settings.path()} reloaded; {how}: {', '.join(names)}")
    if not used and not later:
        has_file = is_file(Path(runtime.live_settings.path()))
        _say(f"{runtime.live_settings.path()} {'was reloaded' if has_file else 'does not exist'}; no changes")


class _Stop:
    """SIGINT and SIGTERM: the first asks to leave, the second to hurry. So does the terminal's end, unless that is
    ignored (nohup); it may come twice and never hurries. Where there is no terminal, SIGHUP asks to reload.
    """

    def __init__(self, reload: Callable[[], object]) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.asked.set if _has_terminal() else reload)

    def _signal(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


def _has_terminal() -> bool:
    """Return whether this process gets SIGHUP at the end of its terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _say(line: str, *, alarming: bool = False) -> None:
    """A line on stderr, in the terminal's red where it is alarming; dropped where its reader is gone (a closed
    terminal, a pipe). Written at once with its end: the log writes there from another thread."""
    text = f"{APP_NAME}: {printable(line)}"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{_RED}{text}{_PLAIN}\n" if alarming and sys.stderr.isatty() else f"{text}\n")
        sys.stderr.flush()
