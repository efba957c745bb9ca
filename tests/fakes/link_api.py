"""FakeApi: the HTTP side of a FakeLink, as a test wants it seen; its commands do what they say and are written down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from console.link.api import (
    NO_LIMITS,
    ApiReport,
    ClientReading,
    DialectReading,
    Failure,
    FailureCount,
    KeyLimits,
    KeyReading,
    NewKey,
    Scope,
)
from engine.errors import InvalidRequest
from tests.fakes import scenes

if TYPE_CHECKING:
    from tests.fakes.link import FakeLink

KEY = "eric_" + "Xy7-" * 8
"""What every key that is made consists of."""

NOW = scenes.NOW
REPORT = ApiReport(
    at=NOW,
    under_way=14,
    requests=4120,
    requests_per_min=214,
    failures_per_min=3,
    per_second=tuple(3 + (at * 7) % 5 + (at > 40) * (at - 40) // 6 for at in range(60)),
    keys=(
        KeyReading(
            name="settings",
            scopes=("admin",),
            last_used_at=NOW - 86_400 * 3,
            requests=12,
            prompt_tokens=900,
            output_tokens=1800,
        ),
        KeyReading(
            name="app",
            scopes=("use",),
            made_at=NOW - 86_400 * 40,
            last_used_at=NOW - 2,
            requests=3871,
            prompt_tokens=2_904_400,
            output_tokens=811_240,
        ),
        KeyReading(
            name="grafana",
            scopes=("watch",),
            made_at=NOW - 86_400 * 9,
            last_used_at=NOW - 14,
            requests=235,
        ),
        KeyReading(name="night batch", scopes=("use", "watch"), made_at=NOW - 3600),
    ),
    dialects=(
        DialectReading(
            name="openai",
            title="OpenAI",
            routes=("/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions"),
            requests=3790,
            example_path="/v1/chat/completions",
            example_body={"messages": [{"role": "user", "content": "Hello"}]},
        ),
        DialectReading(
            name="generate",
            title="EricLLM and vLLM",
            routes=("/generate",),
            on=False,
            requests=81,
            example_path="/generate",
            example_body={"prompt": "Hello"},
        ),
    ),
    clients=(
        ClientReading(
            address="10.0.0.17",
            key="app",
            agent="OpenAI/Python 2.8.0",
            under_way=11,
            requests=1904,
            since=NOW - 5400,
        ),
        ClientReading(
            address="10.0.0.23",
            key="app",
            agent="axios/1.7.9",
            under_way=3,
            requests=88,
            since=NOW - 260,
        ),
        ClientReading(
            address="10.0.0.5",
            key="grafana",
            agent="Prometheus/3.1.0",
            requests=235,
            since=NOW - 86_000,
        ),
    ),
    failures=(
        Failure(
            at=NOW - 9,
            status=429,
            code="queue_full",
            message="The queue is full: 64 requests wait",
            client="10.0.0.17",
            key="app",
            method="POST",
            path="/v1/chat/completions",
        ),
        Failure(
            at=NOW - 31,
            status=401,
            code="invalid_api_key",
            message="That key is not valid here",
            client="10.0.0.99",
            method="GET",
            path="/v1/models",
        ),
        Failure(
            at=NOW - 44,
            status=400,
            code="context_length_exceeded",
            message="The prompt has 9,120 tokens; with max_tokens 512 that is more than the 8,192 of the model",
            client="10.0.0.23",
            key="app",
            method="POST",
            path="/v1/completions",
        ),
    ),
    failure_counts=(
        FailureCount(status=429, code="queue_full", count=19),
        FailureCount(status=401, code="invalid_api_key", count=4),
        FailureCount(status=400, code="context_length_exceeded", count=2),
    ),
)
"""A server that has work, trouble, and one dialect switched off."""


class FakeApi:
    """seen: what report() gives; a test may replace it."""

    def __init__(self, link: FakeLink) -> None:
        self._link = link
        self.seen = REPORT

    def report(self) -> ApiReport:
        """As the commands left it."""
        return self.seen

    async def listen(self, host: str, port: int) -> None:
        """There from now on."""
        await self._link.record("listen", host=host, port=port)
        self._link.served = msgspec.structs.replace(self._link.served, host=host, port=port)

    async def make_key(self, name: str, scopes: tuple[Scope, ...], limits: KeyLimits = NO_LIMITS) -> NewKey:
        """One more, or InvalidRequest for a name that is taken."""
        await self._link.record(
            "make_key", name=name, scopes=scopes, **({"limits": limits} if limits != NO_LIMITS else {})
        )
        if any(key.name == name for key in self.seen.keys):
            raise InvalidRequest(f"There is a key called {name} already; choose another name", param="name")
        self._keep(*self.seen.keys, KeyReading(name=name, scopes=scopes, limits=limits, made_at=NOW))
        return NewKey(name=name, scopes=scopes, key=KEY)

    async def revoke_key(self, name: str) -> None:
        """One less."""
        await self._link.record("revoke_key", name=name)
        self._keep(*(key for key in self.seen.keys if key.name != name))

    async def switch_dialect(self, name: str, on: bool) -> None:
        """On or off."""
        await self._link.record("switch_dialect", name=name, on=on)
        switched = (
            msgspec.structs.replace(dialect, on=on) if dialect.name == name else dialect
            for dialect in self.seen.dialects
        )
        self.seen = msgspec.structs.replace(self.seen, dialects=tuple(switched))

    def _keep(self, *keys: KeyReading) -> None:
        self.seen = msgspec.structs.replace(self.seen, keys=keys)
        self._link.served = msgspec.structs.replace(self._link.served, key_required=bool(keys))
