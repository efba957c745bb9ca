"""DeviceMemory: memory of one worker on each of its devices: used, free and reserved. The only place that counts it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.backends import torch_device
from engine.config import ModelSpec
from engine.errors import InvalidRequest

_MIB = 1 << 20
_SIMULATED = "sim"


class StepOutOfMemory(torch.OutOfMemoryError):
    """A step needs more memory than its device has left; a smaller one may fit."""

    def __init__(self, device: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"a step needs {-(-needed_bytes // _MIB)} MiB of working memory on {device}, "
            f"which has {free_bytes // _MIB} MiB left"
        )
        self.device, self.needed_bytes, self.free_bytes = device, needed_bytes, free_bytes


class DeviceMemory:
    """This worker's memory on one device. name: as in DeviceShare.device.  device: torch's.

    weights_bytes, kv_bytes: updated by the code that allocates them.
    """

    simulated = False

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self._largest_step_bytes = 0
        self.weights_bytes = self.kv_bytes = 0
        if device.type == "cuda":
            torch.cuda.init()  # the allocator needs an initialised device
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def working_bytes(self) -> int:
        """Peak memory of steps besides weights and KV pages: on CUDA the peak that torch's allocator reserved; on a
        CPU, where it cannot be measured apart from the process, the bound of `step_memory`."""
        if self.device.type == "cuda":
            reserved = int(torch.cuda.max_memory_reserved(self.device))
            return max(0, reserved - self.weights_bytes - self.kv_bytes)
        return self._largest_step_bytes

    def hold_for(self, owner: object, size_bytes: int) -> None:
        """Count `size_bytes` as weights for as long as `owner` is in memory."""
        self.weights_bytes += size_bytes
        weakref.finalize(owner, self._release, size_bytes).atexit = False

    def forget_kv(self) -> None:
        """Reset the KV pages and the peak of their steps."""
        self.kv_bytes = self._largest_step_bytes = 0

    def free_bytes(self) -> int:
        """Return the free bytes of the device."""
        return torch_device.free_bytes(self.device)

    @contextmanager
    def room_for(self, needed_bytes: int, purpose: str) -> Iterator[None]:
        """Check that `needed_bytes` fit before the block allocates them. Raises InsufficientMemory with the numbers."""
        with torch_device.room_for(needed_bytes, self.device, purpose):
            yield

    def begin_step(self, needed_bytes: int) -> None:
        """Record the bound of a step's memory. Raises StepOutOfMemory where the device has less."""
        self._largest_step_bytes = max(self._largest_step_bytes, needed_bytes)

    def _release(self, size_bytes: int) -> None:
        self.weights_bytes -= size_bytes


class SimulatedMemory(DeviceMemory):
    """A simulated device: the CPU computes, within the `budget_bytes` of placement."""

    simulated = True

    def __init__(self, name: str, budget_bytes: int) -> None:
        super().__init__(name, torch.device("cpu"))
        self._budget_bytes = budget_bytes

    def free_bytes(self) -> int:
        """Return the rest of the budget after weights and KV pages."""
        return max(0, self._budget_bytes - self.weights_bytes - self.kv_bytes)

    @contextmanager
    def room_for(self, needed_bytes: int, purpose: str) -> Iterator[None]:
        """Check the budget, then the RAM that the simulated device really uses."""
        left = self.free_bytes()
        if needed_bytes > left:
            raise torch_device.insufficient(needed_bytes, left, self.name, purpose)
        with super().room_for(needed_bytes, purpose):
            yield

    def begin_step(self, needed_bytes: int) -> None:
        """Record the bound of a step's memory. Raises StepOutOfMemory where the budget has less."""
        left = self.free_bytes()
        if needed_bytes > left:
            raise StepOutOfMemory(self.name, needed_bytes, left)
        super().begin_step(needed_bytes)


class DraftModelMemory(DeviceMemory):
    """Memory of a second model of the worker on a device. It is counted for the first model's DeviceMemory too, which
    alone knows what is free and the peak of steps."""

    def __init__(self, host: DeviceMemory) -> None:
        self._host = host
        self._weights_bytes = self._kv_bytes = 0
        self.name, self.device, self.simulated = host.name, host.device, host.simulated

    @property
    def weights_bytes(self) -> int:
        """Of this model only."""
        return self._weights_bytes

    @weights_bytes.setter
    def weights_bytes(self, size_bytes: int) -> None:
        self._host.weights_bytes += size_bytes - self._weights_bytes
        self._weights_bytes = size_bytes

    @property
    def kv_bytes(self) -> int:
        """Of this model only."""
        return self._kv_bytes

    @kv_bytes.setter
    def kv_bytes(self, size_bytes: int) -> None:
        self._host.kv_bytes += size_bytes - self._kv_bytes
        self._kv_bytes = size_bytes

    @property
    def working_bytes(self) -> int:
        """0: the first model's DeviceMemory counts the steps of both."""
        return 0

    def forget_kv(self) -> None:
        """Reset the KV pages."""
        self.kv_bytes = 0

    def free_bytes(self) -> int:
        """Return the free bytes of the device."""
        return self._host.free_bytes()

    @contextmanager
    def room_for(self, needed_bytes: int, purpose: str) -> Iterator[None]:
        """Check that `needed_bytes` fit before the block allocates them. Raises InsufficientMemory with the numbers."""
        with self._host.room_for(needed_bytes, f"the draft model's {purpose.removeprefix('the ')}"):
            yield

    def begin_step(self, needed_bytes: int) -> None:
        """Record the bound of a step's memory. Raises StepOutOfMemory where the device has less."""
        self._host.begin_step(needed_bytes)


def open_devices(spec: ModelSpec) -> tuple[DeviceMemory, ...]:
    """Open the devices of spec.shares in their order, or spec.device without shares; each device once.

    Raises InvalidRequest for a missing device, a simulated one without a share, and devices of several kinds.
    """
    budgets: dict[str, int] = {}
    for share in spec.shares:
        budgets[share.device] = budgets.get(share.device, 0) + share.total_bytes
    opened: dict[str, DeviceMemory] = {}
    for name in budgets or {spec.device: 0}:
        device_memory = _open(name, budgets)
        opened[device_memory.name] = device_memory
    kinds = {name.partition(":")[0] for name in opened}
    if len(kinds) > 1:
        raise InvalidRequest(
            f"a model is split over devices of one kind, not of several: {', '.join(opened)}", param="shares"
        )
    return tuple(opened.values())


def _open(name: str, budgets: dict[str, int]) -> DeviceMemory:
    kind, _, index = name.partition(":")
    if kind != _SIMULATED:
        device = pick_device(name)
        return DeviceMemory(str(device), device)
    if not index.isdecimal():
        raise InvalidRequest(
            f"device is {name}; simulated devices are sim:0, sim:1 and so on", param="device", value=name
        )
    if name not in budgets:
        raise InvalidRequest(
            f"device is {name}, without a share: simulated devices need shares",
            param="device",
            value=name,
        )
    return SimulatedMemory(name, budgets[name])


def pick_device(name: str) -> torch.device:
    """Return the device of `name` ("auto", "cpu", "cuda:N"). Raises InvalidRequest for a missing one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal() or int(index or 0) >= count:
        raise InvalidRequest(
            f"device is {name}; this machine has cpu" + "".join(f", cuda:{number}" for number in range(count)),
            param="device",
            value=name,
        )
    return torch.device("cuda", int(index or 0))
