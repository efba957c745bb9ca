"""The process of a rank other than 0: `python -m engine.backends.torch.parallel.rank_process`, started by `Ranks`
alone. It does what rank 0 orders, until that ends."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.backends.base import LoadProgress
from engine.backends.common.model_config import Shard
from engine.backends.torch.model.lora import LoraAdapter
from engine.backends.torch.model.norms import identity
from engine.backends.torch.model.parallel import ParallelHead
from engine.backends.torch.parallel.group import ProcessGroup, RankLost, rank_device
from engine.backends.torch.parallel.messages import (
    AllocateKv,
    Attach,
    ComputeHead,
    Connection,
    Done,
    EnlargePages,
    Failed,
    LoadPart,
    Order,
    PrepareAttention,
    Progress,
    Refused,
    Report,
    Started,
    Step,
)
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights.model_loader import LoadedDecoder
from engine.config import AdapterSpec
from engine.errors import EngineError, WorkerFailed, first_line
from engine.system.child_process import die_with_parent, ignore_stop_signals
from engine.system.tasks import reduce_gc_pauses

_logger = logging.getLogger(__name__)


class FollowerRunner(ModelRunner):
    """Runner of a rank other than 0: its steps end before the head, which rank 0 calls separately."""

    def __init__(self, loaded: LoadedDecoder, **settings: Any) -> None:
        head = loaded.decoder.head
        assert isinstance(head, ParallelHead), "a rank has a part of the head"
        self._head = head
        super().__init__(replace(loaded, decoder=replace(loaded.decoder, head=identity)), **settings)

    @torch.inference_mode()
    def compute_head(self, rows: int) -> None:
        """Compute logits of states that rank 0 broadcasts."""
        device = self._layout.last.device
        self._head.gather(torch.empty(rows, self.config.hidden_size, dtype=self._dtype, device=device))


class RankLoop:
    """Carries out the orders of rank 0. rendezvous: file by which the ranks find each other."""

    def __init__(self, connection: Connection[Order], rendezvous: Path) -> None:
        self._connection, self._rendezvous = connection, rendezvous
        self._runner: FollowerRunner | None = None
        self._name = "a rank of tensor parallelism"
        self._adapters: dict[str, LoraAdapter] = {}

    def run(self) -> bool:
        """Work until rank 0 is gone; False after a failure, which rank 0 receives."""
        try:
            while (order := self._connection.receive()) is not None:
                self._execute(order)
        except Exception as error:
            _logger.exception("%s failed", self._name)
            why = WorkerFailed(f"{self._name} failed: {first_line(error)}")
            failure = error if isinstance(error, EngineError) else why
            self._connection.send(Failed(error=failure.info, secondary=isinstance(error, RankLost)))
            return False
        return True

    def _execute(self, order: Order) -> None:
        match order:
            case LoadPart():
                self._load(order)
            case AllocateKv():
                self._loaded.allocate_kv(
                    order.num_pages, order.page_tokens, report=_ignore, max_sequences=order.max_sequences
                )
            case PrepareAttention():
                self._loaded.prepare_attention(lambda done, total: None)
            case Step():
                self._step(order)
            case ComputeHead(rows=rows):
                self._loaded.compute_head(rows)
            case Attach(adapter=spec):
                self._attach(spec)
            case EnlargePages():
                self._loaded.enlarge_pages()
            case Report():
                pass
        if isinstance(order, LoadPart | AllocateKv | PrepareAttention | Report):
            self._connection.send(self._done())

    def _load(self, order: LoadPart) -> None:
        torch.set_num_threads(order.threads)
        spec, shard = order.spec, Shard(order.rank, order.ranks)
        self._name = f"rank {shard.rank} of {shard.size} (tensor parallelism)"
        self._connection.send(Started())
        group = ProcessGroup.connect(self._rendezvous, shard, rank_device(spec))
        self._runner = FollowerRunner.load(
            spec.path,
            spec,
            report=lambda progress: self._connection.send(Progress(progress)),
            cancelled=lambda: False,
            group=group,
        )

    def _step(self, step: Step) -> None:
        if step.threads is not None:
            torch.set_num_threads(step.threads)
        if step.adapters is not None:
            self._adapters = {key: self._adapters[key] for key in step.adapters}
        chunks = [chunk.chunk() for chunk in step.chunks]
        if step.only_account:
            self._loaded.account_for(chunks)
        else:
            self._loaded.forward(chunks)

    def _attach(self, spec: AdapterSpec) -> None:
        adapters = self._loaded.adapters
        try:
            adapter = adapters.attach(spec)
        except EngineError as error:
            self._connection.send(Refused(error.info))
            return
        self._adapters[adapter.key] = adapter
        adapters.detach(spec.key)  # rank 0 says when it is free
        self._connection.send(self._done(adapter))

    def _done(self, adapter: LoraAdapter | None = None) -> Done:
        runner = self._loaded
        return Done(
            dtype=runner.dtype_name,
            attention=runner.attention.name if runner.attention is not None else "",
            shares=runner.shares,
            free_bytes=runner.free_bytes(),
            shared_bytes=runner.shared_bytes,
            adapter=adapter.key if adapter is not None else "",
            adapter_bytes=adapter.size_bytes if adapter is not None else 0,
        )

    @property
    def _loaded(self) -> FollowerRunner:
        assert self._runner is not None, "a model is loaded first"
        return self._runner


def _ignore(progress: LoadProgress) -> None:
    """Rank 0 reports its own."""


def main() -> int:
    """Run one rank until rank 0 ends; return the exit status."""
    parser = argparse.ArgumentParser(prog="engine.backends.torch.parallel.rank_process")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--rendezvous", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    ignore_stop_signals()
    if not die_with_parent(options.parent):
        return 1
    logging.basicConfig(stream=sys.stderr, format=f"rank {options.rank}: %(message)s")
    logging.getLogger("engine").setLevel(logging.INFO)
    logging.captureWarnings(True)
    reduce_gc_pauses()
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    os.set_inheritable(options.rendezvous, False)
    connection: Connection[Order] = Connection(sock, Order)
    return 0 if RankLoop(connection, Path(f"/proc/self/fd/{options.rendezvous}")).run() else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # takes no torch apart
