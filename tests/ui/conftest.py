"""What every screen test stands on: no settings of the person who runs it, and one time zone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import textual.app
import textual.pilot
from textual.notifications import Notification

import console.tui.app
from console.tui.stylesheet import Parsed, Stylesheet
from tests.ui.idling import wait_for_idle


@pytest.fixture(autouse=True)
def a_neutral_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Own folders for configuration and data, UTC, a terminal that knows UTF-8 and does not animate."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="session")
def parsed() -> Parsed:
    """Every app of a run has the same CSS."""
    return {}


@pytest.fixture(autouse=True)
def css_parsed_once(monkeypatch: pytest.MonkeyPatch, parsed: Parsed) -> None:
    """Most of the time in which an app starts goes into parsing."""

    def stylesheet(*, variables: dict[str, str]) -> Stylesheet:
        return Stylesheet(variables=variables, parsed=parsed)

    monkeypatch.setattr(console.tui.app, "Stylesheet", stylesheet)


@pytest.fixture(autouse=True)
def toasts_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toast is there however long a test takes until it looks."""
    monkeypatch.setattr(Notification, "time_left", property(lambda notification: 3600.0))


@pytest.fixture(autouse=True)
def no_longer_idle_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a key, an app is waited for as long as it has something to do."""
    for module in (textual.app, textual.pilot):
        monkeypatch.setattr(module, "wait_for_idle", wait_for_idle)
