"""Ranks: the processes of the ranks besides 0, as rank 0 sees them: started, given orders, watched and ended."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.backends.base import LoadProgress
from engine.backends.common.model_config import Shard
from engine.backends.torch.parallel.group import ProcessGroup, RankLost, rank_device
from engine.backends.torch.parallel.messages import (
    Connection,
    Done,
    Failed,
    LoadPart,
    Order,
    Progress,
    Refused,
    Reply,
)
from engine.config import ModelSpec
from engine.errors import EngineError, InvalidRequest, LoadCancelled, WorkerFailed, from_info
from engine.system.child_process import block_stop_signals, child_environment, python_command

_POLL_S = 0.05

_REASON_PATIENCE_S = 2.0
"""How long after a failed operation it may take until it is known which rank was lost, and why."""

_KILL_PATIENCE_S = 10.0

_logger = logging.getLogger(__name__)


def rank_spec(spec: ModelSpec, rank: int) -> ModelSpec:
    """Return what one rank loads: `spec` on its own device alone.

    Raises InvalidRequest where there is not one device for each rank: ranks share a CPU, but no GPU.
    """
    size = spec.tensor_parallel_size
    if rank_device(spec).type == "cpu" and len(spec.shares) <= 1:
        return spec
    if spec.shares:
        if len(spec.shares) != size:
            raise InvalidRequest(
                f"tensor_parallel_size is {size}; placement gave the worker {len(spec.shares)} devices",
                param="tensor_parallel_size",
                value=size,
            )
        share = spec.shares[rank]
        return msgspec.structs.replace(spec, device=share.device, shares=(share,))
    return msgspec.structs.replace(spec, device=f"cuda:{rank}")


class Ranks:
    """The ranks of one model besides this process, which is rank 0.

    Where one is lost, so is the model: every later call raises WorkerFailed with the reason.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """Start the processes. Raises InvalidRequest or WorkerFailed, with none left."""
        self.size = spec.tensor_parallel_size
        specs = [rank_spec(spec, rank) for rank in range(self.size)]
        self.spec = specs[0]
        self._rendezvous = _rendezvous_file()
        self._group: ProcessGroup | None = None
        self._losses: list[tuple[bool, EngineError]] = []
        self._cause_known = threading.Event()
        self._ending = False
        self._ranks: list[_Rank] = []
        try:
            for rank in range(1, self.size):
                self._ranks.append(_Rank(rank, self.size, specs[rank], self._rendezvous, self._on_loss))
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                raise WorkerFailed(f"rank {rank} of {self.size} could not be started: {error}") from error
            raise

    def connect(self, threads: int, cancelled: Callable[[], bool]) -> ProcessGroup:
        """Have all ranks begin to load, and return the group of all. threads: CPU threads of each."""
        for each in self._ranks:
            self._send(each, LoadPart(spec=each.spec, rank=each.rank, ranks=self.size, threads=threads))
        for each in self._ranks:
            self._reply(each, lambda progress: None, cancelled)  # that it has started
        path = Path(f"/proc/self/fd/{self._rendezvous}")
        try:
            self._group = ProcessGroup.connect(path, Shard(0, self.size), rank_device(self.spec))
        except RankLost as error:
            raise self.failure(error) from error
        return self._group

    def order(self, order: Order) -> None:
        """Send an order to every rank."""
        for each in self._ranks:
            self._send(each, order)

    def wait(
        self,
        report: Callable[[LoadProgress], None] = lambda progress: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Done]:
        """Return each rank's answer to the last order. report: called with the progress of their loads.

        Raises the error of a rank that refused once all have answered, LoadCancelled, or WorkerFailed.
        """
        replies = [self._reply(each, report, cancelled) for each in self._ranks]
        for reply in replies:
            if isinstance(reply, Refused):
                raise from_info(reply.error)
        return [reply for reply in replies if isinstance(reply, Done)]

    @property
    def pids(self) -> tuple[int, ...]:
        """Their processes."""
        return tuple(each.pid for each in self._ranks)

    @property
    def is_lost(self) -> bool:
        """True if one of them is."""
        return bool(self._losses)

    def check(self) -> None:
        """Raise WorkerFailed, or the error with which a rank failed, if one is lost."""
        if self._losses:
            raise self._reason()

    def failure(self, error: Exception) -> EngineError:
        """Return why an operation with the ranks failed: with `error`, unless one of them is lost."""
        if isinstance(error, RankLost):
            self._cause_known.wait(_REASON_PATIENCE_S)
        if self._losses:
            return self._reason()
        return error if isinstance(error, EngineError) else WorkerFailed(f"rank 0 of {self.size} failed: {error}")

    def end(self) -> None:
        """End the processes at once: they have nothing to save. Idempotent."""
        self._ending = True
        for each in self._ranks:
            each.kill()
        for each in self._ranks:
            each.reap()
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._ranks.clear()
        if self._rendezvous >= 0:
            os.close(self._rendezvous)
            self._rendezvous = -1

    def _send(self, rank: _Rank, order: Order) -> None:
        try:
            rank.connection.send(order)
        except OSError as error:
            raise self.failure(RankLost(f"{rank.name} takes no orders: {error}")) from error

    def _reply(self, rank: _Rank, report: Callable[[LoadProgress], None], cancelled: Callable[[], bool]) -> Reply:
        """Wait for what a rank replies next, apart from progress."""
        while True:
            self.check()
            if cancelled():
                raise LoadCancelled("the load was cancelled while other ranks loaded")
            try:
                reply = rank.replies.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if not isinstance(reply, Progress):
                return reply
            if rank.replies.empty():  # what waited here while this rank loaded is history
                report(reply.progress)

    def _on_loss(self, error: EngineError, secondary: bool) -> None:
        """Note a loss, on the thread that reads the rank's replies."""
        if self._ending:
            return
        self._losses.append((secondary, error))
        if not secondary:
            self._cause_known.set()
        if self._group is not None:
            self._group.abort()

    def _reason(self) -> EngineError:
        """Return the first loss that no other loss caused."""
        return min(self._losses, key=lambda loss: loss[0])[1]


class _Rank:
    """One process, and a thread that reads its replies."""

    def __init__(
        self, rank: int, size: int, spec: ModelSpec, rendezvous: int, on_loss: Callable[[EngineError, bool], None]
    ) -> None:
        self.rank, self.spec = rank, spec
        self.name = (
            f"rank {rank} of {size} (tensor parallelism, {spec.shares[0].device if spec.shares else spec.device})"
        )
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._on_loss = on_loss
        ours, theirs = socket.socketpair()
        options = {"--rank": rank, "--fd": theirs.fileno(), "--rendezvous": rendezvous, "--parent": os.getpid()}
        try:
            with block_stop_signals():
                self._process = subprocess.Popen(
                    [
                        *python_command("-m", "engine.backends.torch.parallel.rank_process"),
                        *(text for name, value in options.items() for text in (name, str(value))),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), rendezvous),
                    env=child_environment(),
                )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.connection: Connection[Reply] = Connection(ours, Reply)
        threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True).start()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def reap(self) -> None:
        """Wait until a killed process has given its memory back."""
        self.connection.close()
        try:
            self._process.wait(_KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:
            _logger.error("%s does not end", self.name)

    def _read(self) -> None:
        while (reply := self.connection.receive()) is not None:
            if isinstance(reply, Failed):
                self._on_loss(from_info(reply.error), reply.secondary)
                return
            self.replies.put(reply)
        try:
            status = self._process.wait(_KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:
            status = 0
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self._on_loss(WorkerFailed(f"{self.name} ended: {how}"), False)


def _rendezvous_file() -> int:
    """Return a file in memory by which processes find each other, and which is gone with the last of them."""
    create = getattr(os, "memfd_create", None)
    if create is None:
        raise InvalidRequest("tensor_parallel_size needs Linux", param="tensor_parallel_size")
    return int(create("ericllm-ranks"))
