"""The Devices page: every reading of each device, n/a where it gives none."""

from __future__ import annotations

import msgspec
import pytest

from console.link.readonly import ReadOnlyLink
from console.link.rpc import as_link
from console.tui.app import EricApp
from console.tui.screens.devices.screen import device_blocks
from engine.devices.simulated import SimulatedProbe, under_load
from engine.errors import EngineBusy
from engine.snapshot import DeviceSensors, ProcessMemory
from tests.fakes import insight_scenes, scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, toasts, until

SENSORS = DeviceSensors(
    memory_utilisation=0.61,
    sm_clock_mhz=1695,
    max_sm_clock_mhz=1980,
    memory_clock_mhz=9501,
    max_memory_clock_mhz=10251,
    throttle_reasons=("temperature",),
    pcie_generation=3,
    max_pcie_generation=4,
    pcie_width=8,
    max_pcie_width=16,
    pcie_rx_bytes_per_s=1.5 * 2**30,
    pcie_tx_bytes_per_s=2.0**28,
    ecc_errors=2,
    xid_errors=(79,),
    fan=0.45,
    nvlink_links=18,
    max_nvlink_links=18,
    nvlink_rx_bytes_per_s=4.0 * 2**30,
    nvlink_tx_bytes_per_s=3.0 * 2**30,
)


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 48), (220, 60)])
async def test_every_reading_is_on_the_page(size: tuple[int, int]) -> None:
    own = (ProcessMemory(pid=4242, name="python", used_bytes=2**30),)
    device = msgspec.structs.replace(scenes.gpu(0), sensors=SENSORS, own=own)
    app = EricApp(FakeLink(scenes.busy(devices=(device,))))
    async with app.run_test(size=size) as pilot:
        await pilot.press("d")
        await until(pilot, lambda: "SM clock" in screen_text(app))
        seen = screen_text(app)
        for words in (
            "memory interface 61%",
            "312 of 350 W",
            "1,695 of 1,980 MHz",
            "9,501 of 10,251 MHz",
            "gen 3 of 4 · x8 of 16 · in 1.5 GiB/s",
            "ECC errors    2",
            "Xid errors    79",
            "fan           45%",
            "NVLink        18 of 18 links · in 4.0 GiB/s · out 3.0 GiB/s",
            "1.0 GiB     4242  python  worker",
        ):
            assert words in seen, words
        await pilot.press("escape")
        await until(pilot, lambda: "SM clock" not in screen_text(app))


def test_an_absent_reading_is_n_a_and_never_zero() -> None:
    bare = msgspec.structs.replace(scenes.gpu(0), utilisation=None, temperature_c=None, power_w=None, sensors=None)
    lines = device_blocks(scenes.busy(devices=(bare,))).plain.splitlines()
    absent = {line.split("  ")[1].strip() for line in lines if line.endswith("n/a")}
    readings = ("utilisation", "power", "temperature", "SM clock", "memory clock", "throttling", "PCIe")
    assert absent >= {*readings, "NVLink", "ECC errors", "Xid errors", "fan"}


def test_the_memory_of_a_process_that_is_not_known_is_n_a() -> None:
    own = (ProcessMemory(pid=4242, name="python", used_bytes=0),)
    shown = device_blocks(scenes.busy(devices=(msgspec.structs.replace(scenes.gpu(0), own=own),))).plain
    assert "n/a     4242  python  worker" in shown


@pytest.mark.parametrize(
    ("size", "heat"), [((80, 24), "n/a °C n/a W"), ((100, 30), ""), ((160, 48), "n/a °C   n/a W")], ids=str
)
async def test_an_absent_reading_is_n_a_on_the_dashboard(size: tuple[int, int], heat: str) -> None:
    bare = msgspec.structs.replace(scenes.gpu(0), utilisation=None, temperature_c=None, power_w=None, sensors=None)
    app = EricApp(FakeLink(scenes.busy(devices=(bare,))))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: heat in screen_text(app) and " n/a " in screen_text(app).replace(heat, ""))


def test_simulated_devices_play_every_reading() -> None:
    (device,) = (each for each in SimulatedProbe((24,)).read() if each.kind == "simulated")
    device = under_load(msgspec.structs.replace(device, utilisation=0.5), 0.5)
    text = device_blocks(scenes.empty(devices=(device,))).plain
    assert [line for line in text.splitlines() if line.endswith("n/a") and "processes" not in line] == []


async def test_throttling_and_xid_stand_at_the_device_on_the_dashboard() -> None:
    device = msgspec.structs.replace(scenes.gpu(0), sensors=SENSORS)
    app = EricApp(FakeLink(scenes.busy(devices=(device,))))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "throttled" in screen_text(app))
        assert "Xid 79" in screen_text(app)


async def test_l_measures_the_peak_of_the_processor() -> None:
    link = FakeLink(insight_scenes.one_answer())
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("d")
        await until(pilot, lambda: "peak not measured" in screen_text(app))
        await pilot.press("l")
        await until(pilot, lambda: link.names() == ["measure"])


async def test_a_measurement_that_is_refused_says_why() -> None:
    link = FakeLink(insight_scenes.one_answer())
    link.failures["measure"] = EngineBusy("CPU peak can be measured only while no request is running")
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("d", "l")
        await until(pilot, lambda: any("can be measured only" in each for each in toasts(app)))


async def test_a_read_only_console_does_not_offer_to_measure() -> None:
    app = EricApp(as_link(ReadOnlyLink(FakeLink(insight_scenes.one_answer()))))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("d")
        await until(pilot, lambda: "esc Close" in rows(app)[-1])
        assert "Measure" not in rows(app)[-1]
