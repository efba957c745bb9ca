"""Groups of requests: one row for each client or each API key, those with the most live requests first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from console import text
from console.tui.widgets.table import Column, Row, cell
from engine.snapshot import RequestRow

Grouping = Literal["none", "client", "key"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)

UNNAMED = "–"
"""Requests without a client or a key."""


def client_of(row: RequestRow) -> str:
    """Return its client as every screen names it, the part of this program that sent it, or ""."""
    return text.client_name(row.address or row.client, row.key_name, row.program)


GROUP_OF: Mapping[Grouping, Callable[[RequestRow], str]] = {
    "none": lambda row: "",
    "client": lambda row: client_of(row) or UNNAMED,
    "key": lambda row: row.key_name or UNNAMED,
}

_FAILED = ("error", "timeout")
_COUNTS = (
    Column("live", 6, "right"),
    Column("waiting", 7, "right"),
    Column("done", 6, "right"),
    Column("errors", 6, "right"),
    Column("tok/s", 6, "right"),
    Column("in", 7, "right", drop=2),
    Column("out", 7, "right", drop=1),
)


@dataclass(slots=True)
class Group:
    """Counts of one client's or key's requests. live: on a worker; waiting: for one.  tokens_per_s: of live ones."""

    name: str
    live: int = 0
    waiting: int = 0
    done: int = 0
    errors: int = 0
    tokens_per_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, row: RequestRow) -> None:
        """Count a request."""
        self.prompt_tokens += row.prompt_tokens
        self.output_tokens += row.output_tokens
        if row.state == "finished":
            self.done += 1
            self.errors += row.finish in _FAILED
        elif row.state == "queued":
            self.waiting += 1
        else:
            self.live += 1
            self.tokens_per_s += row.tokens_per_s or 0.0


def groups_of(rows: Iterable[RequestRow], grouping: Grouping) -> list[Group]:
    """Return the groups, those with the most live and waiting requests first, then by tokens and name."""
    name_of, groups = GROUP_OF[grouping], dict[str, Group]()
    for row in rows:
        name = name_of(row)
        if (group := groups.get(name)) is None:
            group = groups[name] = Group(name)
        group.add(row)
    return sorted(groups.values(), key=lambda group: (-(group.live + group.waiting), -group.output_tokens, group.name))


def group_columns(grouping: Grouping) -> tuple[Column, ...]:
    """Return the columns of a table of groups."""
    return (Column(grouping, 28, grow=32), *_COUNTS)


def group_row(group: Group) -> Row:
    """Return a group's cells. What is zero is quiet."""
    quiet = "" if group.live + group.waiting else "$request-done"
    return Row(
        group.name,
        (
            cell(group.name, quiet),
            cell(str(group.live), "bold" if group.live else "$request-done"),
            cell(str(group.waiting), "$request-queued" if group.waiting else "$request-done"),
            cell(text.count(group.done), quiet),
            cell(text.count(group.errors), "$error" if group.errors else "$request-done"),
            cell(text.rate(group.tokens_per_s or None), "bold" if group.tokens_per_s else "$request-done"),
            cell(text.count(group.prompt_tokens), quiet),
            cell(text.count(group.output_tokens), quiet),
        ),
    )
