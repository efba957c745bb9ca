"""ProcessGroup: the collective operations of one model's ranks, by torch.distributed: NCCL on CUDA, gloo on a CPU.

Each model has a group of its own, and none is the default of its process. What was said with NCCL was not yet run on a
GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from engine.backends.common.model_config import Shard
from engine.backends.torch.device_memory import pick_device
from engine.config import ModelSpec
from engine.errors import WorkerFailed, first_line

CONNECT_TIMEOUT_S = 60.0
"""For all ranks to find each other, once all of their processes run."""

OPERATION_TIMEOUT_S = 600.0
"""For one operation: as long as the slowest rank may be behind, which compiles kernels in its first step."""


class RankLost(WorkerFailed):
    """An operation with the other ranks failed: one of them is gone, or too late."""


class ProcessGroup:
    """`Group` over torch.distributed."""

    def __init__(self, backend: Any, shard: Shard) -> None:
        self._backend, self.shard = backend, shard

    @classmethod
    def connect(cls, rendezvous: Path, shard: Shard, device: torch.device) -> ProcessGroup:
        """Find the other ranks by a file that all of them have open, and add up a tensor with them. Raises
        WorkerFailed."""
        store = FileStore(str(rendezvous), shard.size)
        store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
        with _raises_rank_lost(f"rank {shard.rank} of {shard.size} found no connection to the others"):
            group = cls(_new_backend(store, shard, device), shard)
            found = int(group.all_reduce(torch.ones(1, device=device)))
        if found != shard.size:
            raise WorkerFailed(f"{shard.size} ranks of tensor parallelism add up to {found}")
        return group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up in place."""
        if x.numel():  # no row is sampled in some steps
            with _raises_rank_lost(_LOST):
                self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate along the last dimension."""
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        with _raises_rank_lost(_LOST):
            self._backend.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> None:
        """Take rank 0's."""
        with _raises_rank_lost(_LOST):
            self._backend.broadcast([x], dist.BroadcastOptions()).wait()

    def abort(self) -> None:
        """End operations that wait for a rank that is lost, from another thread; what they return means nothing."""
        self._backend.abort()


_LOST = "a rank of tensor parallelism lost the others"


@contextmanager
def _raises_rank_lost(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"{what}: {first_line(error)}") from error


def rank_device(spec: ModelSpec) -> torch.device:
    """Return the device that the rank with `spec` computes on."""
    name = spec.shares[0].device if spec.shares else spec.device
    return torch.device("cpu") if name.startswith("sim") else pick_device(name)


def _new_backend(store: Any, shard: Shard, device: torch.device) -> Any:
    timeout = timedelta(seconds=OPERATION_TIMEOUT_S)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the name that it has, not its stub's
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, gloo)
