"""The console on instances elsewhere: whose it is, a connection that is lost, several at once, and read-only."""

from __future__ import annotations

import msgspec
import pytest

from console.link.readonly import ReadOnlyLink
from console.link.rpc import as_link
from console.link.status import LinkStatus
from console.tui.app import EricApp
from console.tui.attached_app import AttachedApp
from console.tui.screens.attach.instances import InstancesScreen
from console.tui.widgets.status_line import status_line
from tests.fakes import scenes
from tests.fakes.elsewhere import FakeRemote
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, shows, toasts, until

pytestmark = pytest.mark.long

LOST = "10.0.0.7:8000 cannot be reached: connection refused"


def two() -> tuple[FakeRemote, FakeRemote]:
    other = msgspec.structs.replace(scenes.busy(), queued=41, status=scenes.ready_status("Qwen3-8B"))
    return FakeRemote("10.0.0.7:8000"), FakeRemote("10.0.0.8:8000", other)


async def test_the_top_line_says_whose_engine_it_is() -> None:
    app = AttachedApp([FakeRemote("10.0.0.7:8000")])
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "EricLLM · 10.0.0.7:8000 · NeuralHermes-7B" in rows(app)[0]
        assert "10.0.0.8" not in screen_text(app)


async def test_a_lost_connection_is_told_marks_what_is_old_and_comes_back() -> None:
    link = FakeRemote("10.0.0.7:8000")
    app = AttachedApp([link])
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        link.lose(LOST)
        await until(pilot, lambda: "✖ connection lost, trying again in 2 s: " + LOST in rows(app)[0])
        assert app.has_class("-stale")
        assert "req-0000" in screen_text(app)
        link.come_back()
        await until(pilot, lambda: "● ready" in rows(app)[0])
        assert not app.has_class("-stale")


async def test_what_is_old_is_marked_from_the_first_frame_on() -> None:
    link = FakeRemote("10.0.0.7:8000")
    link.lose(LOST)
    app = AttachedApp([link], refresh_hz=1)
    async with app.run_test(size=(80, 24)):
        assert app.has_class("-stale")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (LinkStatus(name="gpu.example.org:8000", reach="lost", reason=LOST, retry_in_s=1.2), "connection lost"),
        (LinkStatus(name="gpu.example.org:8000", reach="connecting"), "connecting"),
        (LinkStatus(name="gpu.example.org:8000", reach="refused", reason="That key is not valid here"), "refused"),
    ],
)
def test_how_the_connection_is_fits_every_width(width: int, standing: LinkStatus, words: str) -> None:
    line = status_line(scenes.busy(), FakeLink().api_status(), width, standing)
    assert line.cell_length == width
    assert words in line.plain
    assert line.plain.endswith("14:02:11")


async def test_another_instance_comes_into_view_with_screens_of_its_own() -> None:
    first, second = two()
    app = AttachedApp([first, second])
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await pilot.press("I")
        await until(pilot, lambda: "10.0.0.8:8000 · Qwen3-8B" in rows(app)[0])
        assert "queued 41" in screen_text(app)
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: bool(second.commands))
        assert (first.names(), second.names()) == ([], ["reconfigure"])
        await pilot.press("I")
        await until(pilot, lambda: "10.0.0.7:8000" in rows(app)[0])
        assert app.current_mode == "models"


async def test_all_instances_are_on_a_row_and_in_a_list_with_how_they_are() -> None:
    first, second = two()
    second.lose(LOST)
    app = AttachedApp([first, second])
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "10.0.0.8:8000  ✖ lost" in screen_text(app))
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(app.screen, InstancesScreen))
        await until(pilot, lambda: LOST[:30] in screen_text(app))
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: "10.0.0.8:8000" in rows(app)[0])


async def test_instances_are_clicked() -> None:
    app = AttachedApp(two())
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "10.0.0.8:8000" in screen_text(app))
        row = next(number for number, text in enumerate(rows(app)) if "10.0.0.8:8000" in text)
        await pilot.click(offset=(rows(app)[row].index("10.0.0.8") + 2, row))
        await until(pilot, lambda: "Qwen3-8B" in rows(app)[0])


async def test_leaving_a_distant_engine_ends_nothing_and_asks_nothing() -> None:
    app = AttachedApp([FakeRemote("10.0.0.7:8000")])
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("q")
        await pilot.pause()
        assert app._exit


async def test_read_only_shows_all_and_refuses_every_command_with_one_sentence() -> None:
    link = FakeLink()
    app = EricApp(as_link(ReadOnlyLink(link)))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "EricLLM · read-only · NeuralHermes-7B" in rows(app)[0]
        await pilot.press("right_square_bracket", "a")
        await pilot.pause()
        app.perform(app.link.unload())
        said = "This console is read-only: it shows everything and changes nothing"
        await until(pilot, lambda: said in toasts(app))
        assert link.commands == []


async def test_read_only_offers_no_key_that_orders_something() -> None:
    app = EricApp(as_link(ReadOnlyLink(FakeLink())))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "q Quit" in rows(app)[-1])
        assert "i Worker" in rows(app)[-1]
        for order in ("x Cancel", "a API", "[] Workers", "-+ Max prompts"):
            assert order not in rows(app)[-1]


def test_an_attached_console_looks_right(snap_compare: object) -> None:
    assert snap_compare(AttachedApp(two()), terminal_size=(120, 40))  # type: ignore[operator]


def test_a_lost_connection_is_at_the_top_and_in_the_row_of_a_small_terminal() -> None:
    first, second = two()
    first.lose(LOST)
    words = "10.0.0.7:8000", "✖ connection lost", "1 Dashboard", "Workers", "Requests", "10.0.0.7:8000", "✖ lost"
    assert shows(AttachedApp([first, second]), *words, "10.0.0.8:8000", "● ready", terminal_size=(80, 24))


def test_the_list_of_instances_covers_the_screen() -> None:
    first, second = two()
    second.lose(LOST)
    words = "Instances", "instance", "state", "model", "queued", "10.0.0.7:8000", "● ready", "10.0.0.8:8000", "✖ lost"
    assert shows(AttachedApp([first, second]), *words, "⏎ Open", terminal_size=(120, 40), press=["f9", "down"])
