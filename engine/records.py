"""What became of each request: its timeline while it lives, and a compact memory of those that ended.

Pure: every call is told the time. `Timeline` grows with each output of a worker, so adding to it is three appends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import msgspec

from engine.config import SamplingParams
from engine.snapshot import RequestRow

KEPT_ROWS = 10_000
KEPT_DETAILS = 1_000
KEPT_TEXTS = 200
MAX_BURSTS = 200
ROWS_AT_ONCE = 2_000

Setting = str | int | float | bool
T = TypeVar("T")


class Stay(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A time that a request had a place on a worker, in seconds since it was submitted.

    until_s: None while it is there.  died: the worker died, and the request went back to the queue.
    """

    worker: str
    since_s: float
    until_s: float | None = None
    died: bool = False


class Burst(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens that came together (since_s == until_s), or several such groups that were put into one for brevity."""

    since_s: float
    until_s: float
    tokens: int


class RequestText(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What was asked and answered, where the operator allowed to keep it. cut: something in the middle was left out."""

    prompt: str
    answer: str
    cut: bool = False


class RequestDetail(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one request. Times are seconds since it was submitted.

    sampling: parameters that are not neutral, by name.  timeline: whether it is still kept, as it is of the last
    thousand that ended; where not, only `row` is told.  texts: whether the operator allows texts to be kept.
    """

    row: RequestRow
    adapter: str = ""
    sampling: dict[str, Setting] = {}
    timeline: bool = True
    stays: tuple[Stay, ...] = ()
    bursts: tuple[Burst, ...] = ()
    text: RequestText | None = None
    texts: bool = False


@dataclass(slots=True)
class Timeline:
    """One request's stays and bursts, by the clock that its owner uses."""

    _stays: list[tuple[str, float, float | None, bool]] = field(default_factory=list)
    _since: list[float] = field(default_factory=list)
    _until: list[float] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)

    def taken(self, worker: str, now: float) -> None:
        """A worker has it from now on."""
        self._stays.append((worker, now, None, False))

    def left(self, now: float, *, died: bool = False) -> None:
        """The worker that had it, if any did, has it no more."""
        if self._stays and self._stays[-1][2] is None:
            worker, since, _, _ = self._stays[-1]
            self._stays[-1] = (worker, since, now, died)

    def came(self, now: float, tokens: int) -> None:
        """Tokens came together. Called for each output of every worker."""
        self._since.append(now)
        self._until.append(now)
        self._tokens.append(tokens)
        if len(self._tokens) >= 2 * MAX_BURSTS:
            self._join()

    def stays(self, start: float) -> tuple[Stay, ...]:
        """Where it was, in seconds after `start`."""
        return tuple(
            Stay(worker=worker, since_s=since - start, until_s=None if until is None else until - start, died=died)
            for worker, since, until, died in self._stays
        )

    def bursts(self, start: float) -> tuple[Burst, ...]:
        """At most MAX_BURSTS, in seconds after `start`."""
        if len(self._tokens) > MAX_BURSTS:
            self._join()
        return tuple(
            Burst(since_s=since - start, until_s=until - start, tokens=tokens)
            for since, until, tokens in zip(self._since, self._until, self._tokens, strict=True)
        )

    def _join(self) -> None:
        """Neighbours become one where the least time lies between them, so that what is long stays to be seen."""
        gaps = [since - until for since, until in zip(self._since[1:], self._until, strict=False)]
        joined = set(sorted(range(len(gaps)), key=gaps.__getitem__)[: len(self._tokens) - MAX_BURSTS])
        since, until, tokens = self._since[:1], self._until[:1], self._tokens[:1]
        for at in range(1, len(self._tokens)):
            if at - 1 in joined:
                until[-1] = self._until[at]
                tokens[-1] += self._tokens[at]
            else:
                since.append(self._since[at])
                until.append(self._until[at])
                tokens.append(self._tokens[at])
        self._since, self._until, self._tokens = since, until, tokens


def unlike_neutral(params: SamplingParams) -> dict[str, Setting]:
    """The parameters that are not neutral, as an operator reads them; lists of tokens by how many there are."""
    neutral = SamplingParams()
    found: dict[str, Setting] = {}
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if value == getattr(neutral, name):
            continue
        found[name] = value if isinstance(value, int | float | str) else _counted(name, value)
    return found


def _counted(name: str, values: Sequence[object] | dict[int, float]) -> str:
    noun = "token" if name.endswith("ids") or name == "logit_bias" else "string"
    return f"{len(values)} {noun}" + ("" if len(values) == 1 else "s")


class _Detail(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a request besides its row."""

    adapter: str
    sampling: dict[str, Setting]
    stays: tuple[Stay, ...]
    bursts: tuple[Burst, ...]


class Records:
    """Requests that ended: KEPT_ROWS rows, the timelines of the last KEPT_DETAILS, the texts of the last KEPT_TEXTS.

    All but the texts are kept as msgpack, which takes a tenth of the memory. Rows may be read from any thread.
    """

    def __init__(self) -> None:
        self._total = 0
        self._rows: deque[tuple[str, int, bytes]] = deque(maxlen=KEPT_ROWS)
        self._details: dict[int, bytes] = {}
        self._texts: dict[int, RequestText] = {}
        self._lock = threading.Lock()
        self._row = msgspec.msgpack.Decoder(RequestRow)
        self._detail = msgspec.msgpack.Decoder(_Detail)

    @property
    def total(self) -> int:
        """Requests that ever ended."""
        return self._total

    def ended(self, detail: RequestDetail) -> None:
        """Keep a request that ended just now."""
        row = detail.row
        rest = _Detail(detail.adapter, detail.sampling, detail.stays, detail.bursts)
        packed, story = msgspec.msgpack.encode(row), msgspec.msgpack.encode(rest)
        with self._lock:
            self._total += 1
            self._rows.append((row.id, row.order, packed))
            _put(self._details, row.order, story, KEPT_DETAILS)
            if detail.text is not None:
                _put(self._texts, row.order, detail.text, KEPT_TEXTS)

    def finished(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Rows of requests that ended after the first `after` ones, oldest first, at most ROWS_AT_ONCE; and what to
        give as `after` the next time."""
        with self._lock:
            first = self._total - len(self._rows)
            start = min(max(0, after - first), len(self._rows))
            packed = [row for _, _, row in islice(self._rows, start, start + ROWS_AT_ONCE)]
        return first + start + len(packed), [self._row.decode(row) for row in packed]

    def detail(self, request_id: str, order: int = 0, *, texts: bool = False) -> RequestDetail | None:
        """The newest request of that id that ended, or the one of that `order`; None where it is not kept."""
        with self._lock:
            same = (kept for kept in reversed(self._rows) if kept[0] == request_id and order in (0, kept[1]))
            found = next(same, None)
            if found is None:
                return None
            story, text = self._details.get(found[1]), self._texts.get(found[1])
        row = self._row.decode(found[2])
        if story is None:
            return RequestDetail(row=row, timeline=False, texts=texts)
        rest = self._detail.decode(story)
        return RequestDetail(
            row=row,
            adapter=rest.adapter,
            sampling=rest.sampling,
            stays=rest.stays,
            bursts=rest.bursts,
            text=text,
            texts=texts,
        )


def _put(kept: dict[int, T], order: int, value: T, most: int) -> None:
    """Add to a dictionary that forgets its oldest."""
    kept[order] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
