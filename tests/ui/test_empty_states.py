"""What is said where there is nothing: only what is true, and only what can be done there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from console.link.protocol import ApiStatus
from console.link.status import LinkStatus
from console.tui.app import EricApp
from console.tui.screens.chat.input import ChatInput
from console.tui.screens.requests.table import empty_text
from console.tui.view import View
from engine.errors import EngineError
from engine.snapshot import ModelStatus, Snapshot
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, toasts, until

pytestmark = pytest.mark.long

READY = msgspec.structs.replace(scenes.cpu_idle(), requests=())
WAITING = "Waiting for requests at http://127.0.0.1:8100. Press c to copy a curl command"
ON = ApiStatus(running=True, port=8100)
FAILED = EngineError("port 8100 of 127.0.0.1 is taken").info


class Elsewhere(FakeLink):
    """A link that stands to its engine as a test says."""

    def __init__(self, standing: LinkStatus, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stands = standing

    def standing(self) -> LinkStatus:
        """As given."""
        return self.stands


@pytest.mark.parametrize("screen", ["dashboard", "requests"])
@pytest.mark.parametrize(
    ("standing", "snapshot", "api", "said"),
    [
        (
            LinkStatus(),
            READY,
            ON,
            f"{WAITING}, or press 3 to chat.",
        ),
        (
            LinkStatus(),
            READY,
            ApiStatus(),
            "No requests yet. The API is off: press a to switch it on, or press 3 to chat.",
        ),
        (LinkStatus(), READY, ApiStatus(error=FAILED), "The API is off (port 8100 of 127.0.0.1 is taken): press a to"),
        (
            LinkStatus(read_only=True, calls=frozenset()),
            READY,
            ON,
            f"{WAITING}.",
        ),
        (LinkStatus(read_only=True), READY, ApiStatus(), "No requests. The API is off."),
        (
            LinkStatus(reach="recording", read_only=True, name="night.rec"),
            READY,
            ON,
            "No requests at this time of the recording.",
        ),
        (LinkStatus(reach="starting", model="demo"), Snapshot(at=scenes.NOW), ApiStatus(), "Starting demo…"),
        (
            LinkStatus(reach="connecting", name="gpu1:8000"),
            Snapshot(at=scenes.NOW),
            ApiStatus(),
            "No data from gpu1:8000",
        ),
    ],
    ids=["on", "off", "failed", "read-only", "read-only, off", "recording", "starting", "connecting"],
)
async def test_without_requests_the_truth_is_said_and_what_can_be_done(
    screen: str, standing: LinkStatus, snapshot: Snapshot, api: ApiStatus, said: str
) -> None:
    app = EricApp(Elsewhere(standing, snapshot, api=api), start=screen)
    async with app.run_test(size=(160, 44)) as pilot:
        await pilot.pause()
        assert said in screen_text(app)


async def test_a_console_that_starts_offers_no_model_to_choose() -> None:
    app = EricApp(Elsewhere(LinkStatus(reach="starting", model="demo"), Snapshot(at=scenes.NOW), api=ApiStatus()))
    async with app.run_test(size=(160, 44)) as pilot:
        await pilot.pause()
        seen = screen_text(app)
        assert "◌ starting demo" in rows(app)[0]
        assert seen.count("Starting demo…") == 2  # workers and requests
        for words in ("no model", "No model", "API off"):
            assert words not in seen


@pytest.mark.parametrize(
    ("screen", "keys", "said", "absent"),
    [
        ("models", [], "◌ Starting demo…", ("○ no model", "Choose a model")),
        ("chat", [], "Starting demo…", ("no model",)),
        ("tune", ["f"], "Starting demo…", ("No model loaded",)),
        ("tune", ["s"], "Starting demo…", ("No model loaded",)),
        ("models", ["u"], "Starting demo…", ("No model loaded",)),
    ],
)
async def test_a_console_that_starts_says_so_on_every_screen(
    screen: str, keys: list[str], said: str, absent: tuple[str, ...]
) -> None:
    standing = LinkStatus(reach="starting", model="demo")
    app = EricApp(Elsewhere(standing, Snapshot(at=scenes.NOW), api=ApiStatus()), start=screen)
    async with app.run_test(size=(160, 44), notifications=True) as pilot:
        await until(pilot, lambda: app.current_mode == screen and app.screen.is_mounted)
        await pilot.pause()
        await pilot.press(*keys)
        await until(pilot, lambda: said in (toasts(app) if keys else screen_text(app)))
        assert [words for words in absent if words in screen_text(app)] == []


async def test_a_question_asked_while_the_engine_starts_is_kept_and_says_what_is_waited_for() -> None:
    standing = LinkStatus(reach="starting", model="demo")
    app = EricApp(Elsewhere(standing, Snapshot(at=scenes.NOW), api=ApiStatus()), start="chat")
    async with app.run_test(size=(160, 44), notifications=True) as pilot:
        await until(pilot, lambda: isinstance(app.focused, ChatInput))
        await pilot.press("h", "i", "enter")
        await until(pilot, lambda: toasts(app) == ["Starting demo… Your question is kept."])
        assert app.screen.query_one(ChatInput).text == "hi"


async def test_read_only_no_model_can_be_chosen() -> None:
    shown = msgspec.structs.replace(READY, status=ModelStatus(), workers=(), models=())
    app = EricApp(Elsewhere(LinkStatus(read_only=True), shown, api=ON))
    async with app.run_test(size=(160, 44)) as pilot:
        await pilot.pause()
        assert "No model loaded." in screen_text(app)
        assert "Press 2" not in screen_text(app)


@pytest.mark.parametrize("screen", ["dashboard", "requests"])
async def test_where_requests_are_waited_for_the_command_that_sends_one_stands_to_be_copied(screen: str) -> None:
    app = EricApp(FakeLink(READY, api=ON), start=screen)
    async with app.run_test(size=(160, 48)) as pilot:
        await until(pilot, lambda: WAITING in screen_text(app))
        assert "curl http://127.0.0.1:8100/v1/" in screen_text(app)


def test_a_link_that_is_being_opened_is_not_asked_for_a_command() -> None:
    starting = LinkStatus(reach="starting", model="demo")
    view = View(Snapshot(at=scenes.NOW), Snapshot(at=scenes.NOW), ON, starting)
    assert empty_text(view, lambda: pytest.fail("asked")) == "Starting demo…"
