"""EricApp: the console's frame. It owns theme, keys, modes and the clock; screens do the rest through the link."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.actions import ActionParseResult
from textual.binding import Binding
from textual.command import CommandPalette, Provider
from textual.dom import DOMNode
from textual.screen import Screen

from console import text
from console.adviser import Adviser
from console.link.protocol import ApiStatus, EngineLink
from console.tui import keymap, modes
from console.tui.alerts import AlertWatch
from console.tui.binding_index import actions_with_calls
from console.tui.commands import BindingCommands, ThemeCommands
from console.tui.keymap import ConsoleBinding
from console.tui.preferences import Preferences
from console.tui.screens.base import AppScreen, ConsoleRow
from console.tui.stylesheet import StyledApp, Stylesheet
from console.tui.theme import AUTO_THEME, variable_defaults
from console.tui.view import View, next_model_key, num_waiting
from console.tui.widgets.glyphs import key_name, wants_ascii
from console.tuning.effects import Effects
from console.tuning.knobs import KnobName, Knobs, set_knob
from engine.errors import EngineError
from engine.snapshot import Alert, Snapshot

if TYPE_CHECKING:
    from console.tui.screens.dialogs import FinishOrCut, FinishOrCutScreen, KeepOrCut
    from console.tui.screens.tune.autotune_draft import TuneDraft


_ALERT = "Alert"
_MAX_ALERT_TOASTS = 3
"""Alerts that have a toast each where several come at once."""


# When to draw a snapshot: at once while requests run or something changed; else the clock each second, and the rest as
# often as its screen says.


def should_redraw(before: Snapshot | None, now: Snapshot, idle_s: int = 1) -> bool:
    """Return whether `now` must be drawn where `before` is on the screen; idle_s: seconds between two frames of an idle
    engine, enough for temperatures and loads."""
    if before is None or now.running or now.queued:
        return True
    return is_another_second(before, now, idle_s) or _doings(now) != _doings(before) or _stands_still(before, now)


def is_another_second(before: Snapshot, now: Snapshot, seconds: int = 1) -> bool:
    """Return whether a clock that counts in `seconds` has another time by `now`."""
    return now.at // seconds != before.at // seconds


def _unfinished(snapshot: Snapshot) -> int:
    """Requests that run, queue or wait for a load."""
    return snapshot.running + snapshot.queued + num_waiting(snapshot)


def _drain_title(snapshot: Snapshot) -> str:
    """The question whether to drain, with what becomes of the requests there are."""
    waiting, live = num_waiting(snapshot), snapshot.running + snapshot.queued
    if not live + waiting:
        return "Drain? No request is running."
    first = f"{'it finishes' if live == 1 else 'they finish'} first"
    refused = f"{waiting:,} waiting for a load {'is' if waiting == 1 else 'are'} refused"
    ends = ([first] if live else []) + ([refused] if waiting else [])
    found = f" {text.live_requests(snapshot.running, snapshot.queued)}:" if live else ""
    return f"Drain?{found} {', '.join(ends)}."


def _doings(snapshot: Snapshot) -> tuple[object, ...]:
    """Return what changes with work or commands alone."""
    return (
        snapshot.status,
        snapshot.models,
        snapshot.target_workers,
        snapshot.max_prompts,
        snapshot.totals,
        snapshot.log_total,
        snapshot.alerts,
        snapshot.draining_since,
        snapshot.running,
        snapshot.queued,
        [(worker.id, worker.state, worker.progress, worker.restarts) for worker in snapshot.workers],
    )


def _stands_still(before: Snapshot, now: Snapshot) -> bool:
    """Return whether another snapshot has the same time, as of a paused recording."""
    return now is not before and now.at == before.at


# Screens made ahead, so that a key shows one at once.

PRELOAD_PAUSE_S = 0.2
"""Pause between two screens, in which keys come first."""


def preload_screens(app: StyledApp, modes: Iterable[str]) -> None:
    """Make the screens of those modes of an app, one after another."""
    unmade = deque(modes)

    def make_next() -> None:
        if unmade:
            app.make_screen(unmade.popleft())
            app.set_timer(PRELOAD_PAUSE_S, make_next)

    make_next()


REFRESH_HZ = 4
PALETTE_GONE_S = 0.1
log = logging.getLogger(__name__)


def _styles() -> list[str | Path]:
    """All style sheets, the one with the variables that others use first."""
    sheets = Path(__file__).parent.rglob("*.tcss")
    return [*sorted(sheets, key=lambda sheet: (sheet.stem != "base", sheet.name))]


class EricApp(StyledApp, inherit_bindings=False):
    """The console over a link. theme, start: names of a theme and of a mode; unknown ones fall back to the first.

    chats: the file that conversations are kept in; None keeps them in memory.
    """

    TITLE = "EricLLM"
    CSS_PATH: ClassVar[list[str | Path]] = _styles()  # type: ignore[assignment]
    BINDINGS = keymap.BINDINGS  # type: ignore[assignment]
    MODES: ClassVar[dict[str, Any]] = {mode.name: mode.factory for mode in modes.MODES}
    DEFAULT_MODE = modes.MODES[0].name
    COMMANDS: ClassVar[set[type[Provider]]] = {BindingCommands}  # type: ignore[assignment]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (96, "-medium"), (126, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (28, "-regular"), (38, "-tall")]  # noqa: RUF012

    def __init__(
        self,
        link: EngineLink,
        *,
        theme: str | None = None,
        start: str | None = None,
        themes_folder: Path | None = None,
        chats: Path | None = None,
        refresh_hz: int = REFRESH_HZ,
        on_shown: Callable[[], object] = lambda: None,
        on_leaving: Callable[[], object] = lambda: None,
    ) -> None:
        self.link = link
        self.chats = chats
        self._refresh_hz = refresh_hz
        self._on_shown = on_shown
        self._on_leaving = on_leaving
        self._knobs = Knobs()
        self.effects = Effects()
        self.adviser = Adviser()
        self.alerts = AlertWatch()
        self.view = View.read(link)
        self._drawn: View | None = None
        self._quits_when_drained = False
        self._quit_question: FinishOrCutScreen | None = None
        self._start = start if start in self.MODES else None
        super().__init__()
        self.set_class(wants_ascii(), "-ascii")
        self.preferences = Preferences(self, themes_folder)
        self.preferences.apply_theme(theme or AUTO_THEME)
        self.stylesheet = Stylesheet(variables=self.get_css_variables())

    def get_key_display(self, binding: Binding) -> str:
        """The key in characters that the terminal has."""
        return key_name(self, super().get_key_display(binding))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our own CSS variables, derived from the theme in use."""
        return variable_defaults(self.current_theme)

    def on_load(self) -> None:
        """Read the engine before the first screen is there, and handle SIGTERM before the terminal is the console's."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.call_later, self.exit)
        self.set_class(self.read_view().link_status.stale, "-stale")
        self._follow(self.view)

    def on_mount(self) -> None:
        """Start the clock."""
        if self._start is not None:
            self.switch_mode(self._start)
        self.preferences.start()
        self._clock = self.set_interval(1 / self._refresh_hz, self._tick)

    def on_ready(self) -> None:
        """The first frame is on the screen."""
        self._on_shown()

    def exit(self, *arguments: Any, **options: Any) -> None:
        """Leave; what is behind the screens may begin to end meanwhile."""
        self._on_leaving()
        super().exit(*arguments, **options)

    def refresh_at(self, hertz: int) -> None:
        """Show new numbers that many times a second from now on."""
        self._clock.stop()
        self._clock = self.set_interval(1 / hertz, self._tick)

    def _tick(self) -> None:
        """Read the engine, and draw a frame where there is anything new to show."""
        before, drawn, view = self.view, self._drawn, self.read_view()
        idle_s = min((screen.idle_s for screen in self._seen_screens()), default=1)
        if (
            drawn is None
            or view.link_status != drawn.link_status
            or should_redraw(drawn.published, view.published, idle_s)
        ):
            self._draw(view)
        elif is_another_second(before.published, view.published):
            for screen in self._seen_screens():
                screen.draw_header(view)

    def read_view(self, model_key: str | None = None) -> View:
        """Read all that the next frame shows; key actions work on the same until then. model_key: for another model."""
        self.view = View.read(self.link, self.view.model_key if model_key is None else model_key)
        return self.view

    def refresh_screen(self) -> None:
        """Show the engine as it is now on the screen that is seen and on its covers; others catch up when opened."""
        self._draw(self.read_view())

    def _draw(self, view: View) -> None:
        """Draw one frame: of `view` alone."""
        self._drawn = view
        self.set_class(view.link_status.stale, "-stale")
        self._knobs.settled(view.snapshot)
        self._follow(view)
        for screen in self._seen_screens():
            screen.draw(view)

    def _seen_screens(self) -> Sequence[AppScreen[Any]]:
        """The screen in view and those that cover it."""
        stack = self.screen_stack if self.is_running else ()
        return [screen for screen in stack if isinstance(screen, AppScreen) and screen.is_mounted]

    def _follow(self, view: View) -> None:
        """Note what effects and advice are made of, whatever screen is seen."""
        self._show_alerts(self.alerts.follow(view))
        self.alerts.follow_log(view, self.link.logs)
        self.effects.look(view.snapshot)
        self.adviser.listen(view.snapshot)
        if self._quits_when_drained and view.published.draining_since is None:
            self._quits_when_drained = False  # resumed
        elif self._quits_when_drained and not _unfinished(view.published):
            self.exit()

    def _show_alerts(self, fresh: Sequence[Alert]) -> None:
        """Toast what went wrong just now, on whatever screen is seen."""
        if len(fresh) > _MAX_ALERT_TOASTS:
            self.notify(f"{len(fresh)} new alerts: A lists them.", severity="error")
            return
        for alert in fresh:
            if not any(toast.message in alert.text for toast in self._notifications):  # a command's error says it
                often = f" ({alert.count} times)" if alert.count > 1 else ""
                message = f"{alert.text}{often}\n{alert.done}".rstrip()
                self.notify(message, title=_ALERT, severity=alert.level, markup=False, timeout=10)

    # -- the model in view ---------------------------------------------------------------------------------------------

    def view_model(self, key: str) -> None:
        """Bring the model of that key into view."""
        self._knobs = Knobs()
        self._draw(self.read_view(key))

    def action_next_model(self) -> None:
        """Bring the next model into view."""
        self.view_model(next_model_key(self.view.published, self.view.model_key))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Another model can be brought into view where there is one; an attached console needs the API there, and
        autotune requests that are accepted."""
        if action == "toggle_api":
            return self.view.link_status.reach in ("here", "starting")
        if action == "autotune":
            return self.view.published.draining_since is None or self.link.tuning.report().under_way
        return len(self.view.published.models) > 1 if action == "next_model" else True

    async def on_event(self, event: events.Event) -> None:
        """Let the screen move the focus before a key of the terminal goes to it: keys stay in their order."""
        if isinstance(event, events.Key) and not event.is_forwarded and isinstance(self.screen, AppScreen):
            self.screen.before_key(event)
        await super().on_event(event)

    def _fatal_error(self) -> None:
        """A defect of the console: all of it goes to the log, one line to the person (Textual would print it all)."""
        log.exception("the console failed")
        self.panic("The console crashed. See the log for the cause. Running requests were terminated.")

    # -- commands to the engine --------------------------------------------------------------------------------------

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Run an action of a key, a link or the palette; where the other end would refuse it, say why."""
        node = default_namespace or self
        target, name, _ = self._parse_action(action, node, namespaces)
        if (binding := self._with_call(node, target, name)) is not None and (why := self.view.refusal(binding)):
            self.notify(why, severity="warning", markup=False)
            return True
        return await super().run_action(action, default_namespace, namespaces)

    def _with_call(self, node: DOMNode, target: DOMNode, name: str) -> ConsoleBinding | None:
        """Return the binding of that action, of the target, the node or the screen, that the other end may refuse."""
        namespace = "app" if target is self else "screen" if isinstance(target, Screen) else ""
        places = [("", target), *((namespace, each) for each in (node, self.screen) if namespace)]
        found = (actions_with_calls(type(each)).get((place, name)) for place, each in places)
        return next((binding for binding in found if binding is not None), None)

    def refuses_changes(self) -> bool:
        """Return whether this console changes nothing, and say why."""
        if self.view.is_read_only:
            self.notify(self.view.link_status.refusal, severity="warning", markup=False)
        return self.view.is_read_only

    def perform(self, command: Coroutine[Any, Any, object], *, done: str = "") -> None:
        """Run an engine command in the background; toast `done` afterwards, or why it failed."""
        self.run_worker(self._perform(command, done), group="commands", exit_on_error=False)

    async def _perform(self, command: Coroutine[Any, Any, object], done: str) -> bool:
        try:
            await command
        except EngineError as error:
            alerts = [toast.message for toast in self._notifications if toast.title == _ALERT]
            if not any(error.message in alert for alert in alerts):
                self.notify(error.message, severity="error", markup=False, timeout=8)
            return False
        if done:
            self.notify(done, markup=False)
        self.refresh_screen()
        return True

    def action_step(self, knob: KnobName, by: int) -> None:
        """Turn a knob by `by`."""
        self.turn(knob, self._knobs.step(self.view.snapshot, knob, by), self.view.model_name)

    def turn(self, knob: KnobName, target: float, model: str) -> None:
        """Set a knob of a model; "" is the only model, or the first."""
        self.run_worker(self._turn(knob, target, model), group="commands", exit_on_error=False)

    async def _turn(self, knob: KnobName, target: float, model: str) -> None:
        knobs = self._knobs
        if not await self._perform(set_knob(self.link, knob, target, model), ""):
            knobs.refused(knob)

    def action_toggle_api(self) -> None:
        """The HTTP API on or off."""
        from console.tui.screens.api.exposure import confirm_exposure

        api = self.link.api_status()
        if api.running:
            self._stop_api(api)
            return

        def start() -> None:
            self.perform(self.link.start_api(), done=f"The API listens on {api.url}")

        confirm_exposure(self, api.host, api, go=start)

    def _stop_api(self, api: ApiStatus) -> None:
        """Ask first where requests run or clients are connected."""
        from console.tui.screens.dialogs import ConfirmScreen, FinishOrCutScreen, KeepOrCutScreen

        rows = [row for row in self.view.published.requests if row.source == "api" and row.state != "finished"]
        queued = sum(row.state == "queued" for row in rows)
        waiting = num_waiting(self.view.published)
        live = text.live_requests(len(rows) - queued, queued, waiting)
        if not (rows or waiting or api.clients or api.connections or api.stopping):
            self._switch_api_off("cut")
        elif api.stopping:
            under_way = KeepOrCutScreen(
                f"API is stopping: {live}. It goes off after the last one.",
                "Keep it on: new requests are accepted again.\nCut off: clients get an error instead of the rest.",
                keep="Keep it on",
                cut="Cut them off now",
                no="Keep waiting",
            )
            self.push_screen(under_way, self._end_api_stop)
        elif rows or waiting:
            stopping = FinishOrCutScreen(
                f"{live}, {text.plural(api.clients, 'client')} in the last minute.",
                "Finish: new requests are refused, and the API goes off when\nthe last one has its answer. "
                "a can keep it on meanwhile.\n"
                "Cut off: clients get an error instead of the rest.",
                finish="Finish them first",
                cut="Cut them off now",
                no="Keep it on",
            )
            self.push_screen(stopping, lambda answer: self._switch_api_off(answer or ""))
        else:
            clients = f"{text.plural(api.clients, 'client')} in the last minute"
            connections = f"{text.plural(api.connections, 'connection')} {'is' if api.connections == 1 else 'are'} open"
            title = f"{connections}, {clients}. No request is running."
            question = ConfirmScreen(title, "New requests will be refused. Switch off?", yes="Switch off", no="Cancel")
            # Those that came while the question was open finish first.
            self.push_screen(question, lambda sure: self.perform(self._stop_api_now(finish=True)) if sure else None)

    def _switch_api_off(self, how: FinishOrCut) -> None:
        if how == "finish":
            self.notify("API is stopping: new requests refused, off when the last request finishes. a keeps it on.")
        if how:
            self.perform(self._stop_api_now(finish=how == "finish"))

    async def _stop_api_now(self, *, finish: bool) -> None:
        if await self.link.stop_api(finish=finish):
            self.notify("The API is off")

    def _end_api_stop(self, how: KeepOrCut | None) -> None:
        """Take back a stop that waits for requests, or wait no longer."""
        if how == "keep":
            self.perform(self.link.start_api(), done="The API stays on: new requests are accepted again")
        elif how == "cut":
            self._switch_api_off("cut")

    def action_toggle_drain(self) -> None:
        """Refuse new requests, or take them again; both after a question where the engine serves."""
        from console.tui.screens.dialogs import ConfirmScreen

        snapshot, api = self.view.published, self.link.api_status()
        drains = snapshot.draining_since is not None

        def go() -> None:
            if drains:
                self.perform(self.link.resume(), done="Accepting new requests again")
            else:
                self.perform(self.link.drain(), done="Draining: new requests are refused. D resumes.")

        if not (_unfinished(snapshot) or api.running):
            go()
            return
        if drains:
            question = ConfirmScreen(
                "Resume?", "New requests, from the API and from Chat, are accepted again.", yes="Resume", no="Cancel"
            )
        else:
            question = ConfirmScreen(
                _drain_title(snapshot),
                "New requests, from the API and from Chat, get a 503 until you resume with D.\n"
                "Models stay loaded; /ready says that the server is draining.",
                yes="Drain",
                no="Cancel",
            )
        self.push_screen(question, lambda sure: go() if sure else None)

    # -- screens ----------------------------------------------------------------------------------------------------

    def action_open(self, mode: str) -> None:
        """Go to a screen."""
        if (own := self.own_mode(mode)) != self.current_mode:
            self.switch_mode(own)

    async def action_at(self, mode: str, action: str) -> None:
        """Go to a screen, and do something there."""
        if (own := self.own_mode(mode)) != self.current_mode:
            await self.switch_mode(own)
        await self.run_action(action, self.screen)

    def make_screens_ahead(self) -> None:
        """Make all screens, one after another, with pauses for keys."""
        preload_screens(self, [self.own_mode(mode.name) for mode in modes.MODES])

    def own_mode(self, mode: str) -> str:
        """The mode that shows that screen of the engine in view."""
        return mode

    def extra_rows(self) -> Iterable[ConsoleRow]:
        """Rows above the footer of every screen, one of each for each screen."""
        return ()

    def action_help(self) -> None:
        """Keys and numbers, explained."""
        from console.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.screen))

    def action_doctor(self) -> None:
        """Show the doctor's findings about this machine."""
        from console.tui.screens.doctor.screen import DoctorScreen

        if not isinstance(self.screen, DoctorScreen):
            self.push_screen(DoctorScreen(self.link))

    def action_alerts(self) -> None:
        """Show the alerts."""
        from console.tui.screens.alerts.screen import AlertsScreen

        if not isinstance(self.screen, AlertsScreen):
            self.push_screen(AlertsScreen())

    def action_autotune(self) -> None:
        """Find the best settings of the model in view: what it is to go by first, then the Tune screen."""
        from console.tui.screens.tune.autotune import TuneFormScreen

        def go(begun: bool | None) -> None:
            if begun:
                self.action_open("tune")

        if self.link.tuning.report().under_way:
            self.action_open("tune")
        elif not isinstance(self.screen, TuneFormScreen):
            self.push_screen(TuneFormScreen(self.link, model=self.view.model_name, draft=self._tune_draft), go)

    @cached_property
    def _tune_draft(self) -> TuneDraft:
        """The last input of the autotune form."""
        from console.tui.screens.tune.autotune_draft import TuneDraft

        return TuneDraft()

    async def action_quit(self) -> None:
        """Quit; ask first when that would cut answers off, and offer to finish them."""
        from console.tui.screens.dialogs import FinishOrCutScreen

        published = self.view.published
        waiting = num_waiting(published)
        local = self.view.link_status.reach in ("here", "starting")
        if not local or not _unfinished(published) or self.screen is self._quit_question:
            self.exit()
            return
        refused = " and those waiting for a load" if waiting else ""
        self._quit_question = FinishOrCutScreen(
            f"Not finished: {text.live_requests(published.running, published.queued, waiting)}.",
            f"Finish: new requests{refused} are refused, and the console quits after the last one.\n"
            "Quit now: clients get an error, after what has been streamed.",
            finish="Finish them first",
            cut="Quit now",
            no="Cancel",
        )
        self.push_screen(self._quit_question, self._quit)

    def _quit(self, how: FinishOrCut | None) -> None:
        if how == "finish":
            self.notify("The console quits after the last request. D accepts new ones again.")
            self.perform(self._drain_to_quit())
        elif how == "cut":
            self.exit()

    async def _drain_to_quit(self) -> None:
        await self.link.drain()
        self._quits_when_drained = True

    def search_themes(self) -> None:
        """Choose a theme by name."""
        self.push_screen(CommandPalette(providers=[ThemeCommands], placeholder="Search for themes…"))

    def action_picture(self) -> None:
        """Save a picture of the screen, once the palette is off it."""
        self.set_timer(PALETTE_GONE_S, self._save_picture)

    def _save_picture(self) -> None:
        from console.tui.screens.save_dialog import save_file, suggested_path

        picture = self.export_screenshot()
        path = suggested_path(time.strftime("ericllm-%Y%m%d-%H%M%S.svg"))
        save_file(self, "Save the screenshot", path, lambda: picture.encode("utf-8", "replace"))
