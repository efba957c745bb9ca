"""Opening the console on what is not an engine of this process: instances elsewhere, or a recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from console.link.readonly import ReadOnlyLink
from console.link.recording.link import ReplayLink
from console.link.remote.link import RemoteLink
from console.link.rpc import as_link
from console.runtime.logs import logging_to, own_log_folder
from console.runtime.output import redirected_stream
from console.settings.schema import APP_NAME, data_dir
from console.settings.sources import load_settings
from console.tui.terminal import native_stderr_logged
from engine.errors import InvalidRequest
from engine.system.log import LogRing
from engine.system.tasks import reduce_gc_pauses


def show_instances(links: Sequence[RemoteLink], theme: str | None, *, read_only: bool) -> int:
    """The console on instances; returns the exit code when the operator leaves."""
    options = _options(theme)
    from console.tui.attached_app import AttachedApp

    shown = [as_link(ReadOnlyLink(as_link(link)) if read_only else link) for link in links]
    return _run(AttachedApp(shown, chats=data_dir() / "chats.db", **options))


def show_recording(link: ReplayLink, theme: str | None) -> int:
    """The console on a recording; returns the exit code when the operator leaves."""
    options = _options(theme)
    from console.tui.replay_app import ReplayApp

    return _run(ReplayApp(link, **options))


def _options(theme: str | None) -> dict[str, Any]:
    """How this person likes the console. Raises InvalidRequest for bad settings, and where there is no terminal."""
    if stream := redirected_stream():
        how = f"'{APP_NAME} top' prints the state of an instance in one line"
        raise InvalidRequest(f"{stream} is not a terminal; {how}")
    settings = load_settings({} if theme is None else {"theme": theme})
    return {"theme": settings.theme, "refresh_hz": settings.refresh_hz}


def _run(app: Any) -> int:
    with own_log_folder() as folder, logging_to(LogRing(), folder), native_stderr_logged():
        reduce_gc_pauses()
        app.run()
    return int(app.return_code or 0)
