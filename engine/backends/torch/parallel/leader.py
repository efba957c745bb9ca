"""LeaderRunner: the runner of rank 0, which is the worker: what it does, the other ranks do with their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common.model_config import Shard, read_model_config
from engine.backends.common.sharding import shard_config
from engine.backends.common.torch_load_settings import apply_settings, refuse_settings
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.device_memory import DeviceMemory, StepOutOfMemory
from engine.backends.torch.model.lora import LoraAdapter
from engine.backends.torch.model.parallel import CallHead, Group
from engine.backends.torch.parallel.group import rank_device
from engine.backends.torch.parallel.messages import (
    AllocateKv,
    Attach,
    ComputeHead,
    Done,
    EnlargePages,
    PrepareAttention,
    Report,
    Step,
    WireChunk,
)
from engine.backends.torch.parallel.ranks import Ranks
from engine.backends.torch.prompt_logprobs import ReadPromptStates
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights.adapters import AdapterLoader, AttachedAdapters
from engine.backends.torch.weights.model_loader import LoadedDecoder, load_decoder
from engine.config import AdapterSpec, DeviceShare, ModelSpec
from engine.errors import EngineError, LoadCancelled, ModelLoadFailed

_SIZES = ("weights_bytes", "kv_bytes", "working_bytes", "shared_bytes")


class LeaderRunner(ModelRunner):
    """ModelRunner of a model that is split over ranks. Sizes in bytes are of all ranks, but those that decide how many
    KV pages there are.

    Where a rank is lost, or this one fails within a step, the ranks do not agree any more: WorkerFailed.
    """

    def __init__(self, loaded: LoadedDecoder, ranks: Ranks, others: Sequence[Done], **settings: Any) -> None:
        super().__init__(loaded, **settings)
        self._ranks, self._others = ranks, others
        self._threads = torch.get_num_threads()
        loader = AdapterLoader(loaded.config, loaded.dtype, loaded.layout.by_layer, loaded.group)
        self.adapters: LeaderAdapters = LeaderAdapters(loader, ranks)
        self.shared_bytes += sum(each.shared_bytes for each in others)
        self.rank_pids = ranks.pids

    @classmethod
    def load(
        cls,
        path: Path,
        spec: ModelSpec,
        *,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
        devices: tuple[DeviceMemory, ...] = (),
        group: Group | None = None,
        call_head: CallHead = lambda rows: None,
    ) -> LeaderRunner:
        """Load this rank's part, while the other ranks, whose processes are started, load theirs. Raises as
        `load_decoder`, or the error of another rank, with no process left."""
        on_cpu = rank_device(spec).type == "cpu"
        refuse_settings(spec, on_cpu=on_cpu, simulated=any(each.device.startswith("sim") for each in spec.shares))
        shard_config(apply_settings(read_model_config(path), spec), Shard(0, spec.tensor_parallel_size))
        ranks = Ranks(spec)
        try:
            group = ranks.connect(torch.get_num_threads(), cancelled)
            loaded = load_decoder(
                path,
                ranks.spec,
                report=report,
                cancelled=lambda: cancelled() or ranks.is_lost,
                group=group,
                call_head=lambda rows: ranks.order(ComputeHead(rows)),
            )
            others = ranks.wait(report, cancelled)
            _refuse_difference("dtype", loaded.dtype, [getattr(torch, each.dtype) for each in others])
            return cls(
                loaded,
                ranks,
                others,
                attention=spec.attention,
                cache_bits=spec.cache_bits,
                deterministic=spec.deterministic,
            )
        except BaseException as error:
            ranks.end()
            if isinstance(error, LoadCancelled) and not cancelled():
                ranks.check()
            raise

    @property
    def devices(self) -> tuple[str, ...]:
        """Each rank's, by rank; a CPU once."""
        return tuple(share.device for share in self._shares())

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        """Memory used on each device now, by rank."""
        self._ranks.order(Report())
        self._others = self._ranks.wait()
        return self._shares()

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights of all ranks, as they last reported."""
        return super().weights_bytes + sum(share.weights_bytes for each in self._others for share in each.shares)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pages of all ranks, which have as many each."""
        return super().kv_bytes * self._ranks.size

    def free_bytes(self) -> int:
        """Return the bytes that KV pages may take on each rank."""
        sharing = 1 + sum(each.shares[0].device == self._layout.first.name for each in self._others)
        return min(super().free_bytes(), *(each.free_bytes for each in self._others)) // sharing

    def enlarge_pages(self) -> None:
        """Have all ranks do so."""
        self._ranks.order(EnlargePages())
        super().enlarge_pages()

    def allocate_kv(
        self,
        num_pages: int,
        page_tokens: int,
        *,
        report: Callable[[LoadProgress], None],
        max_sequences: int = 0,
        name_file: Callable[[Sequence[str]], str] = lambda facts: "",
    ) -> int:
        """Allocate the same pages on all ranks, each for its key heads. They end with the ranks, and have no file."""
        self._ranks.order(AllocateKv(num_pages=num_pages, page_tokens=page_tokens, max_sequences=max_sequences))
        super().allocate_kv(num_pages, page_tokens, report=report, max_sequences=max_sequences)
        self._others = self._ranks.wait()
        _refuse_difference("attention", self._attention_name, [each.attention for each in self._others])
        return self.kv_bytes

    def prepare_attention(self, report: Callable[[int, int], None]) -> None:
        """Compile on all ranks at once."""
        self._ranks.order(PrepareAttention())
        super().prepare_attention(report)
        self._ranks.wait()

    def account_for(self, chunks: Sequence[ChunkInput]) -> None:
        """Record the memory of a step on all ranks."""
        super().account_for(chunks)
        self._ranks.order(Step(chunks=[WireChunk.from_chunk(chunk) for chunk in chunks], only_account=True))

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[ChunkInput], read_states: ReadPromptStates | None = None, drawn: Tensor | None = None
    ) -> Tensor:
        """Compute with all ranks. Raises WorkerFailed where that fails, but StepOutOfMemory as ModelRunner does."""
        try:
            return super().forward(chunks, read_states, drawn)
        except StepOutOfMemory:
            raise  # nothing was ordered yet
        except Exception as error:
            raise self._ranks.failure(error) from error

    def begin_step(self, chunks: Sequence[ChunkInput]) -> None:
        """Have the other ranks compute the step."""
        before, self._threads = self._threads, torch.get_num_threads()
        self._ranks.order(
            Step(
                chunks=[WireChunk.from_chunk(chunk) for chunk in chunks],
                adapters=self.adapters.take_changed_keys(),
                threads=self._threads if self._threads != before else None,
            )
        )

    def check_ranks(self) -> None:
        """Raise WorkerFailed if a rank is lost."""
        self._ranks.check()

    def unload(self) -> None:
        """Free the memory of all ranks, and end their processes."""
        self._ranks.end()
        super().unload()

    def _shares(self) -> tuple[DeviceShare, ...]:
        found: dict[str, DeviceShare] = {}
        for share in (*super().shares, *(share for each in self._others for share in each.shares)):
            before = found.get(share.device)
            found[share.device] = msgspec.structs.replace(share, ranks=self._ranks.size)
            if before is not None:  # a CPU
                sums = {name: getattr(before, name) + getattr(share, name) for name in _SIZES}
                found[share.device] = msgspec.structs.replace(before, **sums)
        return tuple(found.values())

    @property
    def _attention_name(self) -> str:
        return self.attention.name if self.attention is not None else ""


class LeaderAdapters(AttachedAdapters):
    """The adapters of rank 0, which the other ranks have too."""

    def __init__(self, loader: AdapterLoader, ranks: Ranks) -> None:
        super().__init__(loader)
        self._ranks = ranks
        self._sent: tuple[str, ...] | None = ()

    def attach(self, spec: AdapterSpec) -> LoraAdapter:
        """Attach an adapter on all ranks, or on none; return it with the size that it has on all of them."""
        adapter = super().attach(spec)
        self._sent = None  # the other ranks have it until a step does not name it
        try:
            self._ranks.order(Attach(spec))
            others = self._ranks.wait()
            _refuse_difference("adapter", adapter.key, [each.adapter for each in others])
        except EngineError:
            self.detach(spec.key)
            raise
        return replace(adapter, size_bytes=adapter.size_bytes + sum(each.adapter_bytes for each in others))

    def take_changed_keys(self) -> tuple[str, ...] | None:
        """Return the keys of the adapters in memory; None where they are those of the last call."""
        keys = tuple(sorted(self.by_key))
        if keys == self._sent:
            return None
        self._sent = keys
        return keys


def _refuse_difference(what: str, own: object, others: Sequence[object]) -> None:
    """Raise ModelLoadFailed unless all ranks have the same."""
    for rank, other in enumerate(others, 1):
        if other != own:
            raise ModelLoadFailed(f"rank {rank} of tensor parallelism has the {what} {other}, rank 0 has {own}")
