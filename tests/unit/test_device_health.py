"""Alerts of devices: Xid and ECC errors and harmful throttling, each once as long as it lasts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.devices.health import DeviceWatch, DiskWatch, harmful_throttling
from engine.metrics.alerts import AlertLog
from engine.snapshot import DeviceReading, DeviceSensors
from engine.system.slow_disk import SLOW_WRITE_S, WriteWatch
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


def test_an_alert_calls_a_device_as_the_panels_do() -> None:
    log = AlertLog()
    simulated = msgspec.structs.replace(gpu(xid_errors=(79,)), id="sim:1", name="Simulated 24 GiB", kind="simulated")
    DeviceWatch(log).look([simulated])
    assert [(alert.subject, alert.text) for alert in log.latest] == [("SIM1", "SIM1 reported Xid 79")]
    assert log.latest[0].done


def test_an_alert_of_throttling_says_when_it_ended() -> None:
    now = [1000.0]
    log = AlertLog(clock=lambda: now[0])
    watch = DeviceWatch(log, lambda: now[0])
    watch.look([gpu(throttle_reasons=("temperature",))])
    assert log.latest[0].done == "Its workers continue at that clock."
    now[0] += 42
    watch.look([gpu(throttle_reasons=())])
    assert log.latest[0].done == "Its clock was free again after 42 s."


def test_a_slow_write_is_one_alert_with_its_file_while_it_lasts_and_says_when_it_is_over() -> None:
    now, log = [0.0], AlertLog()
    writes = WriteWatch(lambda: now[0])
    watch, path = DiskWatch(log, writes), Path("/var/log/ericllm.log")
    with writes.timed(path):
        now[0] += SLOW_WRITE_S - 0.1
        watch.look()
        assert log.latest == ()
        now[0] += 0.1
        watch.look()
        watch.look()
    (alert,) = log.latest
    assert (alert.cause, alert.subject, alert.level) == ("slow_disk", str(path), "warning")
    assert alert.text == f"A write to {path} takes 2.0 s"
    watch.look()
    watch.look()
    assert log.latest[0].done == "Its writes are fast again."
    writes.lost(path)
    watch.look()
    assert "lost lines: 1" in log.latest[0].text


def test_a_device_that_reports_none_of_it_makes_no_alert() -> None:
    assert causes(gpu(), scenes.cpu(), scenes.gpu(1)) == []
    assert harmful_throttling(scenes.gpu(1)) == ()
