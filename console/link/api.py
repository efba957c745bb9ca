"""`link.api`: who may ask over HTTP, who does, in which dialects, and what went wrong."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import msgspec

from engine.errors import Detail, EngineError

Scope = Literal["use", "load", "watch", "admin"]
"""What a key is good for. use: models and completions.  watch: snapshot, logs, metrics, events, and nothing that
changes anything.  admin: everything."""

SETTINGS_KEY = "settings"
"""The name of the key that --api-key gives."""

MAX_LIMIT = 10**9


class ApiStopping(EngineError):
    """The operator switches the API off, and running requests finish; details: retry_after_s.

    The operator may keep it on meanwhile, and switches it on again later: a client that can go elsewhere should.
    """

    code = "api_stopping"
    http_status = 503

    def __init__(self, message: str, **details: Detail) -> None:
        super().__init__(message, **{"retry_after_s": 30, **details})


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a key: requests and tokens (of prompts and answers) per minute, requests at once; 0: any.

    Requests are counted where they ask a model for something. Tokens are known afterwards: who has used more than a
    minute's waits until that is made up for.
    """

    requests_per_min: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)] = 0
    tokens_per_min: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)] = 0
    concurrent: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)] = 0

    def in_words(self) -> str:
        """ "60 requests/min, 2 concurrent", "" where there are none."""
        parts = [
            (self.requests_per_min, "requests/min"),
            (self.tokens_per_min, "tokens/min"),
            (self.concurrent, "concurrent"),
        ]
        return ", ".join(f"{number:,} {what}" for number, what in parts if number)


NO_LIMITS = KeyLimits()


class KeyReading(msgspec.Struct, frozen=True, kw_only=True):
    """One key, without what it consists of. Times are unix times, None where that never was.

    made_at: None for the key of the settings.  prompt_tokens, output_tokens: of all its requests that were answered.
    """

    name: str
    scopes: tuple[Scope, ...]
    limits: KeyLimits = NO_LIMITS
    made_at: float | None = None
    last_used_at: float | None = None
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was just made: the one time that `key` itself is shown."""

    name: str
    scopes: tuple[Scope, ...]
    key: str

    def __repr__(self) -> str:
        return f"NewKey(name={self.name!r}, scopes={self.scopes!r})"


class DialectReading(msgspec.Struct, frozen=True, kw_only=True):
    """A dialect of the API. routes: as "/v1/completions"; requests: so far.

    example_path, example_body: a request that it answers, but for the model's name; "" for none.
    """

    name: str
    title: str
    routes: tuple[str, ...]
    on: bool = True
    requests: int = 0
    example_path: str = ""
    example_body: dict[str, Any] = {}


class ClientReading(msgspec.Struct, frozen=True, kw_only=True):
    """A client that asks now, or did within the last minute: an address with a key and a program.

    key: the name of its key, "" for none.  program: as its User-Agent begins, "curl/8.5.0".
    since: unix time of the first request of those that kept it here.
    """

    address: str
    key: str = ""
    program: str = ""
    under_way: int = 0
    requests: int = 0
    since: float = 0.0


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended in an error. at: unix time; client: its address; path without its query, and
    nothing of any body."""

    at: float
    status: int
    code: str
    message: str
    client: str = ""
    key: str = ""
    program: str = ""
    method: str = ""
    path: str = ""


class FailureCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests ended so since the program started."""

    status: int
    code: str
    count: int


class ApiReport(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side at `at` (unix time). Where it listens is in ApiStatus.

    requests_per_min, failures_per_min: over the last 60 seconds.  per_second: requests of each of them, oldest first.
    clients: busiest first.  failures: newest first, the last 50.  failure_counts: most first.
    """

    at: float = 0.0
    under_way: int = 0
    requests: int = 0
    requests_per_min: int = 0
    failures_per_min: int = 0
    per_second: tuple[int, ...] = ()
    keys: tuple[KeyReading, ...] = ()
    dialects: tuple[DialectReading, ...] = ()
    clients: tuple[ClientReading, ...] = ()
    failures: tuple[Failure, ...] = ()
    failure_counts: tuple[FailureCount, ...] = ()


class ApiLink(Protocol):
    """The HTTP side, for a screen. EngineLink starts and stops it."""

    def report(self) -> ApiReport:
        """Who asks, how much and what went wrong, at once."""

    async def listen(self, host: str, port: int) -> None:
        """Listen there instead, from now on; where it is off, when it is started next. Requests under way go on.

        port: 0 takes any free one. Raises with the reason where it cannot; it listens where it did, then.
        """

    async def make_key(self, name: str, scopes: tuple[Scope, ...], limits: KeyLimits = NO_LIMITS) -> NewKey:
        """Make a key; raises InvalidRequest for a name that is taken or is none, or where there are no scopes."""

    async def revoke_key(self, name: str) -> None:
        """Refuse a key from now on; raises where there is none of that name, or where everybody could ask then."""

    async def switch_dialect(self, name: str, on: bool) -> None:
        """Answer a dialect, or say that it is switched off."""
