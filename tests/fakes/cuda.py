"""torch.cuda's streams, recordings and memory on a machine without a GPU, with the workspace that cuBLAS keeps of each
stream: what a worker holds on to can be counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

WORKSPACE_BYTES = 32 << 20
"""A stream's on a Hopper."""
STREAMS = 32
"""Those that torch hands out by turns."""


@dataclass(eq=False)
class FakeStream:
    """A stream. name: 0 is the default one."""

    name: int

    def wait_stream(self, other: FakeStream) -> None:
        """Nothing is queued here."""


@dataclass
class FakeCuda:
    """A device. workspaces: streams of which the caching allocator holds one.  owned: bytes of recordings, by pool.

    current: where work goes.  capturing: the pool of the recording under way.  broken: raised at the end of the next
    recording.  driver_bytes: what the driver's number has besides torch's memory.
    """

    workspaces: set[int] = field(default_factory=set)
    owned: dict[int, int] = field(default_factory=dict)
    other_bytes: int = 0
    current: FakeStream = field(default_factory=lambda: FakeStream(0))
    capturing: int | None = None
    broken: Exception | None = None
    driver_bytes: int = 500 << 20

    def multiply(self) -> None:
        """A matrix product on the current stream."""
        if self.capturing is None:
            self.workspaces.add(self.current.name)
        elif self.current.name not in self.workspaces:
            self.owned[self.capturing] = WORKSPACE_BYTES

    @property
    def allocated(self) -> int:
        """Bytes of torch's that are in use."""
        return len(self.workspaces) * WORKSPACE_BYTES + sum(self.owned.values()) + self.other_bytes

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        """Stand in for torch.cuda."""
        streams, pools = count(), count(1)
        replaced: dict[str, Any] = {
            "Stream": lambda *_: FakeStream(1 + next(streams) % STREAMS),
            "current_stream": lambda *_: self.current,
            "stream": self._on,
            "device": self._beside,
            "graph": self._graph,
            "CUDAGraph": SimpleNamespace,
            "graph_pool_handle": lambda: next(pools),
            "is_initialized": lambda: True,
            "empty_cache": lambda: None,
            "synchronize": lambda *_: None,
            "memory_allocated": lambda *_: self.allocated,
            "memory_reserved": lambda *_: self.allocated,
            "mem_get_info": lambda *_: ((80 << 30) - self.driver_bytes - self.allocated, 80 << 30),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.workspaces.clear, raising=False)
        return self

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        yield

    def _graph(self, graph: Any, *, pool: int, stream: FakeStream | None = None, capture_error_mode: str) -> Any:
        return _Capture(self, pool, stream or FakeStream(STREAMS + 1))


@dataclass
class _Capture:
    """torch.cuda.graph: where the end of a capture fails, the current stream stays the capture's."""

    cuda: FakeCuda
    pool: int
    stream: FakeStream
    before: FakeStream | None = None

    def __enter__(self) -> None:
        self.before, self.cuda.current, self.cuda.capturing = self.cuda.current, self.stream, self.pool

    def __exit__(self, *error: object) -> None:
        self.cuda.capturing = None
        broken, self.cuda.broken = self.cuda.broken, None
        if broken is not None:
            raise broken
        assert self.before is not None
        self.cuda.current = self.before
