"""Devices on the screen: simulated ones, those of other nodes, and programs that hold their memory."""

from __future__ import annotations

import pytest

from console.app import EricApp
from console.widgets.devices import brief, detailed, paired, title
from console.widgets.names import device_name, devices_name
from engine.snapshot import ProcessMemory, Snapshot
from tests.fakes import fleet_scenes, scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import screen_text

SIZES = [(80, 24), (100, 30), (120, 40)]


async def _seen(snapshot: Snapshot, size: tuple[int, int]) -> str:
    app = EricApp(FakeLink(snapshot))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        return screen_text(app)


@pytest.mark.parametrize("size", SIZES)
async def test_simulated_is_written_at_every_size(size: tuple[int, int]) -> None:
    seen = await _seen(fleet_scenes.simulated(), size)
    assert "simulated" in seen.splitlines()[0]
    assert "Devices (simulated)" in seen
    assert all(name in seen for name in ("SIM0", "SIM1", "SIM0+1"))


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (140, 40)])
async def test_eight_simulated_devices_are_all_seen(size: tuple[int, int]) -> None:
    seen = await _seen(fleet_scenes.eight_simulated(), size)
    assert all(f"SIM{index}" in seen for index in range(8))
    assert "Devices (simulated)" in seen
    assert "decode" in seen


def test_every_form_names_simulated_devices_and_those_of_other_nodes() -> None:
    devices = (fleet_scenes.sim(0), scenes.gpu(1, id="node2/cuda:1", node="node2"))
    for form in (brief, detailed, paired):
        drawn = "\n".join(line.plain for line in form(devices, 90))
        assert "SIM0" in drawn
        assert "node2 GPU1" in drawn
    assert title(devices) == "Devices (1 of 2 simulated)"
    assert title((scenes.gpu(0), scenes.cpu())) == "Devices"
    assert title((fleet_scenes.sim(0), scenes.cpu())) == "Devices (simulated)"


@pytest.mark.parametrize("width", [46, 56, 66, 90])
def test_no_line_of_a_device_is_wider_than_the_panel(width: int) -> None:
    devices = (scenes.gpu(0), fleet_scenes.sim(1), scenes.gpu(2, id="node2/cuda:2", node="node2"))
    forms = [brief, *([detailed] if width >= 56 else []), *([paired] if width >= 72 else [])]
    assert [line.plain for form in forms for line in form(devices, width) if line.cell_length > width] == []


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        (("cuda:0",), "GPU0"),
        (("cpu",), "CPU"),
        (("sim:0", "sim:1"), "SIM0+1"),
        (("node2/cuda:0", "node2/cuda:3"), "node2 GPU0+3"),
        (("cuda:0", "sim:1"), "GPU0+SIM1"),
        ((), "–"),
    ],
)
def test_devices_have_short_names(devices: tuple[str, ...], shown: str) -> None:
    assert devices_name(devices) == shown


def test_a_node_with_a_long_name_keeps_the_device_in_sight() -> None:
    assert device_name("a-node-with-a-long-name/cuda:7") == "a-node-wi… GPU7"


async def test_programs_that_hold_memory_are_named() -> None:
    stranger = ProcessMemory(pid=2211, name="/usr/lib/xorg/Xorg", used_bytes=int(1.5 * scenes.GIB))
    seen = await _seen(scenes.busy(devices=(scenes.gpu(0, others=(stranger,)), scenes.gpu(1))), (100, 30))
    assert "others: Xorg (2211) 1.5 GiB on GPU0" in seen


async def test_nodes_stand_beside_this_machine() -> None:
    seen = await _seen(fleet_scenes.two_nodes(), (100, 30))
    assert seen.count("node2 GPU0") == 2
