"""CUDA graphs, and asynchronous copies to and from pinned memory. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.backends.torch.cuda.decode_graphs import Recorder
from engine.backends.torch.cuda.step_transfer import PinnedUploader, Readback, Uploader, Wait
from engine.backends.torch_device import clear_workspaces


class CudaRecorder:
    """Records work on one device. All recordings share their working memory and cuBLAS's workspace: no two run at
    once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run `work` twice on a stream of its own, so that kernels are compiled and libraries ready, then capture it.

        An existing cuBLAS workspace belongs to all work of its stream, a new one to the capture. So there must be none
        when a capture begins, and none is left when it has ended.
        """
        with torch.cuda.device(self._device):
            current, stream, graph = torch.cuda.current_stream(), self._stream, torch.cuda.CUDAGraph()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):  # restores the stream also where the end of a capture fails
                    work()
                    work()
                    clear_workspaces()
                    with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                        work()
            finally:
                clear_workspaces()
            current.wait_stream(stream)
        return graph


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder of `device`; None where it has none."""
    return CudaRecorder(device) if device.type == "cuda" else None


def uploader_for(device: torch.device) -> Uploader | None:
    """Return the uploader to `device`; None for the CPU."""
    if device.type != "cuda":
        return None

    def pinned(size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    return PinnedUploader(device, pinned, partial(_event_wait, device))


class CudaReadback:
    """Copies from one device into pinned memory, which torch reuses only once such a copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fetch(self, tensor: Tensor) -> Tensor:
        """Queue the copy."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Wait:
        """Return a wait for the work queued so far."""
        return _event_wait(self._device)


def readback_for(device: torch.device) -> Readback | None:
    """Return the readback from `device`; None where the host waits for every step."""
    return CudaReadback(device) if device.type == "cuda" else None


def _event_wait(device: torch.device) -> Wait:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
