"""Simulated devices: how they are asked for, and whose memory on them is whose."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.base import LoadedModel
from engine.config import DeviceShare
from engine.devices import (
    BusyTime,
    MachineProbe,
    SimulatedProbe,
    account,
    new_probe,
    parse_devices,
    shares_of,
    simulated_readings,
)
from engine.errors import InvalidRequest

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "gib"),
    [("sim:24,24", (24.0, 24.0)), (" sim: 0.5 , 80 ", (0.5, 80.0)), ("sim:" + "1," * 63 + "1", (1.0,) * 64)],
)
def test_devices_are_asked_for_by_their_gib(text: str, gib: tuple[float, ...]) -> None:
    assert parse_devices(text) == gib


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sim:0", "gives a device 0.0 GiB; it must be more than 0"),
        ("sim:-1", "gives a device -1.0 GiB"),
        ("sim:24,nan", "gives a device nan GiB"),
        ("sim:inf", "max 1,000,000"),
        ("sim:1e-12", "more than 0"),
        ("sim:", "a size is missing"),
        ("sim:24,", "a size is missing"),
        ("sim:big", "'big' is not a number of GiB"),
        ("24,24", "use sim:GIB,GIB"),
        ("cuda:0", "use sim:"),
        ("", "use sim:"),
        ("sim:" + ",".join(["1"] * 65), "names 65 devices; max 64"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        parse_devices(text)
    assert refused.value.details["param"] == "devices"


def test_simulated_devices_stand_before_the_host_and_say_what_they_are() -> None:
    *simulated, host = SimulatedProbe((24.0, 0.5)).read({os.getpid()})
    assert [(each.id, each.kind, each.name) for each in simulated] == [
        ("sim:0", "simulated", "Simulated 24 GiB"),
        ("sim:1", "simulated", "Simulated 0.5 GiB"),
    ]
    assert simulated[1].total_bytes == simulated[1].free_bytes == GIB // 2
    assert (simulated[0].temperature_c, simulated[0].power_w, simulated[0].utilisation) == (None, None, None)
    assert (host.id, host.kind) == ("cpu", "cpu")
    assert host.work_bytes > 0


def test_the_settings_choose_between_the_machine_and_simulated_devices() -> None:
    assert isinstance(new_probe(()), MachineProbe)
    assert [device.id for device in new_probe((1.0, 2.0)).read()] == ["sim:0", "sim:1", "cpu"]


def test_simulated_sensors_follow_the_work_and_are_all_there() -> None:
    devices = SimulatedProbe((24.0,)).read()
    idle, *_ = account(devices, {}, {"sim:0": 0.0})
    busy, *_ = account(devices, {}, {"sim:0": 1.0})
    assert idle.sensors is not None and busy.sensors is not None
    assert None not in [*msgspec.structs.asdict(idle.sensors).values(), idle.temperature_c, idle.power_w]
    assert (idle.temperature_c, idle.power_w, idle.sensors.sm_clock_mhz) == (34, 45, 210)
    assert (busy.temperature_c, busy.power_w, busy.sensors.sm_clock_mhz) == (78, 335, 1980)
    assert busy.power_limit_w == 350


def test_a_busy_simulated_device_is_throttled_now_and_then_and_an_idle_one_never() -> None:
    probe = SimulatedProbe((24.0, 24.0))
    busy, idle = [], []
    for _ in range(120):
        first, second, host = account(probe.read(), {}, {"sim:0": 1.0, "sim:1": 0.0})
        assert first.sensors is not None and second.sensors is not None and host.sensors is None
        busy.append((first.sensors.throttle_reasons, first.temperature_c, first.sensors.sm_clock_mhz))
        idle.append(second.sensors.throttle_reasons)
    assert busy.count((("temperature",), 88, 1386)) == 8
    assert busy.count(((), 78, 1980)) == 112
    assert set(idle) == {()}


def share(device: str, weights: int = 0, kv: int = 0, working: int = 0) -> DeviceShare:
    return DeviceShare(device=device, weights_bytes=weights, kv_bytes=kv, working_bytes=working)


def test_what_workers_hold_is_all_that_is_in_use_on_a_simulated_device() -> None:
    first, second = account(
        simulated_readings((1.0, 1.0)),
        {"w0": [share("sim:0", 100, 20, 5), share("sim:1", 40)], "w1": [share("sim:0", 7, 3, 1)]},
        {"sim:0": 0.25},
    )
    assert (first.weights_bytes, first.kv_bytes, first.work_bytes, first.others_bytes) == (107, 23, 6, 0)
    assert (first.free_bytes, first.utilisation) == (GIB - 136, 0.25)
    assert (second.weights_bytes, second.free_bytes, second.utilisation) == (40, GIB - 40, 0.0)


def test_what_workers_hold_is_told_apart_on_a_real_device() -> None:
    *_, host = SimulatedProbe((1.0,)).read({os.getpid()})
    [split] = account([host], {"w0": [share("cpu", 1000, 200)], "w1": [share("sim:0", 5)]})
    assert (split.weights_bytes, split.kv_bytes) == (1000, 200)
    assert split.weights_bytes + split.kv_bytes + split.work_bytes == host.work_bytes
    assert split.utilisation == host.utilisation


@given(st.lists(st.tuples(*[st.integers(0, 2 * GIB)] * 3), max_size=4))
def test_the_parts_of_a_simulated_device_sum_to_its_total_whatever_is_claimed(held: list[tuple[int, int, int]]) -> None:
    shares = {f"w{number}": [share("sim:0", *sizes)] for number, sizes in enumerate(held)}
    [device] = account(simulated_readings((1.0,)), shares)
    parts = (device.weights_bytes, device.kv_bytes, device.work_bytes, device.others_bytes, device.free_bytes)
    assert sum(parts) == device.total_bytes
    assert min(parts) >= 0


def test_a_backend_that_does_not_say_where_its_memory_lies_is_taken_to_spread_it_evenly() -> None:
    model = LoadedModel(
        backend="x",
        architecture="x",
        dtype="x",
        devices=("cuda:0", "cuda:1"),
        vocab_size=1,
        max_model_len=1,
        kv_tokens=1,
        page_tokens=1,
        weights_bytes=100,
        kv_bytes=10,
        parameters=1,
    )
    assert shares_of(model) == (share("cuda:0", 50, 5), share("cuda:1", 50, 5))


def test_utilisation_is_the_share_of_the_last_second_that_steps_took() -> None:
    busy = BusyTime()
    busy.add_steps(["sim:0", "sim:1"], ended=10.2, step_s=0.2)
    busy.add_steps(["sim:0"], ended=10.5, step_s=0.1)
    busy.add_steps(["sim:0"], ended=10.9, step_s=0.0)
    assert busy.shares(10.5) == pytest.approx({"sim:0": 0.3, "sim:1": 0.2})
    assert busy.shares(11.1) == pytest.approx({"sim:0": 0.2, "sim:1": 0.1})
    assert busy.shares(20.0) == {"sim:0": 0.0, "sim:1": 0.0}


def test_two_workers_in_a_step_at_once_keep_their_device_busy_once() -> None:
    busy = BusyTime()
    for ended in (5.0, 5.1):
        busy.add_steps(["sim:0"], ended=ended, step_s=0.4)
    busy.add_steps(["sim:0"], ended=5.05, step_s=0.1)
    assert busy.shares(5.1) == pytest.approx({"sim:0": 0.5})
    busy.add_steps(["sim:0"], ended=9.0, step_s=3.0)
    assert busy.shares(9.0) == pytest.approx({"sim:0": 1.0})
