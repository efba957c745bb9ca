"""What is said where there is nothing: only what is true, and only what can be done there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from console.link.protocol import ApiStatus
from console.link.status import LinkStatus
from console.tui.app import EricApp
from engine.errors import EngineError
from engine.snapshot import ModelStatus, Snapshot
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text

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
            LinkStatus(read_only=True),
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


async def test_read_only_no_model_can_be_chosen() -> None:
    shown = msgspec.structs.replace(READY, status=ModelStatus(), workers=(), models=())
    app = EricApp(Elsewhere(LinkStatus(read_only=True), shown, api=ON))
    async with app.run_test(size=(160, 44)) as pilot:
        await pilot.pause()
        assert "No model loaded." in screen_text(app)
        assert "Press 2" not in screen_text(app)
