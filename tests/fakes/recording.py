"""A device that records its work and does it again: the CPU, held to what CUDA graphs demand of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.torch import runner as runner_module
from engine.backends.torch.cuda import adapter_slots, decode_graphs

_READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select")


class NoReads(TorchDispatchMode):
    """Raises where the host would have to wait for what a tensor holds."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        assert name not in _READS, f"{name} waits for the device"
        return function(*arguments, **(named or {}))


class FakeRecorder:
    """Records work and does it again. fails_from: the recording from which on all fail.  error: how they do."""

    def __init__(self, fails_from: int | None = None, error: Exception | None = None) -> None:
        self.recorded = self.replayed = 0
        self._fails_from = fails_from
        self._error = error or torch.OutOfMemoryError("no memory for a graph")

    def record(self, work: Callable[[], None]) -> FakeRecording:
        if self._fails_from is not None and self.recorded >= self._fails_from:
            raise self._error
        self.recorded += 1
        with NoReads():
            work()
        return FakeRecording(self, work)


class FakeRecording:
    def __init__(self, recorder: FakeRecorder, work: Callable[[], None]) -> None:
        self._recorder, self._work = recorder, work

    def replay(self) -> None:
        self._recorder.replayed += 1
        self._work()


def use(monkeypatch: Any, recorder: FakeRecorder, *, adapters: bool = False) -> FakeRecorder:
    """Have every runner loaded from here on record with `recorder`; steps with `adapters` too, in few programs, as each
    takes milliseconds in Triton's interpreter."""
    monkeypatch.setattr(runner_module, "recorder_for", lambda device: recorder)
    monkeypatch.setattr(adapter_slots, "ADAPTER_SHARES", 1)
    monkeypatch.setattr(adapter_slots, "_RANK_PROGRAMS", 1)
    if not adapters:
        monkeypatch.setattr(decode_graphs, "adapter_slots", lambda *_: None)
    return recorder
