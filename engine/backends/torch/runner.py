"""ModelRunner: a loaded model on its devices, with its KV pages, which runs one batch at a time."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from engine.backends import torch_device
from engine.backends.base import LoadProgress
from engine.backends.common.kv_format import HeadFormat
from engine.backends.common.model_config import ModelConfig
from engine.backends.common.step_memory import StepSizes, logits_rows_at_once, step_bytes
from engine.backends.paged_attention.choose import NO_CPU, Choice
from engine.backends.paged_attention.interface import (
    PREPARED_ROWS,
    CompiledAttention,
    PagedAttention,
    implementation,
)
from engine.backends.paged_attention.probe import engage, probe
from engine.backends.sampling.sampler import FindBest, best_tokens
from engine.backends.scheduler.batch import ChunkInput, prefilled_rows
from engine.backends.torch.cuda.decode_graphs import DecodeGraphs, record_decode_graphs, recorder_for
from engine.backends.torch.cuda.step_transfer import (
    BlockingUploader,
    fill_pending_ids,
    readback_for,
    upload_plan,
    uploader_for,
)
from engine.backends.torch.determinism import refuse_nondeterministic
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.kv.staging import ContiguousKvStaging, kv_staging_for
from engine.backends.torch.layout import Layout
from engine.backends.torch.model.decoder import Decoder
from engine.backends.torch.model.linear import linear_kind
from engine.backends.torch.model.parallel import CallHead, Group
from engine.backends.torch.model.step_plan import HeadCounts, StepPlan, StepPlanner, sampled_rows
from engine.backends.torch.native.attention import NativeAttention
from engine.backends.torch.native.attention_check import layer_heads, native_obstacle
from engine.backends.torch.native.stack import Stack, stack_model
from engine.backends.torch.prompt_logprobs import FinalStates, ReadPromptStates
from engine.backends.torch.weights.adapters import AdapterLoader, AttachedAdapters
from engine.backends.torch.weights.model_loader import LoadedDecoder, load_decoder
from engine.config import AttentionName, CacheBits, DeviceShare, ModelSpec


def code_digest(folder: Path) -> str:
    """Return a digest of the Python files below a folder: another version of them may lay out or compute KV pages
    otherwise."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


_CODE_DIGEST = code_digest(Path(__file__).parents[1])
"""Of the code that is imported: workers are forked from a process that may be older than the files."""

# Memory of a step, recorded for the devices before it is computed.


class StepMemory:
    """Estimates the memory of the steps of one model, and records it for its devices."""

    def __init__(self, config: ModelConfig, heads: HeadFormat, layout: Layout, page_tokens: int) -> None:
        self._heads, self._layout, self._page_tokens = heads, layout, page_tokens
        self._max_sampled = 0
        self._step_bytes = lru_cache(maxsize=256)(partial(step_bytes, config, heads=heads))

    def record(self, plan: StepPlan, *, fused: bool, staging_bytes: int) -> int:
        """Record the memory of a step; return how many of its states logits can be computed of at once.

        fused: True if all blocks are fused.  staging_bytes: of the KV staging. Raises StepOutOfMemory where a device
        has too little left.
        """
        state_rows = self._state_rows(len(plan.sampled_rows))
        sizes = plan.sizes(
            self._page_tokens, copies_runs=self._heads.is_quantised, max_state_rows=state_rows, fused=fused
        )
        self._record(sizes, staging_bytes)
        return state_rows

    def record_stacked(self, chunks: Sequence[ChunkInput], stack: Stack) -> int:
        """Do the same for a step in one native call, with the angles of positions before those of the step."""
        sampled = sum(chunk.num_sampled for chunk in chunks)
        state_rows = self._state_rows(sampled)
        states = min(state_rows, max(len(chunk.prompt_states) for chunk in chunks))
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        sizes = StepSizes(rows=rows, sampled=sampled, prompt_states=states, native=True, fused=True)
        angle_bytes, before_bytes = stack.angle_bytes(max(chunk.end for chunk in chunks) - rows)
        self._record(sizes, angle_bytes, before_bytes if angle_bytes else 0)
        return state_rows

    def _state_rows(self, sampled: int) -> int:
        self._max_sampled = max(self._max_sampled, sampled)
        return logits_rows_at_once(self._max_sampled)

    def _record(self, sizes: StepSizes, lasting_bytes: int, before_bytes: int = 0) -> None:
        """lasting_bytes: of what steps leave allocated.  before_bytes: freed before the other memory is allocated."""
        for span in self._layout.spans:
            layers, head = bool(span.layers), span.memory is self._layout.last
            needed_bytes = self._step_bytes(sizes, layers=layers, head=head)
            span.memory.begin_step(max(needed_bytes, before_bytes) + lasting_bytes)


class ModelRunner:
    """A loaded model. `allocate_kv` comes before the first `forward`; torch's thread count is the caller's.

    attention: the attention kernel, and why; set by `allocate_kv`.  adapters: those that chunks may name.
    active_parameters: those that one token is computed with.
    shared_bytes: of the weights, once for all workers of this machine.  linear: kind of the linear layers.
    native: True if it uses the native kernels, as far as they apply; None where they are not for its devices.
    find_best: finds the likeliest tokens of rows of logits, with the native kernels where they apply.
    deterministic: True if a row's result must not depend on the rest of the batch.
    readback: copies results to the host from the last device, while all run ahead: on GPUs, unless a mixture of experts
        needs the host in every layer, or ranks of tensor parallelism need the tokens; else None.
    rank_pids: processes of the other ranks of tensor parallelism.
    finite: of the last `forward` with `read_states`, [N] whether the states of each prefilling chunk are finite, in
        order; None where there was none. Others must not be cached: attention reads some masked rows, so that those
        before the first such one may be affected too.
    best: of the last `forward`, what `find_best` returns for its logits; None where that is not known yet.
    """

    def __init__(
        self,
        loaded: LoadedDecoder,
        *,
        attention: AttentionName = "auto",
        cache_bits: CacheBits = 16,
        deterministic: bool = False,
    ) -> None:
        decoder, layout, dtype = loaded.decoder, loaded.layout, loaded.dtype
        self.config = decoder.config
        self._enlarge_pages: Callable[[], None] | None = loaded.enlarge_pages
        self.parameters, self.active_parameters = loaded.parameters, loaded.active_parameters
        self.shared_bytes = loaded.shared_bytes
        self.attention: Choice | None = None
        self.linear = linear_kind(next(block for stage in decoder.stages for block in stage.blocks).qkv)
        self._dtype, self._layout, self._wanted_attention = dtype, layout, attention
        self._kernels = loaded.kernels
        self.native = self._kernels.library is not None if self._kernels.apply else None
        self.find_best: FindBest = best_tokens if self._kernels.library is None else self._kernels.library.best_tokens
        self._heads = HeadFormat(self.config.head_dim, cache_bits, dtype.itemsize)
        self.adapters = AttachedAdapters(AdapterLoader(loaded.config, dtype, layout.by_layer, loaded.group))
        self.deterministic = deterministic
        self._decoder: Decoder | None = decoder
        self._kv: KvPool | None = None
        self._planner: StepPlanner | None = None
        self._step_memory: StepMemory | None = None
        self._paged: PagedAttention | None = None
        self._kv_staging: ContiguousKvStaging | None = None
        self._graphs: DecodeGraphs | None = None
        self._stack: Stack | None = None
        self._uploader = uploader_for(layout.first.device)
        self._is_rank = loaded.group is not None
        self.readback = None if decoder.needs_host or self._is_rank else readback_for(layout.last.device)
        self.rank_pids: tuple[int, ...] = ()
        self.finite: Tensor | None = None
        self.best: Tensor | None = None

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
    ) -> Self:
        """Load a model; see `load_decoder`."""
        loaded = load_decoder(
            path, spec, report=report, cancelled=cancelled, devices=devices, group=group, call_head=call_head
        )
        return cls(loaded, attention=spec.attention, cache_bits=spec.cache_bits, deterministic=spec.deterministic)

    def enlarge_pages(self) -> None:
        """Back the weights with large pages, in the background, once the load and the first step are done."""
        if self._enlarge_pages is not None:
            self._enlarge_pages()
            self._enlarge_pages = None

    @property
    def dtype_name(self) -> str:
        """The dtype that the weights and the KV pages have, such as "bfloat16"."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices in the order of the layers, as in ModelSpec.device: "cpu", "cuda:N" or "sim:N"."""
        return tuple(memory.name for memory in self._layout.memories)

    @property
    def on_cpu(self) -> bool:
        """True if it computes on the CPU only, and no device is simulated."""
        return all(each.device.type == "cpu" and not each.simulated for each in self._layout.memories)

    @property
    def first_memory(self) -> DeviceMemory:
        """The memory of the device with its first layer."""
        return self._layout.first

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        """Memory used on each device: weights, KV pages, and the largest step so far."""
        return self._layout.shares()

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights, adapters included."""
        return sum(memory.weights_bytes for memory in self._layout.memories)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pages; 0 before `allocate_kv`."""
        return self._kv.total_bytes if self._kv else 0

    @property
    def kv(self) -> KvPool:
        """The KV pages. Only after `allocate_kv`."""
        assert self._kv is not None
        return self._kv

    def kv_facts(self, page_tokens: int) -> list[str]:
        """Return what the bytes of a KV page of this size depend on besides the weights and settings of the model.
        Workers on equal devices share them."""
        native = self._kernels.library
        kernels = native.key if native is not None else ""
        attention = self.attention.name if self.attention else ""
        own = (attention, self.linear, self.dtype_name, kernels, str(page_tokens), torch.__version__)
        devices = {
            torch.cuda.get_device_name(each.device) if each.device.type == "cuda" else each.device.type
            for each in self._layout.memories
        }
        return [repr(self.config), *own, _CODE_DIGEST, *sorted(devices)]

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values."""
        return 2 * self.config.layers * self.config.kv_heads * self._heads.head_bytes

    def free_bytes(self) -> int:
        """Return the bytes that KV pages may take, given the devices' free memory."""
        return self._layout.kv_room_bytes()

    def allocate_kv(
        self,
        num_pages: int,
        page_tokens: int,
        *,
        report: Callable[[LoadProgress], None],
        max_sequences: int = 0,
        name_file: Callable[[Sequence[str]], str] = lambda facts: "",
    ) -> int:
        """Allocate KV pages in place of any earlier ones; return their bytes. Where attention gathers pages, up to
        `max_sequences` decodes may be staged besides (see `kv.staging`). name_file: returns the name of the RAM file
        for pages on a CPU, given `kv_facts`, or "".

        Raises InvalidRequest where the requested attention or determinism is not available, InsufficientMemory with the
        numbers where the pages do not fit.
        """
        self._kv = self._planner = self._step_memory = self._graphs = self._stack = self._kv_staging = None
        for each in self._layout.memories:
            each.forget_kv()
        self.attention, self._paged = self.pick_attention(page_tokens)
        if self.deterministic and self._decoder is not None:
            refuse_nondeterministic(self._decoder, self.attention)
        with torch.inference_mode():
            kv = KvPool(
                self.config,
                num_pages,
                page_tokens,
                heads=self._heads,
                dtype=self._dtype,
                layout=self._layout,
                report=report,
                file_name=name_file(self.kv_facts(page_tokens)) if self.on_cpu else "",
            )
            if self.attention.name == "gathered":
                self._kv_staging = kv_staging_for(kv, self.config, self._layout, max_sequences)
        self._planner = StepPlanner(
            frozenset(self.config.traits.windows),
            HeadCounts(self.config.heads, self.config.kv_heads, self.config.head_dim),
            page_tokens,
            dtype=self._dtype,
            device=torch.device("cpu") if self._uploader is not None else self._layout.first.device,
            paged=self._paged,
            native=self._native_attention(kv) if self.attention.name == "native" else None,
            masks=bool(self.config.traits.attn_softcap),
            kv_staging=self._kv_staging,
            adapters=self.adapters.by_key,
        )
        self._step_memory = StepMemory(self.config, self._heads, self._layout, page_tokens)
        self._kv = kv
        return self.kv_bytes

    def pick_attention(self, page_tokens: int) -> tuple[Choice, PagedAttention | None]:
        """Return the attention for pages of this size, and its implementation; None for gathered or native.

        Raises InvalidRequest where the requested one is not available.
        """
        devices = [each.device for each in self._layout.memories]
        facts = probe(
            *devices,
            page_tokens=page_tokens,
            heads=self.config.heads,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype_name,
            softcap=self.config.traits.attn_softcap,
            cache_bits=self._heads.bits,
            window=next((window for window in self.config.traits.windows if window is not None), None),
            native_problem=NO_CPU if self._wanted_attention == "gathered" else self._native_problem(page_tokens),
        )
        choice = engage(self._wanted_attention, facts, devices, varlen=True)
        if choice.name in ("gathered", "native"):
            return choice, None
        return choice, implementation(choice.name, self._heads, devices)

    @torch.inference_mode()
    def prepare_attention(self, report: Callable[[int, int], None]) -> None:
        """Compile the kernels of attention that steps can meet, with progress as calls done and their number. After
        `allocate_kv`, while page 0 is unused."""
        if self._kv is None or not isinstance(self._paged, CompiledAttention):
            return
        config, spans = self.config, self._layout.spans
        for number, span in enumerate(spans):
            if not span.layers:
                continue
            rows = torch.zeros(
                PREPARED_ROWS,
                config.heads + 2 * config.kv_heads,
                config.head_dim,
                dtype=self._dtype,
                device=span.device,
            )

            def report_all(done: int, total: int, before: int = number) -> None:
                report(before * total + done, len(spans) * total)

            self._paged.prepare(
                rows[:, : config.heads],
                None,
                None,
                *self._kv.pages(span.layers[0]),
                windows=frozenset(config.traits.windows),
                softcap=config.traits.attn_softcap,
                varlen=True,
                report=report_all,
            )

    @torch.inference_mode()
    def record_decodes(
        self,
        max_sequences: int,
        step_tokens: int,
        *,
        adapters: bool = True,
        report: Callable[[LoadProgress], None] = lambda progress: None,
        proceed: Callable[[], None] = lambda: None,
    ) -> None:
        """Record steps of few tokens as CUDA graphs, where the device and the model allow that. After `allocate_kv`,
        while page 0 is unused. adapters: True if requests may have some.  report, proceed: see `DecodeGraphs.record`.
        """
        if self._is_rank:
            return
        memories = [span.memory for span in self._layout.spans]
        recorders = [each for memory in memories if (each := recorder_for(memory.device)) is not None]
        if len(recorders) < len(memories) or self._paged is None or self._decoder is None or self._kv is None:
            return
        self._graphs = record_decode_graphs(
            self._decoder,
            self._kv,
            max_sequences,
            step_tokens,
            attention=self._paged,
            memories=memories,
            recorders=recorders,
            uploader=self._uploader or BlockingUploader(self._layout.first.device),
            adapters=self.adapters.by_key if adapters and not self.deterministic else None,
            report=report,
            proceed=proceed,
        )

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[ChunkInput], read_states: ReadPromptStates | None = None, drawn: Tensor | None = None
    ) -> Tensor:
        """Compute `chunks` in one batch; return float32 logits [sum of the chunks' `sampled`, vocab], in order.

        read_states: called with the final states that chunks need for output about prompts, before the logits exist.
        drawn: ids that the previous step sampled, on the device, in place of pending ones.
        Raises StepOutOfMemory, with nothing computed, where a device has too little left.
        """
        if self._decoder is None or self._kv is None or self._planner is None or self._step_memory is None:
            raise RuntimeError("forward needs a loaded model with allocated KV pages")
        self.finite = self.best = None
        if self._stack is not None and not any(chunk.adapter for chunk in chunks):
            return self._forward_stacked(self._stack, chunks, read_states)
        if self._graphs is not None and (step := self._graphs.replay(chunks, drawn)) is not None:
            several_tokens = len(step.magnitudes) > len(chunks)
            if read_states is not None and several_tokens and (prefilled := prefilled_rows(chunks)):
                self._check_finite(prefilled, step.magnitudes)
            return step.logits
        plan = self._planner.plan(chunks)
        if self._uploader is not None:
            plan = upload_plan(plan, self._uploader)
        if drawn is not None:
            fill_pending_ids(plan.ids, drawn)
        state_rows = self._account(plan, self._step_memory, fused=self._decoder.fused)
        self.begin_step(chunks)
        try:
            sampled_only = not plan.prompt_states and len(plan.sampled_rows) < len(plan.ids)
            check = self._checks_finite(plan.prefilled) if read_states is not None and plan.prefilled else None
            hidden = self._decoder.hidden(plan, self._kv, plan.sampled_rows if sampled_only else None, check)
        except BaseException:
            if self._kv_staging is not None:
                self._kv_staging.forget()
            raise
        if read_states is not None:
            for index, rows in plan.prompt_states.items():
                read_states(index, FinalStates(self._decoder, hidden[rows.start : rows.stop], state_rows))
        return self._decoder.logits(hidden if sampled_only else hidden.index_select(0, plan.sampled_rows))

    def _forward_stacked(
        self, stack: Stack, chunks: Sequence[ChunkInput], read_states: ReadPromptStates | None
    ) -> Tensor:
        """Do what `forward` does in one native call."""
        assert self._decoder is not None and self._step_memory is not None, "a stack is of a loaded model"
        state_rows = self._step_memory.record_stacked(chunks, stack)
        self.begin_step(chunks)
        samples = read_states is None or not any(chunk.prompt_states for chunk in chunks)
        step = stack(chunks, samples=samples)
        if read_states is not None and (prefilled := prefilled_rows(chunks)):
            self._check_finite(prefilled, torch.linalg.vector_norm(step.states, torch.inf, dim=-1))
        self.best = step.best
        if step.sampled is None:
            assert step.logits is not None, "a step gives one or the other"
            return step.logits
        if samples:
            return self._decoder.logits(step.sampled)
        assert read_states is not None, "states are requested to be read"
        ends = list(itertools.accumulate(len(chunk.token_ids) for chunk in chunks))
        for index, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            if chunk.prompt_states:
                first = end - len(chunk.token_ids) + chunk.prompt_states.start
                rows = step.states[first : first + len(chunk.prompt_states)]
                read_states(index, FinalStates(self._decoder, rows, state_rows))
        sampled = torch.tensor(sampled_rows(chunks, [end - 1 for end in ends]), dtype=torch.int64)
        return self._decoder.logits(step.states.index_select(0, sampled))

    def begin_step(self, chunks: Sequence[ChunkInput]) -> None:
        """Do what precedes a step for which there is memory: nothing, where no other process computes a part of it."""

    def check_ranks(self) -> None:
        """Raise WorkerFailed where another process that computes a part of the model is lost."""

    def unload(self) -> None:
        """Free the weights and the KV pages. Idempotent."""
        self._decoder = self._kv = self._planner = self._step_memory = self._graphs = self._stack = None
        self._kv_staging = self._enlarge_pages = None
        self.adapters.clear()
        for each in self._layout.memories:
            each.weights_bytes = each.kv_bytes = 0
            torch_device.give_back(each.device)

    def _checks_finite(self, prefilled: Sequence[range]) -> Callable[[Tensor], None]:
        return lambda states: self._check_finite(prefilled, torch.linalg.vector_norm(states, torch.inf, dim=-1))

    def _check_finite(self, prefilled: Sequence[range], magnitudes: Tensor) -> None:
        largest = [magnitudes[rows.start : rows.stop].amax() for rows in prefilled]
        self.finite = torch.stack(largest).isfinite()

    def _native_problem(self, page_tokens: int) -> str:
        if self._decoder is None:
            return NO_CPU
        return native_obstacle(
            self._kernels,
            layer_heads(self._decoder),
            dtype=self._dtype,
            devices=[each.device for each in self._layout.memories],
            page_tokens=page_tokens,
            bits=self._heads.bits,
        )

    def _native_attention(self, kv: KvPool) -> NativeAttention:
        library = self._kernels.library
        if self._decoder is None or library is None:
            raise RuntimeError("native attention needs a model and its library")
        heads = [each.heads for each in layer_heads(self._decoder)]
        attention = NativeAttention(library, heads, kv.layers, dtype=self._dtype, bits=self._heads.bits)
        self._stack = stack_model(self._decoder, library, attention)
        return attention

    def account_for(self, chunks: Sequence[ChunkInput]) -> None:
        """Record the memory of a step of `chunks` without computing it. Raises StepOutOfMemory as `forward` does."""
        if self._decoder is None or self._planner is None or self._step_memory is None:
            raise RuntimeError("account_for needs a loaded model with allocated KV pages")
        self._account(self._planner.plan(chunks), self._step_memory, fused=self._decoder.fused)
        if self._kv_staging is not None:
            self._kv_staging.forget()

    def _account(self, plan: StepPlan, step_memory: StepMemory, *, fused: bool) -> int:
        staging_bytes = self._kv_staging.size_bytes if self._kv_staging is not None else 0
        return step_memory.record(plan, fused=fused, staging_bytes=staging_bytes)
