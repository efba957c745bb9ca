"""What placement sees of the devices: memory that workers were promised is set aside, and what goes is given back."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from engine.config import DeviceShare
from engine.devices import simulated_readings
from engine.placement.model_memory import RUNTIME_BYTES
from engine.placement.plan import with_reservations
from engine.snapshot import DeviceReading, WorkerState

GIB = 2**30


@dataclass(frozen=True)
class Worker:
    """A worker that was promised `planned` and holds `shares`."""

    id: str
    state: WorkerState
    planned: tuple[DeviceShare, ...]
    shares: tuple[DeviceShare, ...] = field(default=())


def share(device: str, gib: float) -> DeviceShare:
    return DeviceShare(device=device, weights_bytes=int(gib * GIB))


def card(free_gib: float) -> DeviceReading:
    return DeviceReading(
        id="cuda:0", name="a card", kind="cuda", utilisation=None, total_bytes=24 * GIB, free_bytes=int(free_gib * GIB)
    )


@pytest.mark.parametrize("state", ["starting", "loading", "restarting"])
def test_what_a_worker_is_still_to_load_is_set_aside(state: WorkerState) -> None:
    worker = Worker("w0", state, (share("cuda:0", 5),))
    assert with_reservations([card(20)], [worker])[0].free_bytes == 15 * GIB


def test_what_a_worker_holds_is_in_the_reading_already() -> None:
    worker = Worker("w0", "ready", (share("cuda:0", 5),), (share("cuda:0", 4),))
    assert with_reservations([card(20)], [worker])[0].free_bytes == 20 * GIB


def test_a_worker_that_is_to_go_gives_back_what_it_holds_and_no_more_than_there_is() -> None:
    worker = Worker("w0", "ready", (share("cuda:0", 5),), (share("cuda:0", 4),))
    assert with_reservations([card(10)], [worker], leaving=[worker])[0].free_bytes == 14 * GIB
    assert with_reservations([card(23)], [worker], leaving=[worker])[0].free_bytes == 24 * GIB


def test_a_worker_that_is_to_go_before_it_has_loaded_gives_back_nothing() -> None:
    worker = Worker("w0", "loading", (share("cuda:0", 5),))
    assert with_reservations([card(10)], [worker], leaving=[worker])[0].free_bytes == 10 * GIB


def test_weights_that_workers_on_a_cpu_share_are_promised_and_given_back_once() -> None:
    cpu = DeviceReading(id="cpu", name="a CPU", kind="cpu", utilisation=None, total_bytes=64 * GIB, free_bytes=20 * GIB)
    planned = DeviceShare(device="cpu", weights_bytes=4 * GIB, shared_bytes=4 * GIB, kv_bytes=GIB)
    own = msgspec.structs.replace(planned, shared_bytes=0)
    for shares, together in ((planned, 4 + 3), (own, 3 * (4 + 1))):
        loading = [Worker(f"w{number}", "loading", (shares,)) for number in range(3)]
        assert with_reservations([cpu], loading)[0].free_bytes == (20 - together) * GIB
        ready = [Worker(f"w{number}", "ready", (shares,), (shares,)) for number in range(3)]
        assert with_reservations([cpu], ready, leaving=ready)[0].free_bytes == (20 + together) * GIB
    ready = [Worker(f"w{number}", "ready", (planned,), (planned,)) for number in range(3)]
    more = Worker("w3", "loading", (planned,))
    assert with_reservations([cpu], [*ready, more])[0].free_bytes == 19 * GIB
    assert with_reservations([cpu], ready, leaving=ready[:2])[0].free_bytes == 22 * GIB


def test_memory_that_is_kept_for_a_restarting_worker_is_not_set_aside_again() -> None:
    cpu = DeviceReading(id="cpu", name="a CPU", kind="cpu", utilisation=None, total_bytes=64 * GIB, free_bytes=20 * GIB)
    planned = DeviceShare(
        device="cpu", weights_bytes=5 * GIB, shared_bytes=4 * GIB, kv_bytes=2 * GIB, working_bytes=GIB
    )
    kept = {"w0": 6 * GIB}.get  # shared weights and KV pages
    for state in ("restarting", "starting", "loading"):
        worker = Worker("w0", state, (planned,))
        assert with_reservations([cpu], [worker], surviving_bytes=kept)[0].free_bytes == (20 - 2) * GIB
        assert with_reservations([cpu], [worker], surviving_bytes={"w0": 0}.get)[0].free_bytes == (20 - 8) * GIB
        assert (
            with_reservations([cpu], [worker], leaving=[worker], surviving_bytes=kept)[0].free_bytes == (20 + 6) * GIB
        )
        others = Worker("w1", "ready", (planned,), (planned,))
        assert with_reservations([cpu], [worker, others], surviving_bytes=kept)[0].free_bytes == (20 - 2) * GIB
    ready = Worker("w0", "ready", (planned,), (planned,))
    assert with_reservations([cpu], [ready], surviving_bytes=kept)[0].free_bytes == 20 * GIB


def test_workers_on_simulated_devices_are_promised_the_hosts_memory_too() -> None:
    host = DeviceReading(
        id="cpu", name="a CPU", kind="cpu", utilisation=None, total_bytes=24 * GIB, free_bytes=20 * GIB
    )
    planned = DeviceShare(device="sim:0", weights_bytes=4 * GIB, shared_bytes=4 * GIB, kv_bytes=GIB, working_bytes=GIB)
    devices = [*simulated_readings((24.0,)), host]
    loading = [Worker(f"w{number}", "loading", (planned,)) for number in range(2)]
    once = 4 * GIB + 2 * (2 * GIB + RUNTIME_BYTES["cpu"])
    assert with_reservations(devices, loading)[1].free_bytes == 20 * GIB - once
    ready = [Worker(f"w{number}", "ready", (planned,), (planned,)) for number in range(2)]
    assert with_reservations(devices, ready)[1].free_bytes == 20 * GIB
    assert (
        with_reservations(devices, ready, leaving=ready[:1])[1].free_bytes == 20 * GIB + 2 * GIB + RUNTIME_BYTES["cpu"]
    )


def test_a_failed_worker_holds_nothing_that_could_be_given_back() -> None:
    dead = Worker("w0", "failed", (share("cuda:0", 5),), (share("cuda:0", 4),))
    assert with_reservations([card(10)], [dead], leaving=[dead])[0].free_bytes == 10 * GIB
    assert (
        with_reservations(simulated_readings((24.0,)), [Worker("w0", "failed", (share("sim:0", 5),))])[0].free_bytes
        == 24 * GIB
    )


def test_a_simulated_device_has_nothing_but_what_was_promised() -> None:
    first = Worker("w0", "ready", (share("sim:0", 5),), (share("sim:0", 4),))
    second = Worker("w1", "loading", (share("sim:0", 6),))
    readings = simulated_readings((24.0,))
    assert with_reservations(readings, [first, second])[0].free_bytes == 13 * GIB
    assert with_reservations(readings, [first, second], leaving=[first])[0].free_bytes == 18 * GIB
