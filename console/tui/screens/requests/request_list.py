"""Every request that the console knows of, in the order and through the filter that an operator chose. Pure.

Ten thousand that ended are sorted once and then only added to; what is live is sorted in among them at each look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal, get_args

import msgspec

from console.tui.screens.requests.groups import GROUP_OF, Group, Grouping, client_of, groups_of
from engine.requests.history import KEPT_ROWS
from engine.snapshot import RequestRow

Show = Literal["all", "live", "queued", "finished", "failed"]
SHOWS: tuple[Show, ...] = get_args(Show)

_MAX_ROW_BYTES = 2**13
"""Of a row that ended, as JSON: thousands of them are kept, and another instance may say anything in each."""

Value = float | str | tuple[int, str] | None
Entry = tuple[bool, Value, int, str, RequestRow]
"""Order of the missing value, the value, the row's order and id as tie-breakers, and the row: never compared."""

_STATES = {"queued": 0, "prefill": 1, "decode": 2, "finished": 3}
_FAILED = ("error", "timeout")

SORTS: Mapping[str, Callable[[RequestRow], Value]] = {
    "when": lambda row: row.created_at,
    "id": lambda row: row.id,
    "client": lambda row: client_of(row) or None,
    "model": lambda row: row.model or None,
    "state": lambda row: (_STATES[row.state], row.finish or ""),
    "worker": lambda row: (len(row.worker), row.worker) if row.worker else None,
    "in": lambda row: row.prompt_tokens,
    "cached": lambda row: row.cached_tokens,
    "out": lambda row: row.output_tokens,
    "waited": lambda row: row.queued_s,
    "TTFT": lambda row: row.ttft_s,
    "ITL": lambda row: row.itl_s,
    "tok/s": lambda row: row.tokens_per_s,
    "took": lambda row: row.age_s,
}
"""What each column is sorted by; rows without a value come last, whichever way."""


def key_of(row: RequestRow) -> str:
    """Return the key of a request: ids may be used again."""
    return f"{row.id}#{row.order}"


def matches(row: RequestRow, words: Sequence[str], show: Show) -> bool:
    """Return whether a row has all words (casefolded) in id, source, client, model or state, and a state in `show`."""
    ended = row.state == "finished"
    if show != "all" and not (
        (show == "finished" and ended)
        or (show == "live" and not ended)
        or (show == "queued" and row.state == "queued")
        or (show == "failed" and row.finish in _FAILED)
    ):
        return False
    if not words:
        return True
    searched = f"{row.id} {row.source} {client_of(row)} {row.model} {row.finish or row.state}".casefold()
    return all(word in searched for word in words)


class RequestList:
    """The requests as they are shown. most: number of ended requests that are kept."""

    def __init__(self, *, most: int = KEPT_ROWS) -> None:
        self._most = most
        self._ended: dict[str, RequestRow] = {}
        self._sorted: list[Entry] = []
        self._live: dict[str, RequestRow] = {}
        self._shown: list[Entry] = []
        self._words: tuple[str, ...] = ()
        self.column = "when"
        self.descending = True
        self.show: Show = "all"
        self.grouping: Grouping = "none"
        self._group: tuple[Grouping, str] | None = None

    @property
    def ended(self) -> int:
        """How many that ended are kept."""
        return len(self._ended)

    def __len__(self) -> int:
        return len(self._shown)

    def __getitem__(self, at: int) -> RequestRow:
        return self._shown[at][4]

    def find(self, key: str) -> int | None:
        """Where the row of that key is."""
        row = self._ended.get(key) or self._live.get(key)
        return next((at for at, entry in enumerate(self._shown) if entry[4] is row), None) if row else None

    def get(self, key: str) -> RequestRow | None:
        """The row of that key, shown or not."""
        return self._ended.get(key) or self._live.get(key)

    # -- what happens -------------------------------------------------------------------------------------------------

    def update(self, live: Sequence[RequestRow], ended: Sequence[RequestRow]) -> None:
        """live: all that are live now.  ended: those that ended since the last time, oldest first."""
        if ended:
            self._add(ended)
        self._live = {key: row for row in live if (key := key_of(row)) not in self._ended}
        self._merge()

    def sort(self, column: str, *, descending: bool) -> None:
        """Sort by a column of SORTS."""
        self.column, self.descending = column, descending
        self._rearrange()

    def filter(self, *, text: str | None = None, show: Show | None = None) -> None:
        """Show only rows with all words of `text`, and with the states that `show` names."""
        if text is not None:
            self._words = tuple(text.casefold().split())
        if show is not None:
            self.show = show
        self._rearrange()

    def show_group(self, grouping: Grouping, name: str) -> None:
        """Show only the requests of that client or key; of all with "none"."""
        self._group = None if grouping == "none" else (grouping, name)
        self._rearrange()

    def group_by(self, grouping: Grouping) -> None:
        """Group by client or key, every request in its group."""
        self.grouping = grouping
        self.show_group("none", "")

    @property
    def filtered(self) -> bool:
        """True if rows may be hidden."""
        return bool(self._words or self._group) or self.show != "all"

    @property
    def group_shown(self) -> str:
        """The client or key whose requests alone are shown; "" is every one."""
        return self._group[1] if self._group is not None else ""

    @property
    def shows_groups(self) -> bool:
        """True if each row stands for a group."""
        return self.grouping != "none" and self._group is None

    def groups(self) -> list[Group]:
        """Return the groups of the requests that pass the filter."""
        return groups_of((entry[4] for entry in self._shown), self.grouping)

    def live_of(self, group: str) -> list[RequestRow]:
        """Return the requests of a group that have not ended and pass the filter."""
        name_of = GROUP_OF[self.grouping]
        rows = (entry[4] for entry in self._shown)
        return [row for row in rows if row.state != "finished" and name_of(row) == group]

    # -- order --------------------------------------------------------------------------------------------------------

    def _add(self, rows: Sequence[RequestRow]) -> None:
        new: dict[str, RequestRow] = {}
        for row in rows:
            if (key := key_of(row)) not in self._ended and (short := _short(row)) is not None:
                new.setdefault(key, short)
        self._ended |= new
        self._sorted += self._entries(new.values())
        if (many := len(self._ended) - self._most) > 0:
            oldest = list(islice(self._ended.items(), many))
            dropped = {id(row) for _, row in oldest}
            self._sorted = [entry for entry in self._sorted if id(entry[4]) not in dropped]
            for key, _ in oldest:
                del self._ended[key]
        self._sorted.sort(reverse=self.descending)

    def _rearrange(self) -> None:
        self._sorted = sorted(self._entries(self._ended.values()), reverse=self.descending)
        self._merge()

    def _merge(self) -> None:
        """Two sorted runs: Python's sort finds them and merges them with one comparison a row."""
        live = sorted(self._entries(self._live.values()), reverse=self.descending)
        self._shown = sorted([*self._sorted, *live], reverse=self.descending) if live else list(self._sorted)

    def _entries(self, rows: Iterable[RequestRow]) -> list[Entry]:
        value_of, last, words, show = SORTS[self.column], not self.descending, self._words, self.show
        grouping, name = self._group or ("none", "")
        group_of = GROUP_OF[grouping]
        found: list[Entry] = []
        for row in rows:
            if group_of(row) == name and matches(row, words, show):
                value = value_of(row)
                found.append((last == (value is None), "" if value is None else value, row.order, row.id, row))
        return found


def _short(row: RequestRow) -> RequestRow | None:
    """The row, without its error where that is too long to be kept; None where it is too long all the same."""
    rows = (row, msgspec.structs.replace(row, error=None))
    return next((each for each in rows if len(msgspec.json.encode(each)) <= _MAX_ROW_BYTES), None)
