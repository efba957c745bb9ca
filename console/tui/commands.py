"""The palette: common commands first, then every binding of ours that means something here; and the entries of help."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from textual.actions import parse
from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.dom import DOMNode
from textual.keys import key_to_character
from textual.screen import Screen
from textual.theme import BUILTIN_THEMES
from textual.types import IgnoreReturnCallbackType

from console.link.status import LinkStatus, link_status
from console.tui.keymap import ALERTS, API_SWITCH, DRAIN, KNOBS, ConsoleBinding
from console.tui.screens.base import AppScreen


def _command(id: str, title: str, action: str, about: str, *, mutates: bool = False, call: str = "") -> ConsoleBinding:
    """Return a command without a key of its own. id: of the binding that does it where a screen has one."""
    return ConsoleBinding("", action, about, id=id, tooltip=title, mutates=mutates, call=call)


COMMANDS: tuple[Binding, ...] = (
    _command("models.load", "Load a model…", "app.open('models')", "Choose one on Models", mutates=True),
    _command("models.unload", "Unload a model…", "app.open('models')", "Choose one on Models", mutates=True),
    _command("worker.restart", "Restart a worker…", "app.at('dashboard', 'workers')", "Choose one", mutates=True),
    API_SWITCH,
    DRAIN,
    _command("request.cancel", "Cancel a request…", "app.open('requests')", "Choose one on Requests", mutates=True),
    *KNOBS,
    _command("logs.export", "Export the log…", "app.at('logs', 'export')", "Save it to a file"),
    _command(
        "tune.bench", "Benchmark…", "app.at('tune', \"show('benchmarks')\")", "Run benchmarks; plot and compare results"
    ),
    _command("tune.find", "Autotune…", "app.autotune", "Find the best settings by measurement", mutates=True),
    ALERTS,
    _command("open.settings", "Go to Settings", "app.open('settings')", ""),
    _command("theme", "Theme…", "app.change_theme", "Change the colours"),
    _command("doctor", "Doctor", "app.doctor", "Check this machine and its install", call="engine.diagnose"),
    _command("screenshot", "Screenshot", "app.picture", "Save a screenshot (SVG)"),
    _command("quit", "Quit the console", "app.quit", ""),
)
"""Common commands of every screen, in order of use."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing to do. keys: all that do it, as shown to a person, "" where none does.  node: whose it is.

    id: of its first binding. moves: it only moves about, so the palette leaves it out. about: what it does, where the
    title does not say.
    """

    title: str
    keys: str
    action: str
    node: DOMNode
    id: str = ""
    moves: bool = False
    about: str = ""

    @property
    def hint(self) -> str | None:
        """Its keys, for the palette; else what it does."""
        return f"key {self.keys}" if self.keys else self.about or None


def help_entries(screen: Screen[object]) -> list[Entry]:
    """Return an entry for each thing that a key does here and now: of the focused widget, the screen, the console. A
    key that the whole screen takes as text does nothing else there."""
    active = [(each.node, each.binding) for each in screen.active_bindings.values() if each.enabled and each.binding.id]
    return list(_merged(screen, [(node, binding, True) for node, binding in active if not _is_text(screen, binding)]))


def entries(screen: Screen[object]) -> Iterator[Entry]:
    """Yield an entry per binding with an id: first those of the focused widget, then the screen's, then the console's.

    Keys that are text to a box with the focus count too, those that the whole screen takes as text do not.
    """
    found = [
        (node, binding, not _is_text(screen, binding))
        for node, binding in _bindings(screen)
        if binding.id is not None and not binding.system and _is_offered(screen, node, binding)
    ]
    yield from _merged(screen, found)


def _is_text(screen: Screen[object], binding: Binding) -> bool:
    """Return whether the whole screen takes the key as text."""
    return screen.check_consume_key(binding.key, key_to_character(binding.key))


def palette_entries(screen: Screen[object]) -> Iterator[Entry]:
    """Yield the common commands in order of use, then all other entries of the screen. A binding of the screen that
    does what a command does stands in its place."""
    found = list(entries(screen))
    app = screen.app
    status = link_status(getattr(app, "link", None))
    for command in () if screen.is_modal else COMMANDS:
        own = next((each for each in found if command.id == each.id or command.tooltip == each.title), None)
        if own is not None:
            found.remove(own)
            yield own
        elif _can(app, command.action) and not _refusal(status, command):
            about = "" if command.key else command.description
            yield Entry(command.tooltip, "", command.action, app, command.id or "", about=about)
    yield from found


def _refusal(status: LinkStatus, command: Binding) -> str:
    """Return why the link refuses a command; "" where it does not."""
    return status.refusal_of(command.call, changes=command.mutates) if isinstance(command, ConsoleBinding) else ""


def _merged(screen: Screen[object], bindings: Iterable[tuple[DOMNode, Binding, bool]]) -> Iterator[Entry]:
    """Yield an entry for each title, with all keys that do it. bool: the key works here."""
    keys: dict[str, list[str]] = {}
    first: dict[str, tuple[DOMNode, Binding]] = {}
    for node, binding, works in bindings:
        title = binding.tooltip or binding.description
        first.setdefault(title, (node, binding))
        shown = keys.setdefault(title, [])
        if works:
            shown.append(screen.app.get_key_display(binding))
    for title, (node, binding) in first.items():
        shown_keys = " or ".join(dict.fromkeys(keys[title]))
        yield Entry(title, shown_keys, binding.action, node, binding.id or "", binding.system)


def _bindings(screen: Screen[object]) -> Iterator[tuple[DOMNode, Binding]]:
    """From the focus outwards, as keys are looked up, in a person's own keys. `active_bindings` leaves out those that
    are text to the box with the focus."""
    app, focused = screen.app, screen.focused
    for node in (screen, app) if focused is None else focused.ancestors_with_self:
        bindings = node._bindings.copy()
        bindings.apply_keymap(app._keymap)
        yield from ((node, binding) for _, binding in bindings)
        if node.is_modal:
            return


def _is_offered(screen: Screen[object], node: DOMNode, binding: Binding) -> bool:
    """Return whether the binding would do anything now."""
    return _can(node, binding.action) and (not isinstance(screen, AppScreen) or screen.offers(node, binding))


def _can(node: DOMNode, action: str) -> bool:
    """Return whether the action would do anything now."""
    namespace, name, parameters = parse(action)
    target = {"app": node.app, "screen": node.screen}.get(namespace, node)
    return target.check_action(name, parameters) is True


class _Listed(Provider):
    """Commands in the order of a list while nothing is typed, and those that match after that."""

    @abstractmethod
    def listed(self) -> Iterable[tuple[str, IgnoreReturnCallbackType, str | None]]:
        """Return title, what it calls, and the line below."""

    async def discover(self) -> Hits:
        """All of them, before anything was typed."""
        for title, call, about in self.listed():
            yield DiscoveryHit(title, call, help=about)

    async def search(self, query: str) -> Hits:
        """Those that match."""
        matcher = self.matcher(query)
        for title, call, about in self.listed():
            if (score := matcher.match(title)) > 0:
                yield Hit(score, matcher.highlight(title), call, help=about)


class BindingCommands(_Listed):
    """Commands of the screen beneath the palette, and of the app."""

    def listed(self) -> Iterable[tuple[str, IgnoreReturnCallbackType, str | None]]:
        """The palette's entries."""
        for entry in palette_entries(self.screen):
            yield entry.title, partial(self.app.run_action, entry.action, default_namespace=entry.node), entry.hint


class ThemeCommands(_Listed):
    """The themes: the program's own and a person's own; those of Textual are only found by their names."""

    async def discover(self) -> Hits:
        """Ours, before anything was typed."""
        for title, call, about in self.listed():
            if about is None:
                yield DiscoveryHit(title, call)

    def listed(self) -> Iterable[tuple[str, IgnoreReturnCallbackType, str | None]]:
        """By name."""
        for name in sorted(self.app.available_themes, key=lambda name: (name in BUILTIN_THEMES, name)):
            yield (
                name,
                partial(setattr, self.app, "theme", name),
                "a theme of Textual" if name in BUILTIN_THEMES else None,
            )
