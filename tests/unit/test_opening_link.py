"""The link of an engine that is still being opened."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from console.link.protocol import ApiStatus, EngineLink
from console.link.status import LinkStatus, link_status
from console.tui.terminal import OpeningLink
from engine.snapshot import Snapshot
from tests.fakes.link import FakeLink


def test_until_the_engine_is_there_a_screen_sees_nothing_and_waits_for_nothing() -> None:
    link = OpeningLink(Future(), ApiStatus(port=8123))
    snapshot = link.snapshot()
    assert (snapshot.workers, snapshot.models, snapshot.at > 0) == ((), (), True)
    assert (link.api_status().running, link.api_status().port) == (False, 8123)
    assert link.logs(7) == (7, ())
    assert link_status(link) == LinkStatus(reach="starting")


def test_then_it_is_the_engines_own() -> None:
    opening: Future[EngineLink] = Future()
    link, engine = OpeningLink(opening, ApiStatus()), FakeLink()
    opening.set_result(engine)
    assert link.snapshot() is engine.snapshot()
    assert link.api_status() == engine.api_status()
    assert link.logs() == engine.logs()
    assert link.settings is engine.settings
    assert link_status(link) == LinkStatus()


def test_who_asks_for_more_waits_for_the_engine() -> None:
    opening: Future[EngineLink] = Future()
    link, engine = OpeningLink(opening, ApiStatus()), FakeLink()
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(link.models))
    asking.start()
    opening.set_result(engine)
    asking.join(60)
    assert found == [engine.models]


def test_an_engine_that_could_not_be_opened_shows_nothing() -> None:
    opening: Future[EngineLink] = Future()
    opening.set_exception(RuntimeError("no"))
    assert isinstance(OpeningLink(opening, ApiStatus()).snapshot(), Snapshot)
