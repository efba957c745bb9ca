"""Alerts of devices: Xid and ECC errors and harmful throttling, each once as long as it lasts."""

from __future__ import annotations

import msgspec

from engine.devices.health import DeviceWatch, harmful_throttling
from engine.metrics.alerts import AlertLog
from engine.snapshot import DeviceReading, DeviceSensors
from tests.fakes import scenes


def gpu(**sensors: object) -> DeviceReading:
    return msgspec.structs.replace(scenes.gpu(0), sensors=DeviceSensors(**sensors))  # type: ignore[arg-type]


def causes(*readings: DeviceReading) -> list[tuple[str, int]]:
    log = AlertLog()
    watch = DeviceWatch(log)
    for reading in readings:
        watch.look([reading])
    return [(alert.cause, alert.count) for alert in log.latest]


def test_a_new_xid_is_an_alert_and_the_same_one_is_not_told_again() -> None:
    assert causes(gpu(xid_errors=()), gpu(xid_errors=(79,)), gpu(xid_errors=(79,))) == [("xid_error", 1)]
    assert causes(gpu(xid_errors=(79,)), gpu(xid_errors=(79, 43))) == [("xid_error", 2)]


def test_ecc_errors_are_an_alert_where_they_rise_and_not_for_those_before_the_start() -> None:
    assert causes(gpu(ecc_errors=3), gpu(ecc_errors=3)) == []
    assert causes(gpu(ecc_errors=3), gpu(ecc_errors=5)) == [("ecc_error", 1)]


def test_throttling_by_temperature_is_one_alert_for_each_time_and_a_power_limit_is_none() -> None:
    hot, cool = gpu(throttle_reasons=("temperature",)), gpu(throttle_reasons=())
    assert causes(hot, hot, cool, hot) == [("throttled", 2)]
    assert causes(gpu(throttle_reasons=("power limit", "clocks set by the operator"))) == []
    assert harmful_throttling(hot) == ("temperature",)


def test_a_device_that_reports_none_of_it_makes_no_alert() -> None:
    assert causes(gpu(), scenes.cpu(), scenes.gpu(1)) == []
    assert harmful_throttling(scenes.gpu(1)) == ()
