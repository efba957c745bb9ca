"""RefusedClients: an alert where one client is refused again and again, or all are as the operator wants no more work.
Belongs to the engine's loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from aiohttp import web

from console import text
from console.api.http.observability import RequestOutcome
from console.api.http.traffic import Call, CallFailure, is_refused_work
from console.link.api import ApiStopping
from engine.errors import Draining
from engine.metrics.alerts import MERGE_S, AlertLog


class Refusal(NamedTuple):
    """Meaning of a refusal, and the advice for it. subject: what the alert is about, "" where that is the client."""

    reason: str
    advice: str
    subject: str = ""


REFUSALS: Mapping[int, Refusal] = {
    401: Refusal(
        "wrong or missing key", "Give the client a valid key (API screen). If it is unknown, block its address."
    ),
    403: Refusal("not allowed", "Give its key the scope that it needs (API screen), or correct the client."),
    429: Refusal("over a limit", "Raise the limits of its key or the queue, or have the client send less."),
}
"""Statuses that count."""

WORK_REFUSALS: Mapping[str, Refusal] = {
    Draining.code: Refusal("the engine drains", "To accept requests again: D, or POST /admin/resume.", "engine"),
    ApiStopping.code: Refusal(
        "the API is being switched off", "To accept requests again: a, then Keep it on; once it is off, a.", "API"
    ),
}
"""Codes of errors that all clients get."""

BURST = 10
WINDOW_S = 60.0
"""BURST refusals within this time make an alert, and each further BURST counts in it."""

MAX_CLIENTS = 500
"""Clients that are remembered at once: those that were refused last."""


@dataclass(slots=True)
class _Burst:
    """total: refusals since an alert was due the last time; recent: since `since`."""

    since: float
    last_at: float
    total: int = 0
    recent: int = 0


class RefusedClients:
    """Observes requests. Clients go by address and key: the program is what they say it is."""

    def __init__(self, alerts: AlertLog, now: Callable[[], float] = time.monotonic) -> None:
        self._alerts = alerts
        self._now = now
        self._bursts: OrderedDict[tuple[str, str, int], _Burst] = OrderedDict()

    def on_request(self, request: web.Request, call: Call, outcome: RequestOutcome) -> None:
        """Count a refusal."""
        if outcome.status in REFUSALS:
            self.refused(call, outcome.status)
        elif call.failure is not None and is_refused_work(call):
            self.refused_work(call, call.failure)

    def refused(self, call: Call, status: int) -> None:
        """Count a refusal of that status; add an alert where it makes a burst."""
        now, refusal = self._now(), REFUSALS[status]
        burst = self._burst((call.address, call.key, status), now)
        if now - burst.since > WINDOW_S:
            burst.since, burst.recent = now, 0
        burst.recent += 1
        burst.total += 1
        burst.last_at = now
        if burst.recent < BURST:
            return
        burst.since, burst.recent = now, 0
        client = text.client_name(call.address, call.key)
        sender = text.client_name(call.address, call.key, call.program)
        self._alerts.add(
            f"client_refused_{status}",
            client,
            f"{sender}: {text.plural(burst.total, 'request')} refused, {status} {refusal.reason}",
            done="Each was answered with the reason.",
            advice=refusal.advice,
            level="warning",
        )

    def refused_work(self, call: Call, failure: CallFailure) -> None:
        """Count a request, of whatever client, in the alert that says why clients are refused."""
        refusal = WORK_REFUSALS[failure.code]
        sender = text.client_name(call.address, call.key, call.program)
        self._alerts.add(
            "clients_refused",
            refusal.subject,
            f"Clients are refused with {failure.status}: {refusal.reason}. Last: {sender}",
            done="Each was answered with the reason and Retry-After.",
            advice=refusal.advice,
            level="warning",
        )

    def _burst(self, client: tuple[str, str, int], now: float) -> _Burst:
        """Return the client's, as the most recent one. After a pause as long as alerts are merged it starts at zero."""
        burst = self._bursts.pop(client, None)
        if burst is None or now - burst.last_at > MERGE_S:
            burst = _Burst(since=now, last_at=now)
        self._bursts[client] = burst
        if len(self._bursts) > MAX_CLIENTS:
            self._bursts.popitem(last=False)
        return burst
