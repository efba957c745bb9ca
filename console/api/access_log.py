"""The access log: one line of JSON for each HTTP request, with token counts and times, never with what was asked."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from aiohttp import web

from console.api.observing import Outcome, Work
from console.api.traffic import Call
from console.line_writer import LineWriter
from engine.errors import EngineError
from engine.models.files import home_expanded
from engine.text.printable import printable_json

STDOUT = "-"


class CannotLog(EngineError):
    """The access log cannot be written where it is wanted."""

    code = "cannot_log"
    http_status = 500


class AccessLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Seconds; None is "does not apply" or "not known".

    time: when it came (UTC).  id: X-Request-Id of the answer.  client: address.  key: name of its key.
    answers: ids in the answers, by which the console's request table and logs know them.
    queue_s: until a worker took the last of its requests.  ttft_s: from when it came to the first token.
    status: 499 where the client left first.  bytes: of the answer's body.  error: the code of what went wrong.
    """

    time: str
    id: str
    client: str
    key: str | None
    agent: str
    method: str
    path: str
    dialect: str | None
    model: str | None
    answers: list[str]
    status: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    total_s: float
    finish_reasons: list[str]
    bytes: int | None
    error: str | None


class AccessLog:
    """A Watcher. target: a file, or STDOUT, which only a program without a screen has to give away."""

    def __init__(self, target: str, *, owns_stdout: bool, max_bytes: int) -> None:
        if target == STDOUT and not owns_stdout:
            raise CannotLog("--access-log - is for --headless alone: the screen has the terminal; name a file")
        self._path = None if target == STDOUT else home_expanded(target)
        self._lines = LineWriter(self._path, _encoded, max_bytes=max_bytes)

    @property
    def lost(self) -> int:
        """Lines that could not be written."""
        return self._lines.lost

    def open(self) -> None:
        """Begin. Raises CannotLog."""
        try:
            self._lines.open()
        except OSError as error:
            raise CannotLog(f"The access log {self._path} cannot be written: {error.strerror or error}") from error

    def saw(self, request: web.Request, call: Call, outcome: Outcome) -> None:
        """Write its line soon."""
        self._lines.put(line_of(call, outcome))

    def close(self) -> None:
        """Write what is left."""
        self._lines.close()


def _encoded(line: object) -> bytes:
    return printable_json(msgspec.json.encode(line).decode()).encode()


def line_of(call: Call, outcome: Outcome) -> AccessLine:
    """What is said of a request."""
    works = outcome.works
    rows = [row for work in works for row in work.rows]
    firsts = [row.created_at - outcome.at + row.ttft_s for row in rows if row.ttft_s is not None]
    return AccessLine(
        time=datetime.fromtimestamp(outcome.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        id=call.request_id,
        client=call.address,
        key=call.key or None,
        agent=call.agent,
        method=call.method,
        path=call.path,
        dialect=call.dialect or None,
        model=works[-1].model if works else None,
        answers=[work.id for work in works],
        status=outcome.status,
        prompt_tokens=call.prompt_tokens,
        cached_tokens=sum(map(_cached, works)),
        output_tokens=call.output_tokens,
        queue_s=_rounded(max((row.queued_s for row in rows), default=None)),
        ttft_s=_rounded(max(0.0, min(firsts)) if firsts else None),
        total_s=round(outcome.total_s, 6),
        finish_reasons=[row.finish or "" for row in rows],
        bytes=outcome.body_bytes,
        error=None if call.failure is None else call.failure.code,
    )


def _cached(work: Work) -> int:
    """Each prompt counts once, however many answers it gets."""
    return sum(row.cached_tokens for row in work.rows[:: work.choices])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
