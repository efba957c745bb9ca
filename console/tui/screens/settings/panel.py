"""One setting: what it is for, its value with all that bears on it, and the box or list that it is changed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.highlighter import Highlighter
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static

from console.link.settings import SettingRow, When
from console.tui.widgets.glyphs import for_terminal, is_ascii
from console.tui.widgets.panel import set_title
from console.tui.widgets.table import Cell, Column, Row, Table, cell

# The settings as a table: a heading for each group, then name, value, where that came from, and what is to come.

COLUMNS = (
    Column("setting", 18),
    Column("value", 14, grow=26),
    Column("from", 16, grow=14),
    Column("", 22, grow=30, drop=1),
)
USED: dict[When, str] = {"now": "immediately", "load": "at the next load", "start": "at the next start"}
"""When a saved value is used."""
_NEXT: dict[When, str] = {"now": "immediately", "load": "at next load", "start": "at next start"}
_AFTER: dict[When, str] = {"now": "next second", "load": "next load", "start": "next start"}
_HEADING = "#"


class SettingTable(Table):
    """One row a setting; the cursor goes past the headings."""

    def __init__(self) -> None:
        super().__init__(COLUMNS, empty="No setting matches. Esc shows all.", id="setting-table")

    def show_settings(self, settings: Sequence[SettingRow]) -> None:
        """Replace what is shown; the cursor stays on its setting, and is on the first where it was nowhere."""
        self.show(list(_rows(settings)))
        if settings and self.cursor_key is None:
            self.call_after_refresh(self.move_to, 1)

    @property
    def chosen(self) -> str | None:
        """The name of the setting under the cursor."""
        return None if self.cursor_key is None or self.cursor_key.startswith(_HEADING) else self.cursor_key

    def move_to(self, index: int) -> None:
        """To a row; from a heading one row on, in the direction of travel."""
        index = min(max(0, index), len(self.rows) - 1)
        before = next((at for at, row in enumerate(self.rows) if row.key == self.cursor_key), -1)
        if 0 <= index < len(self.rows) and self.rows[index].key.startswith(_HEADING):
            index = index - 1 if 0 < index < before else index + 1
        super().move_to(index)
        if index == 1:
            self.scroll_home(animate=False, force=True)


def origin(row: SettingRow) -> str:
    """Where the value came from: "--port", "ERICLLM_PORT", "config.toml", "autotune", "default"; of one that another
    is saved to replace, when that one came into use."""
    if row.waits and row.source != "console":
        return "last start" if row.when == "start" else "before"
    if row.source == "file":
        return PurePath(row.where).name
    return {"default": "default", "console": "changed at runtime", "tuned": "autotune"}.get(row.source, row.where)


def note(row: SettingRow) -> tuple[str, str]:
    """Return how the value differs from the file's, and a style: the next value and when it applies, or the file's."""
    if row.waits:
        return f"→ {_coming(row)} {_NEXT[_used(row)]}", "$warning"
    if row.wins and row.saved is not None and (row.secret or row.saved != row.value):
        return f"file: {row.with_unit(row.saved)}", "$muted"
    return "", ""


def _coming(row: SettingRow) -> str:
    """The value that waits."""
    if row.secret:
        return "another value"
    return row.with_unit(row.saved if row.saved is not None else row.default) or "nothing"


def _used(row: SettingRow) -> When:
    """When the value that waits is used."""
    return "start" if row.source == "console" else row.when


def _rows(settings: Sequence[SettingRow]) -> Iterator[Row]:
    group = ""
    for row in settings:
        if row.group != group:
            group = row.group
            yield Row(f"{_HEADING}{group}", (cell(group, "bold $primary"),))
        yield Row(
            row.name, (cell(f"  {row.name}"), _value(row), cell(origin(row), _origin_style(row)), cell(*note(row)))
        )


def _value(row: SettingRow) -> Cell:
    if not row.value:
        return cell("not set", "$muted")
    return cell(row.with_unit(row.value), "" if row.source == "default" else "bold")


def _origin_style(row: SettingRow) -> str:
    return "$muted" if row.source == "default" else "$accent" if row.wins else "$foreground"


_LABEL_CELLS = 9


class SettingPanel(VerticalScroll, can_focus=False):
    """Shows a setting until `edit`; then the keys belong to its box, until Enter or `close`."""

    DEFAULT_CSS = """
    SettingPanel #choices { display: none; height: auto; max-height: 9; }
    SettingPanel #typed { display: none; }
    SettingPanel.-typing #typed, SettingPanel.-choosing #choices { display: block; }
    SettingPanel #problem { height: auto; color: $error; }
    SettingPanel #description { height: auto; }
    """

    @dataclass
    class Entered(Message):
        """A value was typed or chosen for a setting."""

        row: SettingRow
        value: str

    @dataclass
    class Pointed(Message):
        """The cursor of the list is on a value, which may be tried."""

        row: SettingRow
        value: str

    def __init__(self) -> None:
        super().__init__(classes="panel")
        self._row: SettingRow | None = None
        self._shown: tuple[SettingRow, bool] | None = None

    def compose(self) -> ComposeResult:
        """The setting's description above the field that changes it."""
        yield Static("", id="description", markup=False)
        yield Input(id="typed", compact=True, select_on_focus=True)
        yield Table((Column("enter: save", 20, grow=60),), id="choices")
        yield Static("", id="problem", markup=False)

    @property
    def editing(self) -> bool:
        """True while a value is being typed or chosen."""
        return self.has_class("-typing") or self.has_class("-choosing")

    def show(self, row: SettingRow) -> None:
        """Describe a setting, or say what became of the one that is being changed."""
        self._row = row
        brief = self.screen.has_class("-narrow") or self.screen.has_class("-short")
        if self._shown == (row, brief):
            return
        self._shown = row, brief
        set_title(self, row.name)
        self.border_subtitle = f"applies {USED[row.when]}"
        self.query_one("#description", Static).update(
            for_terminal(self.app, Content("\n").join(_about(row, brief=brief)))
        )

    def edit(self) -> None:
        """Let the value be changed: in a box, or in a list where there are few."""
        if self._row is None:
            return
        self.complain("")
        row = self._row
        if row.choices:
            self.add_class("-choosing")
            table = self.query_one("#choices", Table)
            table.show([Row(choice, (_choice(choice, row),)) for choice in row.choices])
            table.move_to(row.choices.index(row.value) if row.value in row.choices else 0)
            table.focus()
        else:
            self.add_class("-typing")
            box = self.query_one("#typed", Input)
            box.password = row.secret and not is_ascii(self.app)
            box.highlighter = _Stars() if row.secret else None
            box.value = "" if row.secret else row.saved if row.saved is not None else row.value
            box.placeholder = "Type the value (hidden)" if row.secret else _unset(row)
            box.focus()
        self.border_subtitle = "enter: save, esc: cancel"
        self.call_after_refresh(self.scroll_end, animate=False)

    def close(self) -> None:
        """Back to showing it."""
        self.remove_class("-typing", "-choosing")
        self.complain("")
        self._shown = None

    def complain(self, sentence: str) -> None:
        """Say what is wrong with the value; what was typed stays."""
        content = Content.styled(f"✖ {sentence}", "$error") if sentence else Content("")
        self.query_one("#problem", Static).update(for_terminal(self.app, content))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter in the box."""
        event.stop()
        if self._row is not None:
            self.post_message(self.Entered(self._row, event.value.strip()))

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Enter in the list."""
        event.stop()
        if self._row is not None:
            self.post_message(self.Entered(self._row, event.key))

    def on_table_moved(self, event: Table.Moved) -> None:
        """A value that may be tried."""
        event.stop()
        if self._row is not None and self.editing:
            self.post_message(self.Pointed(self._row, event.key))


class _Stars(Highlighter):
    """A star for each letter typed: a box's own dots are not in ASCII."""

    def __call__(self, text: str | Text) -> Text:
        return Text("*" * len(text), no_wrap=True, overflow="ignore", end="")

    def highlight(self, text: Text) -> None:
        """Nothing more."""


def _about(row: SettingRow, *, brief: bool) -> Iterator[Content]:
    yield Content.styled(row.help, "$foreground")
    value, default = row.with_unit(row.value) or "not set", ("default", row.with_unit(row.default) or "not set")
    if row.waits:
        saved = f"{_coming(row)}, used from the {_AFTER[_used(row)]} on"
        facts = [("in use", value), ("saved" if row.saved is not None else "default", saved)]
        facts += [default] if row.saved is not None else []
    else:
        where = f"{origin(row)} on the command line" if row.source == "flag" else origin(row)
        facts = [("value", value), ("from", where), default]
    if row.choices and not brief:
        facts.append(("one of", ", ".join(row.choices)))
    if row.saved is not None and row.source != "file" and not row.waits:
        facts.append(("saved", row.with_unit(row.saved)))
    shown = facts[:2] if brief else facts
    yield from (Content.assemble((f"{label:<{_LABEL_CELLS}}", "$muted"), value) for label, value in shown)
    words, style = ("", "") if row.waits else note(row)
    if row.wins:
        words, style = f"{row.wins} overrides the saved value.", "$warning"
    if words:
        yield Content.styled(words, style)


def _choice(choice: str, row: SettingRow) -> tuple[tuple[str, str], ...]:
    is_value = choice == row.value
    return cell(f"{'●' if is_value else '○'} {choice}", "bold $primary" if is_value else "")


def _unset(row: SettingRow) -> str:
    return f"{row.with_unit(row.default)} is the default" if row.default else "Not set (leave empty)"
