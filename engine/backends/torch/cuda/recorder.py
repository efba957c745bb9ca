"""What CUDA alone does for steps: graphs of recorded work, and copies out of and into pinned memory that nothing
waits for. None of it has been run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.backends.torch.cuda.decode_graphs import Recorder
from engine.backends.torch.cuda.step_transfer import Readback, Staging, TurnStaging, Wait
from engine.backends.torch_common.memory import clear_workspaces


class CudaRecorder:
    """Records work on one device. All recordings share the memory that they work in, cuBLAS's workspace with it: no two
    run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run `work` twice beside the other work, so that kernels are compiled and libraries ready, then capture it.

        cuBLAS's workspace of a stream that is there already belongs to all of its work, and one that is not to what is
        captured. So none is there when a capture begins, and none is left when it has ended.
        """
        with torch.cuda.device(self._device):
            current, beside, graph = torch.cuda.current_stream(), self._beside, torch.cuda.CUDAGraph()
            beside.wait_stream(current)
            try:
                with torch.cuda.stream(beside):  # restores the stream also where the end of a capture fails
                    work()
                    work()
                    clear_workspaces()
                    with torch.cuda.graph(graph, pool=self._pool, stream=beside, capture_error_mode="thread_local"):
                        work()
            finally:
                clear_workspaces()
            current.wait_stream(beside)
        return graph


def recorder_for(device: torch.device) -> Recorder | None:
    """What records work on `device`, where anything does."""
    return CudaRecorder(device) if device.type == "cuda" else None


def staging_for(device: torch.device) -> Staging | None:
    """The way of a step's indices to `device`; None where they lie there anyway."""
    if device.type != "cuda":
        return None

    def pinned(size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    return TurnStaging(device, pinned, partial(_queued, device))


class CudaReadback:
    """Copies from one device into pinned memory, which torch hands out again only once such a copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fetch(self, tensor: Tensor) -> Tensor:
        """Queue the copy."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Wait:
        """A wait for all that was queued so far."""
        return _queued(self._device)


def readback_for(device: torch.device) -> Readback | None:
    """The way of what is drawn on `device` back to the host; None where the host waits for every step anyway."""
    return CudaReadback(device) if device.type == "cuda" else None


def _queued(device: torch.device) -> Wait:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
