"""The last row of every screen and dialog: the keys that work here and now, each of which can be clicked.

The primary action comes first. It, the key that closes a dialog, help, quit and the palette are always shown; where
there is not room for all others, the keys of every screen go first.
Textual's Footer mounts a widget for each key: a change of focus on the dashboard took 211 ms of CPU with it, and 39
with this one (mean of 40).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from textual import events
from textual.binding import ActiveBinding, Binding
from textual.content import Content
from textual.dom import DOMNode
from textual.keys import key_to_character
from textual.screen import Screen
from textual.style import Style
from textual.widget import Widget

from console.tui.binding_index import primary_ids
from console.tui.widgets.glyphs import for_terminal

LASTING = ("app.help", "app.quit", "dismiss", "leave")
_SIGNS = {"minus": "-", "plus": "+", "slash": "/", "backslash": "\\", "underscore": "_", "at": "@"}
_TARGET = "target"
_KEY = "bold $footer-key-foreground"
_WORDS = "$footer-description-foreground"


@dataclass(frozen=True, slots=True)
class FooterKey:
    """The keys of one action, or of several that belong together. keys: (as shown, action, whose it is)."""

    keys: tuple[tuple[str, str, DOMNode], ...]
    words: str
    group: Binding.Group | None = None
    is_primary: bool = False

    @property
    def lasts(self) -> bool:
        """True if it is always shown."""
        return self.is_primary or self._action in LASTING

    @property
    def place(self) -> int:
        """The primary action is first, help and quit are last."""
        return 0 if self.is_primary else 2 if self._action in LASTING else 1

    @property
    def _action(self) -> str:
        return self.keys[0][1].partition("(")[0]

    @property
    def is_everywhere(self) -> bool:
        """True if it works on every screen."""
        return self.keys[0][1].startswith("app.")


class KeyRow(Widget):
    """Follows the focus."""

    DEFAULT_CSS = """
    KeyRow { dock: bottom; height: 1; width: 1fr; background: $footer-background; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: Sequence[FooterKey] = ()
        self._palette: FooterKey | None = None
        self._targets: list[tuple[str, DOMNode]] = []

    def on_mount(self) -> None:
        """Follow the keys that work."""
        self.screen.bindings_updated_signal.subscribe(self, self._changed)
        self._changed(self.screen)

    def _changed(self, screen: Screen[object]) -> None:
        active = screen.active_bindings
        keys = _shown(self, active.values())
        shown, palette = tuple(sorted(keys, key=lambda each: each.place)), active.get(self.app.COMMAND_PALETTE_BINDING)
        lasting = None if palette is None else _one(self, palette)
        if (shown, lasting) != (self._shown, self._palette):
            self._shown, self._palette = shown, lasting
            self.refresh()

    def render(self) -> Content:
        """As many as there is room for, the palette on the right."""
        self._targets = []
        palette = Content("") if self._palette is None else self._link("▏", self._palette)
        room = self.size.width - palette.cell_length
        parts = [(shown, self._drawn(shown)) for shown in self._shown]
        while sum(content.cell_length for _, content in parts) > room:
            spare = [at for at, (shown, _) in enumerate(parts) if not shown.lasts]
            if not spare:
                break
            parts.pop(next((at for at in reversed(spare) if parts[at][0].is_everywhere), spare[-1]))
        keys = Content("").join(content for _, content in parts)
        return for_terminal(self.app, Content.assemble(keys, " " * max(0, room - keys.cell_length), palette))

    def on_click(self, event: events.Click) -> None:
        """Do what was clicked. A link would paint keys and words alike."""
        if (at := event.style.meta.get(_TARGET)) is not None:
            action, node = self._targets[at]
            self.run_worker(self.app.run_action(action, node), exit_on_error=False)

    def _drawn(self, shown: FooterKey) -> Content:
        if shown.group is None or len(shown.keys) == 1:
            return self._link("", shown)
        keys = (self._target(Content.styled(key, _KEY), action, node) for key, action, node in shown.keys)
        return Content.assemble(" ", *keys, " ", (f"{shown.words} ", _WORDS))

    def _link(self, before: str, shown: FooterKey) -> Content:
        ((key, action, node), *_) = shown.keys
        words = Content.assemble((f" {key} ", _KEY), (f"{shown.words} ", _WORDS))
        return Content.assemble((before, "$foreground 20%"), self._target(words, action, node))

    def _target(self, content: Content, action: str, node: DOMNode) -> Content:
        self._targets.append((action, node))
        return content.stylize(Style.from_meta({_TARGET: len(self._targets) - 1}))


def _shown(row: KeyRow, active: Iterable[ActiveBinding]) -> Iterator[FooterKey]:
    """One for each action with `show`, those of a group that follow each other together. A box shows the way out."""
    seen: dict[str, FooterKey] = {}
    focused = row.screen.focused
    typing = focused is not None and focused.check_consume_key("a", "a")
    for each in active:
        is_shown = each.binding.show or (typing and each.binding.key == "escape")
        if is_shown and each.enabled and each.binding.action not in seen and not _is_typed(row, each.binding):
            seen[each.binding.action] = _one(row, each)
    before: FooterKey | None = None
    for shown in seen.values():
        if before is not None and shown.group is not None and shown.group == before.group:
            before = replace(before, keys=(*before.keys, *shown.keys), words=shown.group.description)
            continue
        if before is not None:
            yield before
        before = shown
    if before is not None:
        yield before


def _is_typed(row: KeyRow, binding: Binding) -> bool:
    """Return whether the key is text to the widget with the focus, or to the whole screen."""
    character = _SIGNS.get(binding.key) or key_to_character(binding.key)
    focused = row.screen.focused
    return any(each.check_consume_key(binding.key, character) for each in (focused, row.screen) if each is not None)


def _one(row: KeyRow, active: ActiveBinding) -> FooterKey:
    binding = active.binding
    key = (row.app.get_key_display(binding), binding.action, active.node)
    is_primary = binding.id in primary_ids(type(active.node))
    return FooterKey((key,), binding.description, binding.group, is_primary)
