"""NVIDIA GPUs as NVML tells of them, whole, divided, silent or gone: each reading that is missing is missing alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.devices import NvmlProbe, computable
from engine.snapshot import DeviceSensors, ProcessMemory
from engine.system.memory import read_ram

GIB = 2**30
UNINITIALIZED, NOT_SUPPORTED, NOT_FOUND, TIMEOUT, FUNCTION_NOT_FOUND, GPU_IS_LOST = 1, 3, 6, 10, 13, 15


class NVMLError(Exception):
    """As NVML raises it: `value` is the code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class NVMLLibraryMismatchError(Exception):
    """As pynvml raises it where the driver lacks the version of a function that it calls: no NVMLError."""


@dataclass
class Card:
    """A GPU, or a slice of one. Readings that are None are not supported; `lost` ones raise for everything.

    compute, graphics: (pid, bytes or None) of processes.
    """

    uuid: str = "GPU-aa"
    name: str | bytes = "Imagined GPU"
    total: int | None = 80 * GIB
    free: int = 60 * GIB
    reserved: int = 0
    utilisation: int | None = 40
    temperature: int | None = 61
    power: int | None = 250_000
    power_limit: int | None = 400_000
    compute: Sequence[tuple[int, int | None]] = ()
    graphics: Sequence[tuple[int, int | None]] = ()
    mig: bool | None = None
    slices: Sequence[Card | None] = ()
    whole: Card | None = None
    profile: tuple[int, int] | None = None
    """Of a slice: the card that it is of; its compute slices and MiB."""
    lost: bool = False
    capability: tuple[int, int] | None = None
    cores: int | None = None
    clocks_mhz: Mapping[int, int] = field(default_factory=dict)
    memory_bits: int | None = None
    memory_utilisation: int | None = 25
    clocks_now_mhz: Mapping[int, int] = field(default_factory=dict)
    throttle: int | None = None
    pcie: tuple[int, int, int, int] | None = None
    pcie_kib_per_s: Mapping[int, int] = field(default_factory=dict)
    ecc: int | None = None
    fan: int | None = None
    xids: list[int] | None = None
    nvlinks: Sequence[int] = ()
    nvlink_kib: int = 0
    """Received by each read of its counters, which are a second apart; half as much is sent."""


def mig_slice(uuid: str, gib: int, **readings: Any) -> Card:
    """A slice, which has memory and processes and no sensors."""
    named = f"Imagined GPU MIG 1g.{gib}gb"
    settings: dict[str, Any] = {"name": named, "total": gib * GIB, "free": gib * GIB} | readings
    return Card(uuid, utilisation=None, temperature=None, power=None, power_limit=None, **settings)


@dataclass
class FakeNvml:
    """What of pynvml is used. without: functions that this version of the library lacks.  mismatched: those that the
    driver lacks."""

    cards: Sequence[Card] = ()
    without: frozenset[str] = field(default_factory=frozenset)
    mismatched: frozenset[str] = field(default_factory=frozenset)

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_TEMPERATURE_GPU = 0

    def __post_init__(self) -> None:
        self.calls: list[str] = []
        self.reads = self.inits = 0
        self.found: tuple[Card, ...] = ()

    def _pcie_throughput(self, card: Card, counter: int) -> int:
        self.calls.append(card.uuid)
        kib_per_s: int = _given(card.pcie_kib_per_s.get(counter))
        return kib_per_s

    def _nvlink_counters(self, card: Card, fields: Sequence[tuple[int, int]]) -> list[SimpleNamespace]:
        self.reads += 1
        per_read = {139: card.nvlink_kib, 138: card.nvlink_kib // 2}
        return [
            SimpleNamespace(
                nvmlReturn=0,
                timestamp=self.reads * 1_000_000,
                value=SimpleNamespace(ullVal=self.reads * per_read[name]),
            )
            for name, _ in fields
        ]

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlMemory_v2":
            return 0x02000028
        answers: Mapping[str, Callable[..., Any]] = {
            "nvmlInit": self._init,
            "nvmlDeviceGetCount": lambda: len(self.found),
            "nvmlDeviceGetHandleByIndex": lambda index: self.found[index],
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetUUID": lambda card: card.uuid,
            "nvmlDeviceGetName": lambda card: card.name,
            "nvmlShutdown": self._shut_down,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda card: _given(card.whole),
            "nvmlDeviceGetAttributes_v2": lambda card: SimpleNamespace(
                gpuInstanceSliceCount=_given(card.profile)[0],
                memorySizeMB=_given(card.profile)[1],
                multiprocessorCount=16 * _given(card.profile)[0],
            ),
            "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(
                gpu=_given(card.utilisation), memory=_given(card.memory_utilisation)
            ),
            "nvmlDeviceGetClockInfo": lambda card, clock: _given(card.clocks_now_mhz.get(clock)),
            "nvmlDeviceGetCurrentClocksEventReasons": lambda card: _given(card.throttle),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: _given(card.throttle),
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda card: _given(card.pcie)[0],
            "nvmlDeviceGetCurrPcieLinkWidth": lambda card: _given(card.pcie)[1],
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda card: _given(card.pcie)[2],
            "nvmlDeviceGetMaxPcieLinkWidth": lambda card: _given(card.pcie)[3],
            "nvmlDeviceGetPcieThroughput": self._pcie_throughput,
            "nvmlDeviceGetTotalEccErrors": lambda card, kind, counter: _given(card.ecc),
            "nvmlDeviceGetFanSpeed": lambda card: _given(card.fan),
            "nvmlDeviceGetNvLinkState": lambda card, link: _given(dict(enumerate(card.nvlinks)).get(link)),
            "nvmlDeviceGetFieldValues": self._nvlink_counters,
            "nvmlEventSetCreate": list,
            "nvmlDeviceRegisterEvents": lambda card, kind, events: events.append(_given(card.xids)),
            "nvmlEventSetFree": lambda events: events.clear(),
            "nvmlEventSetWait_v2": _next_xid,
            "nvmlDeviceGetTemperature": lambda card, sensor: _given(card.temperature),
            "nvmlDeviceGetPowerUsage": lambda card: _given(card.power),
            "nvmlDeviceGetEnforcedPowerLimit": lambda card: _given(card.power_limit),
            "nvmlDeviceGetComputeRunningProcesses": lambda card: _processes(card.compute),
            "nvmlDeviceGetGraphicsRunningProcesses": lambda card: _processes(card.graphics),
            "nvmlDeviceGetCudaComputeCapability": lambda card: _given(card.capability),
            "nvmlDeviceGetNumGpuCores": lambda card: _given(card.cores),
            "nvmlDeviceGetMaxClockInfo": lambda card, clock: _given(card.clocks_mhz.get(clock)),
            "nvmlDeviceGetMemoryBusWidth": lambda card: _given(card.memory_bits),
            "nvmlDeviceGetMigMode": lambda card: [_given(card.mig), False],
            "nvmlDeviceGetMaxMigDeviceCount": lambda card: len(card.slices),
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda card, index: _given(card.slices[index], NOT_FOUND),
        }
        if name not in answers or name in self.without:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            if name in self.mismatched:
                raise NVMLLibraryMismatchError(name)
            if any(isinstance(argument, Card) and argument.lost for argument in arguments):
                raise NVMLError(GPU_IS_LOST)
            return answers[name](*arguments)

        return answer

    def _init(self) -> None:
        """The devices are looked for where nobody has initialised it yet."""
        if self.inits == 0:
            self.found = tuple(self.cards)
        self.inits += 1

    def _shut_down(self) -> None:
        if self.inits == 0:
            raise NVMLError(UNINITIALIZED)
        self.inits -= 1

    def _memory(self, card: Card, version: int | None = None) -> SimpleNamespace:
        """Version 1 has no `reserved`."""
        if version is None:
            return SimpleNamespace(total=_given(card.total), free=card.free)
        if "nvmlDeviceGetMemoryInfo_v2" in self.without:
            raise NVMLError(FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=_given(card.total), free=card.free, reserved=card.reserved)

    def _by_uuid(self, uuid: str) -> Card:
        every = [each for card in self.found for each in (card, *card.slices) if each is not None]
        return _given(next((card for card in every if card.uuid == uuid), None), NOT_FOUND)


def _given(value: Any, error: int = NOT_SUPPORTED) -> Any:
    if value is None:
        raise NVMLError(error)
    return value


def _next_xid(events: list[list[int]], timeout_ms: int) -> SimpleNamespace:
    if not events[0]:
        raise NVMLError(TIMEOUT)
    return SimpleNamespace(eventData=events[0].pop(0))


def _processes(held: Sequence[tuple[int, int | None]]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held]


Machine = Callable[..., NvmlProbe]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A probe of a machine with these cards."""

    def build(*cards: Card, visible: str | None = None, without: frozenset[str] = frozenset()) -> NvmlProbe:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(cards, without))  # type: ignore[arg-type]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return NvmlProbe()

    return build


def test_a_card_that_reports_everything_is_read_whole(machine: Machine) -> None:
    [gpu] = machine(Card(compute=[(7, 12 * GIB)])).read({7})
    assert (gpu.id, gpu.kind, gpu.name, gpu.utilisation) == ("cuda:0", "cuda", "Imagined GPU", 0.4)
    assert (gpu.temperature_c, gpu.power_w, gpu.power_limit_w) == (61, 250.0, 400.0)
    assert (gpu.total_bytes, gpu.work_bytes, gpu.others_bytes) == (80 * GIB, 12 * GIB, 8 * GIB)


def test_sensors_are_read_in_words_and_units(machine: Machine) -> None:
    card = Card(
        clocks_now_mhz={1: 1200, 2: 9000},
        clocks_mhz={1: 1980, 2: 9501},
        throttle=0x1 | 0x4 | 0x40,
        pcie=(3, 8, 5, 16),
        pcie_kib_per_s={0: 1000, 1: 2000},
        ecc=2,
        fan=55,
        xids=[79],
        compute=[(7, 12 * GIB), (8, GIB)],
    )
    probe = machine(card)
    probe.read({7})
    [gpu] = probe.read({7})
    assert gpu.sensors == DeviceSensors(
        memory_utilisation=0.25,
        sm_clock_mhz=1200,
        max_sm_clock_mhz=1980,
        memory_clock_mhz=9000,
        max_memory_clock_mhz=9501,
        throttle_reasons=("power limit", "temperature (hardware)"),
        pcie_generation=3,
        max_pcie_generation=5,
        pcie_width=8,
        max_pcie_width=16,
        pcie_rx_bytes_per_s=2000 * 1024,
        pcie_tx_bytes_per_s=1000 * 1024,
        ecc_errors=2,
        xid_errors=(79,),
        fan=0.55,
    )
    assert [(each.pid, each.used_bytes) for each in gpu.own] == [(7, 12 * GIB)]
    assert [each.pid for each in gpu.others] == [8]


def test_nvlink_is_read_as_links_that_are_up_and_bytes_over_all_of_them(machine: Machine) -> None:
    probe = machine(Card(nvlinks=[1, 1, 0], nvlink_kib=2000))
    for _ in range(3):
        [gpu] = probe.read()
    assert gpu.sensors is not None
    assert (gpu.sensors.nvlink_links, gpu.sensors.max_nvlink_links) == (2, 3)
    assert (gpu.sensors.nvlink_rx_bytes_per_s, gpu.sensors.nvlink_tx_bytes_per_s) == (2000 * 1024, 1000 * 1024)


def test_sensors_that_a_card_does_not_have_are_absent_and_never_0(machine: Machine) -> None:
    probe = machine(Card(memory_utilisation=None, utilisation=None))
    probe.read()
    [gpu] = probe.read()
    assert gpu.sensors == DeviceSensors()


@pytest.mark.parametrize("missing", ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlEventSetCreate"])
def test_an_older_library_lacks_single_sensors_alone(machine: Machine, missing: str) -> None:
    probe = machine(Card(throttle=0x8, xids=[], fan=30), without=frozenset({missing}))
    [gpu] = probe.read()
    assert gpu.sensors is not None
    assert (gpu.sensors.throttle_reasons, gpu.sensors.fan) == (("hardware slowdown",), 0.3)
    assert gpu.sensors.xid_errors == (None if missing == "nvmlEventSetCreate" else ())


def test_a_sample_measures_the_pcie_traffic_of_one_card_alone(machine: Machine) -> None:
    probe = machine(*(Card(uuid=f"GPU-{letter}", pcie_kib_per_s={0: 1, 1: 1}) for letter in "abc"))
    calls: list[str] = probe._nvml.calls
    probe.read()
    assert calls == ["GPU-a", "GPU-a"]
    probe.read()
    assert calls[2:] == ["GPU-b", "GPU-b"]


@pytest.mark.parametrize(
    ("missing", "reading"),
    [
        ("utilisation", "utilisation"),
        ("temperature", "temperature_c"),
        ("power", "power_w"),
        ("power_limit", "power_limit_w"),
    ],
)
def test_a_reading_that_a_card_does_not_give_is_missing_alone(machine: Machine, missing: str, reading: str) -> None:
    [gpu] = machine(Card(**{missing: None})).read()
    readings = ("utilisation", "temperature_c", "power_w", "power_limit_w")
    assert [name for name in readings if getattr(gpu, name) is None] == [reading]
    assert gpu.free_bytes == 60 * GIB


def test_an_old_librarys_missing_functions_are_missing_readings(machine: Machine) -> None:
    lacks = frozenset({"nvmlDeviceGetMigMode", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetUUID"})
    [gpu] = machine(Card(), without=lacks).read()
    assert (gpu.power_w, gpu.power_limit_w) == (250.0, None)


def test_a_driver_older_than_the_library_lacks_single_readings_alone(machine: Machine) -> None:
    probe = machine(Card(compute=[(7, GIB)]))
    probe._nvml.mismatched = frozenset(f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics"))
    [gpu] = probe.read({7})
    assert (gpu.work_bytes, gpu.others_bytes, gpu.free_bytes, gpu.power_w) == (0, 20 * GIB, 60 * GIB, 250.0)


def test_a_name_in_bytes_is_a_name(machine: Machine) -> None:
    assert machine(Card(name=b"Imagined \xff")).read()[0].name == "Imagined \ufffd"


def test_a_lost_card_is_left_out_told_once_and_read_again_when_it_is_back(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    lost = Card("GPU-aa", lost=False)
    probe = machine(lost, Card("GPU-bb"))
    assert [gpu.id for gpu in probe.read()] == ["cuda:0", "cuda:1"]
    lost.lost = True
    assert [[gpu.id for gpu in probe.read()] for _ in range(3)] == [["cuda:1"]] * 3
    assert [record.message for record in caplog.records] == ["cuda:0 does not answer: NVML error 15"]
    lost.lost = False
    assert [gpu.id for gpu in probe.read()] == ["cuda:0", "cuda:1"]


def test_a_card_is_found_again_under_a_new_handle_after_a_reset_with_its_id_and_its_errors(machine: Machine) -> None:
    before, other = Card("GPU-aa", xids=[]), Card("GPU-bb")
    cards = [before, other]
    probe = machine(*cards)
    NvmlProbe()  # another, which has initialised the library too
    probe._nvml.cards = cards
    probe.read()
    assert before.xids is not None
    before.lost, cards[0] = True, Card("GPU-aa", xids=[31], free=70 * GIB)
    before.xids.append(79)
    assert [gpu.id for gpu in probe.read()] == ["cuda:1"]
    for _ in range(10):
        probe.read()
    first, second = probe.read()
    assert (first.id, first.free_bytes, second.id) == ("cuda:0", 70 * GIB, "cuda:1")
    assert first.sensors is not None
    assert first.sensors.xid_errors == (79, 31)


def test_a_card_that_stays_lost_keeps_the_others_as_they_are(machine: Machine) -> None:
    cards = [Card("GPU-aa"), Card("GPU-bb")]
    probe = machine(*cards)
    cards[0].lost = True
    assert {tuple(gpu.id for gpu in probe.read()) for _ in range(25)} == {("cuda:1",)}


def test_the_drivers_own_memory_is_no_part_of_the_total_and_used_by_no_one(machine: Machine) -> None:
    [gpu] = machine(Card(free=79 * GIB, reserved=GIB)).read()
    assert (gpu.total_bytes, gpu.others_bytes, gpu.free_bytes) == (79 * GIB, 0, 79 * GIB)


def test_an_older_driver_has_the_first_version_of_the_memory_reading_alone(machine: Machine) -> None:
    lacks = frozenset({"nvmlDeviceGetMemoryInfo_v2"})
    [gpu] = machine(Card(free=79 * GIB, reserved=GIB), without=lacks).read()
    assert (gpu.total_bytes, gpu.others_bytes, gpu.free_bytes) == (80 * GIB, GIB, 79 * GIB)


def test_a_gpu_that_shares_the_hosts_memory_gives_that(machine: Machine) -> None:
    [gpu] = machine(Card(total=None, compute=[(7, 1000)])).read({7})
    ram = read_ram()
    assert gpu.total_bytes == ram.total_bytes
    assert gpu.work_bytes == 1000
    assert gpu.weights_bytes + gpu.work_bytes + gpu.others_bytes + gpu.free_bytes == gpu.total_bytes


def test_other_programs_on_a_card_are_named_with_what_they_hold_most_first(machine: Machine) -> None:
    ours, gone = os.getpid(), 2**30
    card = Card(compute=[(ours, 4 * GIB), (gone, 9 * GIB), (77, None)], graphics=[(gone, 9 * GIB), (1, GIB)])
    [gpu] = machine(card).read({ours})
    assert gpu.work_bytes == 4 * GIB
    assert [(process.pid, process.used_bytes) for process in gpu.others] == [(gone, 9 * GIB), (1, GIB), (77, 0)]
    assert gpu.others[0] == ProcessMemory(pid=gone, used_bytes=9 * GIB)
    assert gpu.others[1].name == psutil.Process(1).name()


# --- MIG ------------------------------------------------------------------------------------------------------------

SLICES = (mig_slice("MIG-a", 10), None, mig_slice("MIG-b", 20, free=15 * GIB, compute=[(7, 2 * GIB), (8, 3 * GIB)]))
DIVIDED = Card("GPU-aa", mig=True, slices=SLICES)
WHOLE = Card("GPU-bb", mig=False)


def test_a_divided_cards_slices_are_the_devices(machine: Machine) -> None:
    readings = machine(DIVIDED, WHOLE).read({7})
    assert [(gpu.id, gpu.name) for gpu in readings] == [
        ("cuda:0", "Imagined GPU MIG 1g.10gb"),
        ("mig:1", "Imagined GPU MIG 1g.20gb"),
    ]
    second = readings[1]
    assert (second.utilisation, second.temperature_c, second.power_w) == (None, None, None)
    assert (second.work_bytes, second.others_bytes, second.free_bytes) == (2 * GIB, 3 * GIB, 15 * GIB)


def test_a_slice_under_the_name_of_the_whole_card_is_named_with_its_profile(machine: Machine) -> None:
    whole = Card("GPU-aa", "NVIDIA A100", mig=True)
    plain = mig_slice("MIG-a", 5, name="NVIDIA A100", profile=(1, 4864))
    nameless = mig_slice("MIG-b", 20, name="", whole=whole, profile=(3, 19968))
    bare = mig_slice("MIG-c", 5, name="")
    whole.slices = (plain, nameless, bare)
    assert [gpu.name for gpu in machine(whole).read()] == [
        "NVIDIA A100 MIG 1g.5gb",
        "NVIDIA A100 MIG 3g.20gb",
        "NVIDIA GPU MIG",
    ]


@pytest.mark.parametrize(
    ("visible", "sizes"),
    [("MIG-b", [20]), ("MIG-b,MIG-a", [20, 10]), ("MIG-b,MIG-x,MIG-a", [20]), ("0", [10, 20]), ("1", [80]), ("", [])],
)
def test_cuda_visible_devices_chooses_among_slices(machine: Machine, visible: str, sizes: list[int]) -> None:
    readings = machine(DIVIDED, WHOLE, visible=visible).read()
    assert [gpu.total_bytes // GIB for gpu in readings] == sizes
    assert [gpu.id for gpu in readings][:1] == ["cuda:0"][: len(sizes)]


def test_a_divided_card_without_slices_is_no_device(machine: Machine) -> None:
    readings = machine(Card("GPU-aa", mig=True), WHOLE).read()
    assert [(gpu.id, gpu.total_bytes) for gpu in readings] == [("cuda:0", 80 * GIB)]


def test_a_worker_computes_on_the_first_slice_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = machine(DIVIDED).read()
    monkeypatch.setattr("engine.devices._torch_has_cuda", lambda: True)
    assert [device.id for device in computable(readings)] == ["cuda:0"]
    monkeypatch.setattr("engine.devices._torch_has_cuda", lambda: False)
    assert computable(readings) == []


_H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": (9, 0),
    "cores": 16896,
    "clocks_mhz": {1: 1830, 2: 2619},
    "memory_bits": 5120,
}


def test_a_cards_limits_are_worked_out_of_its_cores_its_clocks_and_its_bus(machine: Machine) -> None:
    [gpu] = machine(Card(**_H100)).read()  # type: ignore[arg-type]
    assert gpu.limits is not None
    assert gpu.limits.flops_16bit_per_s == pytest.approx(989.4e12, rel=1e-3)
    assert gpu.limits.flops_32bit_per_s == pytest.approx(61.8e12, rel=1e-3)
    assert gpu.limits.bytes_per_s == pytest.approx(3.352e12, rel=1e-3)


@pytest.mark.parametrize("capability", [(7, 5), None])
def test_a_card_gives_its_compute_capability_or_none(machine: Machine, capability: tuple[int, int] | None) -> None:
    [reading] = machine(Card(capability=capability)).read()
    assert reading.capability == capability


def test_multiprocessors_are_those_of_the_card_or_of_a_slice_of_it(machine: Machine) -> None:
    assert [gpu.processors for gpu in machine(Card(**_H100)).read()] == [132]  # type: ignore[arg-type]
    assert [gpu.processors for gpu in machine(Card(capability=(9, 9), cores=16896)).read()] == [None]
    divided = Card("GPU-aa", mig=True, slices=(mig_slice("MIG-a", 10, profile=(2, 9856)),))
    assert [gpu.processors for gpu in machine(divided).read()] == [32]


def test_a_card_that_tells_nothing_of_them_has_no_limits(machine: Machine) -> None:
    [gpu] = machine(Card()).read()
    assert gpu.limits is None


def test_a_driver_that_tells_no_bus_width_leaves_the_memory_unknown(machine: Machine) -> None:
    [gpu] = machine(Card(**(_H100 | {"memory_bits": None}))).read()  # type: ignore[arg-type]
    assert gpu.limits is not None
    assert gpu.limits.bytes_per_s is None
    assert gpu.limits.flops_16bit_per_s is not None


def test_a_slice_has_not_the_limits_of_the_whole_card(machine: Machine) -> None:
    sliced = mig_slice("MIG-x", 10, **{key: value for key, value in _H100.items() if key != "name"})
    [gpu] = machine(Card(mig=True, slices=(sliced,))).read()
    assert gpu.limits is None
