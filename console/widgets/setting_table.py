"""The settings as a table: a heading for each group, then name, value, where that came from, and what is to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from console.links.settings import SettingRow, When
from console.widgets.table import Cell, Column, Row, Table, cell

COLUMNS = (
    Column("setting", 18),
    Column("value", 14, grow=26),
    Column("from", 16, grow=14),
    Column("", 22, grow=30, drop=1),
)
USED: dict[When, str] = {"now": "at once", "load": "by the next model loaded", "start": "at the next start"}
"""When a saved value is used."""
_NEXT: dict[When, str] = {"now": "at once", "load": "at next load", "start": "at next start"}
_HEADING = "#"


class SettingTable(Table):
    """One row a setting; the cursor goes past the headings."""

    def __init__(self) -> None:
        super().__init__(COLUMNS, empty="No setting has these words. Escape shows all.", id="setting-table")

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
    """Where the value came from: "--port", "ERICLLM_PORT", "config.toml", "autotune", "default"."""
    if row.source == "file":
        return PurePath(row.where).name
    return {"default": "default", "console": "turned here", "tuned": "autotune"}.get(row.source, row.where)


def note(row: SettingRow) -> tuple[str, str]:
    """What is not as the file has it, and its style: what comes and when, or that the file does not count."""
    if row.waits:
        comes = "another one" if row.secret else row.saved if row.saved is not None else row.default or "nothing"
        return f"→ {comes} {_NEXT['start' if row.source == 'console' else row.when]}", "$warning"
    if row.wins and row.saved is not None and (row.secret or row.saved != row.value):
        return f"file: {row.saved}", "$muted"
    return "", ""


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
    return cell(row.value, "" if row.source == "default" else "bold")


def _origin_style(row: SettingRow) -> str:
    return "$muted" if row.source == "default" else "$accent" if row.wins else "$foreground"
