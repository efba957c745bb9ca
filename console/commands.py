"""The palette: every binding of ours that works here and now is an entry, so a key can never lack one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from textual.binding import ActiveBinding
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.screen import Screen
from textual.types import IgnoreReturnCallbackType


@dataclass(frozen=True, slots=True)
class Entry:
    """One binding, as a command. keys: all that trigger it, as shown to a person."""

    title: str
    keys: str
    active: ActiveBinding


def entries(screen: Screen[object]) -> Iterator[Entry]:
    """The bindings active on `screen` that carry an id, one entry for each action; moving about is left out."""
    keys: dict[str, list[str]] = {}
    first: dict[str, ActiveBinding] = {}
    for active in screen.active_bindings.values():
        binding = active.binding
        if binding.id is None or binding.system or not active.enabled:
            continue
        first.setdefault(binding.action, active)
        keys.setdefault(binding.action, []).append(screen.app.get_key_display(binding))
    for action, active in first.items():
        shown = " or ".join(dict.fromkeys(keys[action]))
        yield Entry(active.binding.tooltip or active.binding.description, shown, active)


class BindingCommands(Provider):
    """Commands of the screen beneath the palette, and of the app."""

    async def discover(self) -> Hits:
        """All of them, before anything was typed."""
        for entry in entries(self.screen):
            yield DiscoveryHit(entry.title, self._run(entry), help=f"key {entry.keys}")

    async def search(self, query: str) -> Hits:
        """Those that match."""
        matcher = self.matcher(query)
        for entry in entries(self.screen):
            if (score := matcher.match(entry.title)) > 0:
                yield Hit(score, matcher.highlight(entry.title), self._run(entry), help=f"key {entry.keys}")

    def _run(self, entry: Entry) -> IgnoreReturnCallbackType:
        return partial(self.app.run_action, entry.active.binding.action, default_namespace=entry.active.node)
