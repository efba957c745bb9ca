"""Device readings and how memory is split."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.devices import Claim, HostProbe, NvmlProbe, cpu_name, split_memory, visible_devices
from engine.devices.cpu_and_ram import held_bytes, process_bytes
from engine.devices.sampler import DeviceSampler
from engine.snapshot import DeviceReading, ProcessMemory
from engine.system.memory import Ram, read_ram

GIB = 2**30


def reading(*, total: int, free: int, ours: int) -> DeviceReading:
    return DeviceReading(
        id="cpu", name="c", kind="cpu", utilisation=None, total_bytes=total, free_bytes=free, work_bytes=ours
    )


def parts(device: DeviceReading) -> tuple[int, int, int, int, int]:
    return device.weights_bytes, device.kv_bytes, device.work_bytes, device.others_bytes, device.free_bytes


def test_memory_is_split_into_weights_kv_work_others_and_free() -> None:
    split = split_memory(reading(total=100, free=40, ours=35), Claim(weights_bytes=20, kv_bytes=10))
    assert parts(split) == (20, 10, 5, 25, 40)


def test_a_driver_that_names_no_processes_still_shows_what_workers_claim() -> None:
    split = split_memory(reading(total=100, free=40, ours=0), Claim(weights_bytes=20, kv_bytes=10))
    assert parts(split) == (20, 10, 0, 30, 40)


def test_in_a_container_all_that_is_claimed_is_ours_and_its_host_pid_is_not_anothers() -> None:
    claim = Claim(weights_bytes=20, kv_bytes=10, working_bytes=15)
    host_pid, other = ProcessMemory(pid=4711, used_bytes=50), ProcessMemory(pid=4712, used_bytes=9)
    hidden = msgspec.structs.replace(reading(total=100, free=40, ours=0), others=(host_pid, other))
    split = split_memory(hidden, claim)
    assert parts(split) == (20, 10, 15, 15, 40)
    assert split.others == (other,)


def test_where_pids_are_ours_or_have_names_the_driver_says_whose_memory_it_is() -> None:
    claim = Claim(weights_bytes=20, kv_bytes=10, working_bytes=15)
    nameless = ProcessMemory(pid=4711, used_bytes=50)
    listed = msgspec.structs.replace(reading(total=100, free=40, ours=35), others=(nameless,))
    assert parts(split_memory(listed, claim)) == (20, 10, 5, 25, 40)
    assert split_memory(listed, claim).others == (nameless,)
    named = ProcessMemory(pid=4711, name="trainer", used_bytes=50)
    before_its_context = msgspec.structs.replace(reading(total=100, free=40, ours=0), others=(named,))
    assert parts(split_memory(before_its_context, claim)) == (20, 10, 0, 30, 40)
    assert split_memory(before_its_context, claim).others == (named,)


@given(
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_the_parts_sum_to_the_total(total: int, free: int, ours: int, weights: int, kv: int, working: int) -> None:
    split = split_memory(
        reading(total=total, free=min(free, total), ours=ours),
        Claim(weights_bytes=weights, kv_bytes=kv, working_bytes=working),
    )
    assert sum(parts(split)) == total
    assert min(parts(split)) >= 0


def test_the_host_counts_our_processes_and_everything_adds_up() -> None:
    [host] = HostProbe().read({os.getpid(), 2**30})
    assert (host.id, host.kind) == ("cpu", "cpu")
    assert 0 < host.work_bytes < host.total_bytes
    assert host.work_bytes + host.others_bytes + host.free_bytes == host.total_bytes


@contextmanager
def asked(*preparations: str, file: int | None = None) -> Iterator[tuple[int, Callable[[], None]]]:
    """A process of its own, whose memory nothing else changes, and what runs the next of `preparations` in it.

    `file`: a descriptor that it has open too, as `sys.argv[1]`.
    """
    lines = ["import mmap, os, sys", "print(flush=True)"]
    for each in preparations:
        lines += ["input()", each, "print(flush=True)"]
    command = [sys.executable, "-c", "\n".join([*lines, "input()"]), str(file)]
    passed = () if file is None else (file,)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=passed) as child:
        assert child.stdin is not None and child.stdout is not None
        sent, came = child.stdin, child.stdout
        assert came.readline(), "it started"

        def go_on() -> None:
            sent.write(b"\n")
            sent.flush()
            assert came.readline(), "it did as it was told"

        yield child.pid, go_on
        child.communicate(b"\n")


def test_memory_that_a_process_took_is_counted_and_files_that_it_mapped_are_not(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 * 2**20))
    maps = (
        f"opened = open({str(file)!r}, 'rb'); "
        "mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ); "
        "assert sum(mapped[:: mmap.PAGESIZE]) == 0"  # every page is read, and so is in memory
    )
    with asked(maps, "taken = bytearray(os.urandom(64 * 2**20))") as (pid, go_on):
        before = held_bytes({pid})
        go_on()
        mapping = held_bytes({pid})
        go_on()
        assert abs(mapping - before) < 16 * 2**20
        assert 48 * 2**20 < held_bytes({pid}) - before < 80 * 2**20


def test_what_a_process_holds_is_read_off_the_kernels_counters(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    status = tmp_path / "7" / "status"
    status.write_text("Name:\tworker: 1\nVmRSS:\t 600 kB\nRssAnon:\t 100 kB\nRssFile:\t 450 kB\nRssShmem:\t 50 kB\n")
    assert held_bytes({7}, tmp_path) == 150 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="such files are Linux's")
def test_a_file_in_ram_that_processes_share_counts_once_also_where_one_has_touched_nothing_of_it() -> None:
    file, more = os.memfd_create("weights"), 48 << 20
    try:
        with asked(file=file) as (one, _), asked(file=file) as (other, _):
            before = held_bytes({one})
            os.truncate(file, 1 << 40)
            os.posix_fallocate(file, 0, 64 << 20)
            assert held_bytes({one}) - before > more
            assert held_bytes({other}) > more
            assert held_bytes({one, other}) - held_bytes({one}) < more
    finally:
        os.close(file)


@pytest.mark.skipif(sys.platform != "linux", reason="such files are Linux's")
def test_a_process_has_all_of_its_files_in_ram_once_whether_it_has_touched_them_or_not() -> None:
    file, size, slack = os.memfd_create("weights"), 64 << 20, 8 << 20
    try:
        os.truncate(file, size)
        os.posix_fallocate(file, 0, size)
        maps = f"mapped = mmap.mmap(int(sys.argv[1]), {size})"
        touches = f"mapped[:: mmap.PAGESIZE] = bytes({size} // mmap.PAGESIZE)"
        with asked(maps, touches, file=file) as (pid, go_on):
            before = process_bytes(pid) - size
            go_on()
            assert abs(process_bytes(pid) - before - size) < slack, "nothing of it was touched"
            go_on()
            assert abs(process_bytes(pid) - before - size) < slack, "all of it was"
    finally:
        os.close(file)
    assert process_bytes(2**30) == 0


def test_a_process_that_ended_holds_nothing(tmp_path: Path) -> None:
    assert held_bytes({2**30}, tmp_path) == 0


def test_a_containers_limit_is_all_the_ram_there_is(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 150000\nactive_file 50000\n")
    assert read_ram(tmp_path) == Ram(total_bytes=1_000_000, free_bytes=500_000)


def test_without_a_limit_the_machines_ram_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    ram = read_ram(tmp_path)
    assert 0 < ram.free_bytes <= ram.total_bytes


def test_the_cpu_is_named_with_its_cores(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Imagined 9000\n")
    assert cpu_name(cpuinfo).startswith("Imagined 9000")
    assert cpu_name(tmp_path / "missing")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), ("", []), ("GPU-b", [1]), ("1,9,0", [1]), ("-1", []), ("0,0", [0])],
)
def test_cuda_visible_devices_is_honoured(setting: str | None, expected: list[int]) -> None:
    assert visible_devices(setting, ["GPU-aa", "GPU-bb", "GPU-cc"]) == expected


class FakeNvml:
    """The few functions of pynvml that are used, for one GPU that does not support all of them."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    NVMLLibraryMismatchError = NVMLError

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetUUID": "GPU-aa",
            "nvmlDeviceGetName": "Imagined GPU",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, free=60 * GIB),
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=7, usedGpuMemory=12 * GIB),
                SimpleNamespace(pid=8, usedGpuMemory=None),
            ],
            "nvmlDeviceGetPowerUsage": 250_000,
        }

        def answer(*arguments: object) -> Any:
            if name not in answers:
                raise self.NVMLError(name)
            return answers[name]

        return answer


def test_a_gpus_unsupported_readings_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    [gpu] = NvmlProbe().read({7, 8})
    assert (gpu.id, gpu.name, gpu.power_w) == ("cuda:0", "Imagined GPU", 250.0)
    assert (gpu.utilisation, gpu.temperature_c, gpu.power_limit_w) == (None, None, None)
    assert (gpu.work_bytes, gpu.others_bytes, gpu.free_bytes) == (12 * GIB, 8 * GIB, 60 * GIB)


def test_a_machine_without_nvml_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlProbe().read() == ()


class SlowProbe:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.reads = 0

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        self.reads += 1
        assert self.let.wait(60)
        return (reading(total=3, free=2, ours=1),)


async def test_a_slow_probe_is_never_asked_twice_at_once_and_holds_up_nobody() -> None:
    probe = SlowProbe()
    sampler = DeviceSampler(probe)
    for _ in range(5):
        sampler.poll(())
        await asyncio.sleep(0)
    assert (sampler.latest, probe.reads) == ((), 1)
    probe.let.set()
    assert len(await sampler.read(())) == 1
    await sampler.close()


async def test_a_reading_that_is_waited_for_was_begun_after_it_was_asked_for() -> None:
    probe = SlowProbe()
    sampler = DeviceSampler(probe)
    sampler.poll(())
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(sampler.read(())) for _ in range(3)]
    await asyncio.sleep(0)
    probe.let.set()
    await asyncio.gather(*waiting)
    assert probe.reads == 2
    await sampler.close()


async def test_a_probe_that_fails_leaves_the_last_reading() -> None:
    class FailingProbe:
        def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
            raise OSError("the driver is gone")

    sampler = DeviceSampler(FailingProbe())
    assert await sampler.read(()) == ()
    await sampler.close()
