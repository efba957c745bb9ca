"""The palette: every binding of ours that means something here is an entry, so a key can never lack one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from textual.actions import parse
from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.dom import DOMNode
from textual.keys import key_to_character
from textual.screen import Screen
from textual.types import IgnoreReturnCallbackType

from console.link.status import link_status
from console.tui.binding_index import mutating_ids


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing to do. keys: all that do it, as shown to a person, "" where none does.  node: whose it is."""

    title: str
    keys: str
    action: str
    node: DOMNode

    @property
    def hint(self) -> str | None:
        """Its keys, for the palette."""
        return f"key {self.keys}" if self.keys else None


def entries(screen: Screen[object], *, moving: bool = False) -> Iterator[Entry]:
    """Yield an entry per binding with an id: first those of the focused widget, then the screen's, then the
    console's. Keys that are text to a box with the focus count too, those that the whole screen takes as text do not.
    A read-only link leaves out those that change the engine. moving: with those that only move about."""
    read_only = link_status(getattr(screen.app, "link", None)).read_only
    keys: dict[str, list[str]] = {}
    first: dict[str, tuple[DOMNode, Binding]] = {}
    for node, binding in _bindings(screen):
        if read_only and binding.id in mutating_ids(type(node)):
            continue
        if binding.id is not None and (moving or not binding.system) and _can(node, binding.action):
            title = binding.tooltip or binding.description
            first.setdefault(title, (node, binding))
            shown = keys.setdefault(title, [])
            if not screen.check_consume_key(binding.key, key_to_character(binding.key)):
                shown.append(screen.app.get_key_display(binding))
    for title, (node, binding) in first.items():
        yield Entry(title, " or ".join(dict.fromkeys(keys[title])), binding.action, node)


def _bindings(screen: Screen[object]) -> Iterator[tuple[DOMNode, Binding]]:
    """From the focus outwards, as keys are looked up, in a person's own keys."""
    app, focused = screen.app, screen.focused
    for node in (screen, app) if focused is None else focused.ancestors_with_self:
        bindings = node._bindings.copy()
        bindings.apply_keymap(app._keymap)
        yield from ((node, binding) for _, binding in bindings)
        if node.is_modal:
            return


def _can(node: DOMNode, action: str) -> bool:
    """Return whether the action would do anything now."""
    namespace, name, parameters = parse(action)
    target = {"app": node.app, "screen": node.screen}.get(namespace, node)
    return target.check_action(name, parameters) is True


class BindingCommands(Provider):
    """Commands of the screen beneath the palette, and of the app."""

    async def discover(self) -> Hits:
        """All of them, before anything was typed."""
        for entry in entries(self.screen):
            yield DiscoveryHit(entry.title, self._run(entry), help=entry.hint)

    async def search(self, query: str) -> Hits:
        """Those that match."""
        matcher = self.matcher(query)
        for entry in entries(self.screen):
            if (score := matcher.match(entry.title)) > 0:
                yield Hit(score, matcher.highlight(entry.title), self._run(entry), help=entry.hint)

    def _run(self, entry: Entry) -> IgnoreReturnCallbackType:
        return partial(self.app.run_action, entry.action, default_namespace=entry.node)
