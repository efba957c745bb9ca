"""History of requests: the timeline of each while it lives, and a compact memory of those that ended.

Pure: every call gets the time. `Timeline` grows with each output of a worker, so adding to it is three appends.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import msgspec

from engine.config import Grammar, SamplingParams, Thinking
from engine.requests.causes import TimeLedger, Why
from engine.snapshot import RequestRow

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

KEPT_ROWS = 10_000
KEPT_DETAILS = 1_000
KEPT_TEXTS = 200
MAX_TOKEN_BATCHES = 200
_MAX_STORED_BATCHES = 4 * MAX_TOKEN_BATCHES
TEXT_TOKENS = 2_000
ROWS_AT_ONCE = 2_000

Setting = str | int | float | bool
T = TypeVar("T")


class WorkerSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A time that a request had a place on a worker, in seconds since it was submitted.

    until_s: None while it is there.  lost: the worker died or was started again, and the request went back to the
    queue.
    """

    worker: str
    since_s: float
    until_s: float | None = None
    lost: bool = False


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens that came together (since_s == until_s), or several such groups that were put into one for brevity."""

    since_s: float
    until_s: float
    tokens: int


class RequestText(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Prompt and answer, where the operator allowed to keep them. cut: something in the middle was left out."""

    prompt: str
    answer: str
    cut: bool = False


class RequestDetail(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one request. Times are seconds since it was submitted.

    sampling: parameters that are not neutral, by name.  timeline: whether it is still kept, as it is of the last
    thousand that ended; where not, only `row` is given.  texts: whether the operator allows texts to be kept.
    why: what its time went into.
    """

    row: RequestRow
    adapter: str = ""
    sampling: dict[str, Setting] = {}
    timeline: bool = True
    stays: tuple[WorkerSpan, ...] = ()
    bursts: tuple[TokenBatch, ...] = ()
    text: RequestText | None = None
    texts: bool = False
    why: Why | None = None


@dataclass(slots=True)
class Timeline:
    """One request's stays and bursts, by the clock that its owner uses. ledger: what its time went into."""

    ledger: TimeLedger = field(default_factory=TimeLedger)
    _stays: list[tuple[str, float, float | None, bool]] = field(default_factory=list)
    _since: array[float] = field(default_factory=lambda: array("d"))
    _until: array[float] = field(default_factory=lambda: array("d"))
    _tokens: array[int] = field(default_factory=lambda: array("I"))

    def dispatched(self, worker: str, now: float) -> None:
        """Note that a worker has it from now on."""
        self._stays.append((worker, now, None, False))

    def leave(self, now: float, *, lost: bool = False) -> None:
        """Note that the worker that had it, if any did, has it no more."""
        if self._stays and self._stays[-1][2] is None:
            worker, since, _, _ = self._stays[-1]
            self._stays[-1] = (worker, since, now, lost)

    def add_tokens(self, now: float, tokens: int) -> None:
        """Add tokens that arrived together. Called for each output of every worker."""
        self._since.append(now)
        self._until.append(now)
        self._tokens.append(tokens)
        if len(self._tokens) >= _MAX_STORED_BATCHES:
            self.join()

    def stays(self, start: float) -> tuple[WorkerSpan, ...]:
        """Where it was, in seconds after `start`."""
        return tuple(
            WorkerSpan(
                worker=worker, since_s=since - start, until_s=None if until is None else until - start, lost=lost
            )
            for worker, since, until, lost in self._stays
        )

    def bursts(self, start: float) -> tuple[TokenBatch, ...]:
        """At most MAX_BURSTS, in seconds after `start`."""
        self.join()
        return tuple(
            TokenBatch(since_s=since - start, until_s=until - start, tokens=tokens)
            for since, until, tokens in zip(self._since, self._until, self._tokens, strict=True)
        )

    def join(self) -> None:
        """Be no longer than MAX_TOKEN_BATCHES: neighbours become one where the least time lies between them, so that
        long pauses stay to be seen."""
        if (many := len(self._tokens) - MAX_TOKEN_BATCHES) <= 0:
            return
        gaps = [since - until for since, until in zip(self._since[1:], self._until[:-1], strict=True)]
        longest = sorted(gaps)[many - 1]
        ties = many - sum(gap < longest for gap in gaps)
        since, until, tokens = self._since[:1], self._until[:1], self._tokens[:1]
        for at, gap in enumerate(gaps, 1):
            if gap < longest or (gap == longest and ties > 0):
                ties -= gap == longest
                until[-1] = self._until[at]
                tokens[-1] += self._tokens[at]
            else:
                since.append(self._since[at])
                until.append(self._until[at])
                tokens.append(self._tokens[at])
        self._since, self._until, self._tokens = since, until, tokens


def non_default_params(params: SamplingParams) -> dict[str, Setting]:
    """The parameters that are not neutral, as an operator reads them; lists of tokens by how many there are."""
    neutral = SamplingParams()
    found: dict[str, Setting] = {}
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if value == getattr(neutral, name):
            continue
        found[name] = value if isinstance(value, int | float | str) else _shortened(name, value)
    return found


def text_of(tokenizer: Tokenizer, prompt_ids: Sequence[int], generated: Sequence[int]) -> RequestText:
    """Prompt and answer with their control tokens, each of TEXT_TOKENS tokens at most: of a longer one, both ends."""
    prompt, answer = (_both_ends(tokenizer, token_ids) for token_ids in (prompt_ids, generated))
    return RequestText(prompt=prompt, answer=answer, cut=max(len(prompt_ids), len(generated)) > TEXT_TOKENS)


def _both_ends(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    if len(token_ids) <= TEXT_TOKENS:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    half = TEXT_TOKENS // 2
    ends = (tokenizer.decode(part, skip_special_tokens=False) for part in (token_ids[:half], token_ids[-half:]))
    return f"\n… {len(token_ids) - 2 * half:,} tokens left out …\n".join(ends)


def _shortened(name: str, values: Sequence[object] | dict[int, float] | Grammar | Thinking) -> str:
    if isinstance(values, Thinking):
        return values.open if values.budget is None else f"{values.open}, max {values.budget:,} tokens"
    if isinstance(values, Grammar):
        return f"{values.kind}, {len(values.source)} characters" if values.source else values.kind
    noun = "token" if name.endswith("ids") or name == "logit_bias" else "string"
    return f"{len(values)} {noun}" + ("" if len(values) == 1 else "s")


@dataclass(frozen=True, slots=True)
class _StoredRequest:
    """A request besides its row and its text. start: when it was submitted, by its timeline's clock."""

    adapter: str
    sampling: dict[str, Setting]
    timeline: Timeline
    start: float


class RequestHistory:
    """Requests that ended: KEPT_ROWS rows, the timelines of the last KEPT_DETAILS, the texts of the last KEPT_TEXTS.

    Rows are kept as msgpack, in a tenth of the memory, and may be read from any thread.
    """

    def __init__(self) -> None:
        self._total = 0
        self._rows: deque[tuple[str, int, bytes]] = deque(maxlen=KEPT_ROWS)
        self._details: dict[int, _StoredRequest] = {}
        self._texts: dict[int, RequestText] = {}
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(RequestRow)

    def add(
        self,
        row: RequestRow,
        timeline: Timeline,
        start: float,
        *,
        params: SamplingParams,
        adapter: str = "",
        text: RequestText | None = None,
    ) -> None:
        """Keep a request that ended just now. params: as they were requested.  start: when it was submitted, by the
        clock of its timeline, which grows no more."""
        timeline.join()
        _put(
            self._details, row.order, _StoredRequest(adapter, non_default_params(params), timeline, start), KEPT_DETAILS
        )
        if text is not None:
            _put(self._texts, row.order, text, KEPT_TEXTS)
        packed = msgspec.msgpack.encode(row)
        with self._lock:
            self._total += 1
            self._rows.append((row.id, row.order, packed))

    def finished(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Rows of requests that ended after the first `after` ones, oldest first, at most ROWS_AT_ONCE; and what to
        give as `after` the next time."""
        with self._lock:
            first = self._total - len(self._rows)
            start = min(max(0, after - first), len(self._rows))
            packed = [row for _, _, row in islice(self._rows, start, start + ROWS_AT_ONCE)]
        return first + start + len(packed), [self._decoder.decode(row) for row in packed]

    def detail(self, request_id: str, order: int = 0, *, texts: bool = False) -> RequestDetail | None:
        """The newest request of that id that ended, or the one of that `order`; None where it is not kept."""
        same = (each for each in reversed(self._rows) if each[0] == request_id and order in (0, each[1]))
        found = next(same, None)
        if found is None:
            return None
        row, stored = self._decoder.decode(found[2]), self._details.get(found[1])
        if stored is None:
            return RequestDetail(row=row, timeline=False, texts=texts)
        return RequestDetail(
            row=row,
            adapter=stored.adapter,
            sampling=stored.sampling,
            stays=stored.timeline.stays(stored.start),
            bursts=stored.timeline.bursts(stored.start),
            text=self._texts.get(found[1]),
            texts=texts,
            why=stored.timeline.ledger.why(stored.start),
        )


def _put(values: dict[int, T], order: int, value: T, limit: int) -> None:
    """Add to a dictionary that forgets its oldest."""
    values[order] = value
    if len(values) > limit:
        del values[next(iter(values))]
