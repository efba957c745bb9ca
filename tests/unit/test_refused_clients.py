"""Refused clients: a burst of refusals is one alert with a total, a few are none."""

from __future__ import annotations

import pytest

from console.api.http.refused_clients import BURST, MAX_CLIENTS, REFUSALS, WINDOW_S, RefusedClients
from console.api.http.traffic import Call, CallFailure, is_refused_work
from engine.metrics.alerts import MERGE_S, AlertLog


class Clock:
    """Seconds, as a test wants them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _call(address: str = "10.0.0.7", key: str = "", agent: str = "") -> Call:
    return Call(address, agent, "POST", "/v1/completions", key=key)


@pytest.mark.parametrize("status", sorted(REFUSALS))
def test_a_burst_of_refusals_is_one_alert_with_its_total_and_what_to_do(status: int) -> None:
    clock = Clock()
    alerts = AlertLog(clock=clock)
    refused = RefusedClients(alerts, clock)
    for _ in range(2 * BURST + 5):
        clock.now += 1
        refused.refused(_call(), status)
    (alert,) = alerts.latest
    assert alert.subject == "10.0.0.7" and alert.level == "warning" and alert.advice
    assert alert.text == f"10.0.0.7: {2 * BURST} requests refused, {status} {REFUSALS[status].reason}"
    assert alert.count == 2


def test_a_few_refusals_or_slow_ones_are_no_alert() -> None:
    clock = Clock()
    alerts = AlertLog(clock=clock)
    refused = RefusedClients(alerts, clock)
    for _ in range(BURST - 1):
        refused.refused(_call(), 401)
    for _ in range(3 * BURST):
        clock.now += WINDOW_S / (BURST - 1)
        refused.refused(_call("10.0.0.8"), 401)
    assert alerts.latest == ()


def test_clients_count_apart_by_address_and_key_whatever_program_they_name() -> None:
    clock = Clock()
    alerts = AlertLog(clock=clock)
    refused = RefusedClients(alerts, clock)
    for number in range(BURST):
        refused.refused(_call(key="grafana", agent=f"agent/{number}"), 429)
        refused.refused(_call(f"10.0.1.{number}"), 429)
    assert [(each.subject, each.count) for each in alerts.latest] == [("grafana@10.0.0.7", 1)]


def test_a_later_burst_is_another_alert_that_starts_at_zero() -> None:
    clock = Clock()
    alerts = AlertLog(clock=clock)
    refused = RefusedClients(alerts, clock)
    for _ in range(2):
        for _ in range(BURST):
            refused.refused(_call(), 403)
        clock.now += MERGE_S + 1
    assert [(each.count, f"{BURST} requests" in each.text) for each in alerts.latest] == [(1, True), (1, True)]


@pytest.mark.parametrize(
    ("code", "words"), [("draining", "the engine drains"), ("api_stopping", "the API is being switched off")]
)
def test_work_that_all_clients_are_refused_is_one_alert_with_its_count_and_what_to_do(code: str, words: str) -> None:
    alerts = AlertLog(clock=Clock())
    refused = RefusedClients(alerts, Clock())
    for number in range(3):
        refused.refused_work(_call(f"10.0.0.{number}"), CallFailure(503, code, "refused"))
    (alert,) = alerts.latest
    assert (alert.count, alert.level) == (3, "warning")
    assert alert.text == f"Clients are refused with 503: {words}. Last: 10.0.0.2"
    assert alert.advice.startswith("To accept requests again: ")


@pytest.mark.parametrize(
    ("method", "code", "counts"),
    [
        ("POST", "draining", True),
        ("POST", "api_stopping", True),
        ("GET", "draining", False),
        ("POST", "no_model_loaded", False),
    ],
)
def test_a_probe_or_a_failure_of_another_kind_is_no_refused_work(method: str, code: str, counts: bool) -> None:
    call = Call("10.0.0.7", "", method, "/v1/completions", failure=CallFailure(503, code, "refused"))
    assert is_refused_work(call) is counts


def test_of_many_clients_those_refused_last_are_remembered() -> None:
    refused = RefusedClients(AlertLog(), Clock())
    for number in range(2 * MAX_CLIENTS):
        refused.refused(_call(f"10.0.{number // 256}.{number % 256}"), 401)
    assert len(refused._bursts) == MAX_CLIENTS
