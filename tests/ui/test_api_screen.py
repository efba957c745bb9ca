"""The API screen: where it listens, who may ask and who does, what went wrong; and what its keys do about it."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input

from console.api.http.errors import CannotListen
from console.link.api import ApiReport, DialectReading, FailureCount, KeyLimits, KeyReading
from console.link.protocol import ApiStatus
from console.tui.app import EricApp
from console.tui.screens.api.forms import AddressScreen, KeyScreen, NewKeyScreen
from console.tui.screens.api.screen import ApiScreen, curl_line, place_line, traffic_line
from console.tui.screens.api.tables import ago, failures_title
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.widgets.graph import Graph
from console.tui.widgets.status_line import status_line
from console.tui.widgets.table import Table
from engine.errors import ErrorInfo
from tests.fakes import scenes
from tests.fakes.link import KEY, FakeLink
from tests.fakes.link_answers import REPORT
from tests.ui.seen import rows, screen_text, shows, until

SERVED = ApiStatus(running=True, clients=3, connections=5, requests=4120, key_required=True)
OPEN = ApiStatus(running=True, clients=3, connections=5, requests=4120)
CHAT, OFF = REPORT.dialects
TEXT = msgspec.structs.replace(OFF, on=True)


def link_of(served: ApiStatus = SERVED, report: ApiReport = REPORT) -> FakeLink:
    """A link whose server is so."""
    link = FakeLink(scenes.busy(), api=served)
    link.script["api.report"] = report
    return link


def an_app(link: FakeLink | None = None, **options: Any) -> EricApp:
    """The console on the API screen."""
    return EricApp(link or link_of(), start="api", **options)


async def seen(pilot: Pilot[None], words: str) -> None:
    """Wait until words are on the screen."""
    await until(pilot, lambda: words in screen_text(pilot.app))


async def asked(pilot: Pilot[None], screen: type[object]) -> None:
    """Wait until a question is in front."""
    await until(pilot, lambda: isinstance(pilot.app.screen, screen) and pilot.app.screen.is_mounted)
    await pilot.pause()


async def test_mouse_and_keys_read_the_requests_of_a_second() -> None:
    app = an_app()
    async with app.run_test(size=(160, 48)) as pilot:
        await seen(pilot, "requests/s")
        graph = app.screen.query_one(Graph)
        await pilot.hover(graph, offset=(graph.size.width - 1, 3))
        await until(pilot, lambda: graph.line(0).plain.startswith("■ requests/s 9"))
        assert "14:02:11" in str(app.screen.query_one("#api-graph").border_title)
        await pilot.hover("#keys-table")
        await pilot.press("left_parenthesis")
        await until(pilot, lambda: graph.line(0).plain.startswith("■ requests/s 9"))


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_mouse_and_keys_read_the_small_curve_of_the_head(size: tuple[int, int]) -> None:
    history = tuple(2 if second < 40 else 9 for second in range(60))
    app = an_app(link_of(report=msgspec.structs.replace(REPORT, per_second=history)))
    async with app.run_test(size=size) as pilot:
        await seen(pilot, "requests/min")
        y = next(y for y, row in enumerate(rows(app)) if "requests/min" in row)
        first = rows(app)[y].index("requests/min") + len("requests/min ")
        await pilot.hover(offset=(first + 29, y))
        assert " 9.0/s " in rows(app)[y]
        assert "API · 14:02:10, 1 s ago" in screen_text(app)
        await pilot.hover(offset=(first + 5, y))
        assert " 2.0/s " in rows(app)[y]
        assert "API · 14:01:22, 49 s ago" in screen_text(app)
        await pilot.hover("#keys-table")
        assert "/s " not in rows(app)[y]
        assert "s ago ─" not in screen_text(app)
        await pilot.press("left_parenthesis")
        await until(pilot, lambda: " 9.0/s " in rows(app)[y])
        await pilot.press("right_parenthesis")
        await until(pilot, lambda: "/s " not in rows(app)[y])


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40), (160, 50)])
async def test_the_essentials_are_seen_at_every_size(size: tuple[int, int]) -> None:
    async with an_app().run_test(size=size) as pilot:
        await seen(pilot, "● on")
        text = screen_text(pilot.app)
    for words in (
        "http://127.0.0.1:8000",
        "key required",
        "14 active",
        "214 requests/min",
        "3 failed/min",
        "c copy",
        "app",
        "settings",
        "admin",
        "OpenAI",
        "○ off",
        "10.0.0.17",
        "19 × 429 queue_full",
        "429",
    ):
        assert words in text, words


async def test_the_curl_line_is_copied_whole_and_names_the_variable_instead_of_the_key() -> None:
    async with an_app().run_test() as pilot:
        await seen(pilot, "c copy")
        await pilot.press("c")
        words = shlex.split(pilot.app.clipboard)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer $ERICLLM_API_KEY" in words
    assert '"NeuralHermes-7B"' in words[-1]


def test_the_curl_line_of_a_socket_names_its_file() -> None:
    line = curl_line("unix:/run/my ericllm.sock", "", dialects=[CHAT], with_key=False)
    assert shlex.split(line)[:4] == [
        "curl",
        "--unix-socket",
        "/run/my ericllm.sock",
        "http://localhost/v1/chat/completions",
    ]


def test_the_curl_line_fits_what_is_on_and_survives_a_shell() -> None:
    def line(*dialects: DialectReading, model: str = "it's", key: bool = False) -> list[str]:
        return shlex.split(curl_line("http://[::1]:80", model, dialects=dialects, with_key=key))

    off = msgspec.structs.replace(CHAT, on=False)
    assert line(off, TEXT)[1] == "http://[::1]:80/generate"
    assert line(CHAT, TEXT)[1] == "http://[::1]:80/v1/chat/completions"
    assert "it's" in line(CHAT)[-1]
    assert "model" not in line(CHAT, model="")[-1].partition("messages")[0]
    assert not any("Authorization" in word for word in line(CHAT))
    assert line(off) == line(DialectReading(name="silent", title="Without an example", routes=())) == []


async def test_panels_take_no_more_rows_than_they_have() -> None:
    idle = ApiReport(at=scenes.NOW, per_second=(0,) * 60, dialects=REPORT.dialects)
    async with an_app(link_of(OPEN, idle)).run_test(size=(100, 30)) as pilot:
        await seen(pilot, "No failed requests")
        heights = [pilot.app.screen.query_one(f"#{name}").size.height for name in ("keys", "clients", "failures")]
    assert heights == [1, 1, 1]


async def test_a_new_key_is_shown_once_and_can_be_copied() -> None:
    link = link_of()
    async with an_app(link).run_test() as pilot:
        await seen(pilot, "Keys")
        await pilot.press("w")
        await asked(pilot, KeyScreen)
        await pilot.press(*"ci", "tab", "down", "down", "space", "shift+tab", "enter")
        await asked(pilot, NewKeyScreen)
        assert KEY in screen_text(pilot.app)
        await pilot.press("c")
        assert pilot.app.clipboard == KEY
        await pilot.press("escape")
        await until(pilot, lambda: KEY not in screen_text(pilot.app))
        await until(pilot, lambda: "ci" in [row.key for row in _table(pilot, "keys").rows])
    assert ("make_key", {"name": "ci", "scopes": ("use", "load")}) in link.commands


async def test_a_key_with_limits_is_made_and_its_limits_are_told() -> None:
    link = link_of()
    async with an_app(link).run_test(notifications=True, size=(140, 40)) as pilot:
        await seen(pilot, "Keys")
        await pilot.press("w")
        await asked(pilot, KeyScreen)
        await pilot.press(*"ci", "tab", "tab", *"60", "tab", "tab", *"2", "enter")
        await asked(pilot, NewKeyScreen)
        await pilot.press("escape")
        await until(pilot, lambda: "ci" in [row.key for row in _table(pilot, "keys").rows])
        await pilot.press(*["down"] * 5, "enter")
        await seen(pilot, "60 requests/min, 2 concurrent")
    limits = KeyLimits(requests_per_min=60, concurrent=2)
    assert ("make_key", {"name": "ci", "scopes": ("use",), "limits": limits}) in link.commands


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ((), "Enter a name for the key."),
        (tuple("app"), "A key app already exists."),
        (("c", "i", "tab", "down", "space", "shift+tab"), "Select at least one scope."),
    ],
)
async def test_a_key_that_cannot_be_made_says_why_in_the_form(keys: tuple[str, ...], complaint: str) -> None:
    link = link_of()
    async with an_app(link).run_test() as pilot:
        await seen(pilot, "Keys")
        await pilot.press("w")
        await asked(pilot, KeyScreen)
        await pilot.press(*keys, "enter")
        await seen(pilot, complaint)
    assert "make_key" not in link.names()


async def test_a_key_is_revoked_after_a_question() -> None:
    link = link_of()
    async with an_app(link).run_test() as pilot:
        await seen(pilot, "grafana")
        await pilot.press("down", "down", "x")
        await asked(pilot, ConfirmScreen)
        assert "Revoke the key app?" in screen_text(pilot.app)
        await pilot.press("n")
        assert "revoke_key" not in link.names()
        await pilot.press("x")
        await asked(pilot, ConfirmScreen)
        await pilot.press("y")
        await until(pilot, lambda: ("revoke_key", {"name": "app"}) in link.commands)


async def test_revoking_the_last_key_says_what_follows() -> None:
    report = msgspec.structs.replace(REPORT, keys=(KeyReading(name="app", scopes=("use",)),))
    async with an_app(link_of(report=report)).run_test() as pilot:
        await seen(pilot, "app")
        await pilot.press("down", "x")
        await asked(pilot, ConfirmScreen)
        assert "This is the last key; without it no key is required." in screen_text(pilot.app)


async def test_the_settings_key_is_not_revoked_here() -> None:
    link = link_of()
    async with an_app(link).run_test(notifications=True, size=(140, 40)) as pilot:
        await seen(pilot, "settings")
        await pilot.press("down", "x")
        await seen(pilot, "That key comes from --api-key")
    assert "revoke_key" not in link.names()


async def test_a_dialect_is_switched_off_after_a_question_and_on_without_one() -> None:
    link = link_of()
    async with an_app(link).run_test() as pilot:
        await seen(pilot, "Dialects")
        await pilot.press("d", "d")
        await asked(pilot, ConfirmScreen)
        assert "Switch OpenAI off?" in screen_text(pilot.app)
        await pilot.press("y")
        await seen(pilot, "All dialects are off")
        await pilot.press("down", "enter")
        await until(pilot, lambda: link.names().count("switch_dialect") == 2)
        await seen(pilot, "/generate")
    assert [command for command in link.commands if command[0] == "switch_dialect"] == [
        ("switch_dialect", {"name": "openai", "on": False}),
        ("switch_dialect", {"name": "generate", "on": True}),
    ]


async def address(pilot: Pilot[None], host: str, port: str) -> None:
    """Ask for another address in the form."""
    await seen(pilot, "http://")
    await pilot.press("l")
    await asked(pilot, AddressScreen)
    pilot.app.screen.query_one("#host", Input).value = host
    pilot.app.screen.query_one("#port", Input).value = port
    await pilot.press("enter")


async def test_another_port_is_listened_on_at_once() -> None:
    link = link_of(OPEN)
    async with an_app(link).run_test() as pilot:
        await address(pilot, "127.0.0.1", "9000")
        await seen(pilot, "http://127.0.0.1:9000")
    assert ("listen", {"host": "127.0.0.1", "port": 9000}) in link.commands


async def test_what_is_no_address_is_complained_of_in_the_form() -> None:
    link = link_of(OPEN)
    async with an_app(link).run_test() as pilot:
        await address(pilot, "foo bar", "8000")
        await seen(pilot, "foo bar: not an address or host name.")
        assert isinstance(pilot.app.screen, AddressScreen)
    assert "listen" not in link.names()


async def test_opening_it_to_other_machines_without_a_key_is_refused() -> None:
    link = link_of(OPEN, msgspec.structs.replace(REPORT, keys=()))
    async with an_app(link).run_test(notifications=True, size=(140, 40)) as pilot:
        await address(pilot, "0.0.0.0", "8000")
        await seen(pilot, "--no-auth")
    assert "listen" not in link.names()


async def test_opening_it_to_other_machines_without_a_key_is_asked_about_where_that_was_allowed() -> None:
    link = link_of(msgspec.structs.replace(OPEN, no_auth=True), msgspec.structs.replace(REPORT, keys=()))
    async with an_app(link).run_test() as pilot:
        await address(pilot, "0.0.0.0", "8000")
        await asked(pilot, ConfirmScreen)
        assert "0.0.0.0 is reachable from the network, and no key is set." in screen_text(pilot.app)
        await pilot.press("n")
        assert "listen" not in link.names()
        await address(pilot, "0.0.0.0", "8000")
        await asked(pilot, ConfirmScreen)
        await pilot.press("y")
        await seen(pilot, "✖ open to the network without a key")


async def test_opening_it_to_other_machines_with_a_key_asks_nothing() -> None:
    link = link_of()
    async with an_app(link).run_test() as pilot:
        await address(pilot, "0.0.0.0", "8000")
        await until(pilot, lambda: "listen" in link.names())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_status_line_says_in_the_colour_of_errors_that_everybody_may_ask(width: int) -> None:
    served = ApiStatus(running=True, host="0.0.0.0", no_auth=True)
    for status, alarmed in ((served, True), (msgspec.structs.replace(served, key_required=True), False)):
        line = status_line(scenes.busy(), status, width)
        said = [line.plain[span.start : span.end] for span in line.spans if "$error" in str(span.style)]
        assert any("API" in each and "key" in each for each in said) == alarmed


async def test_switching_it_on_for_other_machines_without_a_key_is_asked_about() -> None:
    link = link_of(ApiStatus(running=False, host="0.0.0.0", no_auth=True))
    async with an_app(link).run_test() as pilot:
        await seen(pilot, "○ off")
        await pilot.press("a")
        await asked(pilot, ConfirmScreen)
        await pilot.press("y")
        await until(pilot, lambda: "start_api" in link.names())


async def test_an_address_that_cannot_be_had_is_told_and_nothing_changes() -> None:
    link = link_of()
    link.failures["listen"] = CannotListen("Cannot listen on 127.0.0.1 port 80: no permission for port 80")
    async with an_app(link).run_test(notifications=True, size=(140, 40)) as pilot:
        await address(pilot, "127.0.0.1", "80")
        await seen(pilot, "Cannot listen on 127.0.0.1 port 80")
        assert "http://127.0.0.1:8000" in screen_text(pilot.app)


@pytest.mark.parametrize(
    ("host", "port", "complaint"), [("", "80", "Enter an address"), ("::1", "70000", "0 to 65535")]
)
async def test_an_address_that_is_none_is_told_in_the_form(host: str, port: str, complaint: str) -> None:
    link = link_of()
    async with an_app(link).run_test() as pilot:
        await address(pilot, host, port)
        await seen(pilot, complaint)
    assert "listen" not in link.names()


async def test_enter_on_a_failure_tells_all_of_it() -> None:
    async with an_app().run_test(notifications=True, size=(140, 40)) as pilot:
        await seen(pilot, "queue_full")
        _table(pilot, "failures").focus()
        await pilot.press("down", "enter")
        await seen(pilot, "POST /v1/chat/completions from 10.0.0.17")


async def test_what_did_not_change_is_not_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with an_app().run_test(size=(120, 40)) as pilot:
        await seen(pilot, "queue_full")
        screen = pilot.app.screen
        assert isinstance(screen, ApiScreen)
        await pilot.pause()
        drawn: list[object] = []
        with monkeypatch.context() as patched:
            patched.setattr(Widget, "refresh", lambda self, *_, **__: drawn.append(self))
            screen.redraw()
        assert drawn == []


def test_a_server_that_failed_says_why() -> None:
    error = ErrorInfo(
        code="cannot_listen", message="Cannot listen on 127.0.0.1 port 8000: port in use by another program"
    )
    assert "port in use by another program" in place_line(ApiStatus(error=error), 140).plain


def test_less_is_said_where_there_is_less_room() -> None:
    wide, narrow, tiny = (traffic_line(REPORT, width, ascii_only=False).plain for width in (140, 65, 20))
    assert wide.endswith("3 failed/min   4,120 total")
    assert "requests/min" in narrow
    assert "failed" not in narrow
    assert tiny == "14 active"


def test_counts_of_failures_are_named_as_far_as_there_is_room() -> None:
    counts = [FailureCount(status=400 + at, code="a_code", count=9) for at in range(3)]
    assert failures_title(counts, 100).endswith("9 × 402 a_code")
    assert failures_title(counts, 45) == "Failures: 9 × 400 a_code and 2 more kinds"
    assert failures_title(counts, 10) == "Failures"
    assert failures_title((), 100) == "Failures"


def test_how_long_ago_is_told_in_one_unit() -> None:
    assert [ago(value) for value in (-1, 0, 59, 60, 3600, 90_000)] == ["0 s", "0 s", "59 s", "1 min", "1 h", "1 d"]


def _table(pilot: Pilot[None], panel: str) -> Table:
    assert isinstance(pilot.app.screen, ApiScreen)
    return pilot.app.screen.query_one(f"#{panel}-table", Table)


async def ready(pilot: Pilot[None]) -> None:
    await seen(pilot, "http://")


def test_the_api_looks_right(snap_compare: Any) -> None:
    async def one_down(pilot: Pilot[None]) -> None:
        await ready(pilot)
        await pilot.press("down")
        await pilot.pause()

    app = an_app(link_of(SERVED), theme="ericllm-dark")
    assert snap_compare(app, terminal_size=(120, 40), run_before=one_down)


@pytest.mark.parametrize("size", [(80, 24), (160, 45)])
def test_every_panel_has_its_first_rows_whatever_the_size(size: tuple[int, int]) -> None:
    app = an_app(link_of(SERVED))
    head = "● on", "✓ key required", "214 requests/min", "c copy: curl http://127.0.0.1:8000/v1/chat/completions"
    keys, clients = ("Keys", "settings", "admin", "--api-key"), ("Clients", "10.0.0.17")
    panels = ("Keys", "Clients", "settings", "10.0.0.17") if size[0] > 120 else (*keys, *clients)
    dialects = "Dialects", "OpenAI", "/v1/models", "c Copy curl", "^p palette"
    failures = "Failures: 19 × 429 queue_full", "14:02:02     429  queue_full", *dialects
    assert shows(app, *head, *panels, *failures, terminal_size=size, run_before=ready)


def test_the_form_of_a_key_covers_the_screen() -> None:
    form = (
        "New key",
        "name",
        "✓ use",
        "○ load",
        "○ watch",
        "○ admin",
        "requests/min  any",
        "Create (enter)     Cancel (esc)",
        "EricLLM and vLLM",
    )
    assert shows(an_app(link_of(OPEN)), *form, terminal_size=(120, 40), run_before=ready, press=["w"])


def test_the_form_of_an_address_fits_a_small_terminal() -> None:
    form = (
        "Listen address",
        "address  127.0.0.1",
        "port     8000",
        "0.0.0.0: the network",
        "Listen (enter)     Cancel (esc)",
    )
    assert shows(an_app(link_of(SERVED)), *form, terminal_size=(80, 24), run_before=ready, press=["l"])
