"""One loaded model on its devices: holds its KV pages, and runs one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common.kv_format import HeadFormat
from engine.backends.common.model_config import ModelConfig
from engine.backends.common.step_memory import logits_rows_at_once, step_bytes
from engine.backends.paged_attention.choose import NO_CPU, Choice
from engine.backends.paged_attention.interface import PagedAttention, implementation
from engine.backends.paged_attention.probe import engage, probe
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.cuda.decode_graphs import DecodeGraphs, recorded_decodes
from engine.backends.torch.cuda.recorder import readback_for, recorder_for, staging_for
from engine.backends.torch.cuda.step_transfer import PlainStaging, fill_pending_ids, uploaded
from engine.backends.torch.determinism import refuse_undetermined
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.kv.staging import ContiguousKvStaging, kv_staging_for
from engine.backends.torch.layout import Layout
from engine.backends.torch.model.decoder import Decoder
from engine.backends.torch.model.linear import kind_of
from engine.backends.torch.model.step_plan import StepPlan, StepPlanner
from engine.backends.torch.native.attention import NativeAttention
from engine.backends.torch.native.attention_check import native_obstacle, rotated_heads
from engine.backends.torch.native.stack import stacked
from engine.backends.torch.sampling.prompt_logprobs import FinalStates, ReadPromptStates
from engine.backends.torch.weights.adapters import AdapterLoader, AttachedAdapters
from engine.backends.torch.weights.model_loader import LoadedDecoder, load_decoder
from engine.backends.torch_common import memory
from engine.config import AttentionName, CacheBits, DeviceShare, ModelSpec

# What steps take, entered into the accounts of the devices before they are computed.


class StepAccount:
    """The steps of a model of `config`, laid out as `layout` says, over pages of `page_tokens` that keep `heads`."""

    def __init__(self, config: ModelConfig, heads: HeadFormat, layout: Layout, page_tokens: int) -> None:
        self._config, self._heads, self._layout, self._page_tokens = config, heads, layout, page_tokens
        self._most_sampled = 0

    def enter(self, plan: StepPlan, *, fused: bool, kept_bytes: int) -> int:
        """Note what a step needs; how many of its states can be told of at once. fused: whether its blocks are.
        kept_bytes: what is kept on each device besides.

        Raises StepOutOfMemory where a device is known to have too little left for it.
        """
        self._most_sampled = max(self._most_sampled, len(plan.sampled_rows))
        most_told = logits_rows_at_once(self._most_sampled)
        sizes = plan.sizes(self._page_tokens, copies_runs=self._heads.coded, most_told=most_told)
        sizes = replace(sizes, fused=fused and not plan.adapted)
        for span in self._layout.spans:
            layers, head = bool(span.layers), span.memory is self._layout.last
            needed_bytes = step_bytes(self._config, sizes, self._heads, layers=layers, head=head)
            span.memory.begin_step(needed_bytes + kept_bytes)
        return most_told


class ModelRunner:
    """A loaded model. `allocate_kv` comes before the first `forward`; torch's thread count is the caller's.

    attention: how rows attend, and why; known after `allocate_kv`.  adapters: what chunks may name.
    active_parameters: those that a token is computed with.
    shared_bytes: how much of the weights all workers of this machine have once.  linear: what multiplies by weights.
    native: whether it computes with the native kernels, as far as they can; None where they are not for its devices.
    deterministic: whether every row's result is to be its own affair.
    landing: what is drawn goes back to the host by it, where steps run while the host goes on: on a GPU, if it is one
        alone; a mixture of experts asks the host in every layer.
    finite: of the last `forward` that was given `tell`, [N] whether the states of each chunk that prefills are finite,
        in their order; None where there was none. What is not must not be cached: attention looks at some rows that it
        masks, so that those before the first such one may be spoilt too.
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
        self._settle: Callable[[], None] | None = loaded.settle
        self.parameters, self.active_parameters = loaded.parameters, loaded.active_parameters
        self.shared_bytes = loaded.shared_bytes
        self.attention: Choice | None = None
        self.linear = kind_of(next(block for stage in decoder.stages for block in stage.blocks).qkv)
        self._dtype, self._layout, self._wanted_attention = dtype, layout, attention
        self._kernels = loaded.kernels
        self.native = self._kernels.library is not None if self._kernels.apply else None
        self._heads = HeadFormat(self.config.head_dim, cache_bits, dtype.itemsize)
        self.adapters = AttachedAdapters(AdapterLoader(decoder.config, dtype, layout.by_layer))
        self.deterministic = deterministic
        self._decoder: Decoder | None = decoder
        self._kv: KvPool | None = None
        self._planner: StepPlanner | None = None
        self._account: StepAccount | None = None
        self._paged: PagedAttention | None = None
        self._mirror: ContiguousKvStaging | None = None
        self._graphs: DecodeGraphs | None = None
        self._staging = staging_for(layout.first.device)
        on_host = len(layout.spans) > 1 or decoder.config.traits.experts is not None
        self.landing = None if on_host else readback_for(layout.first.device)
        self.finite: Tensor | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        spec: ModelSpec,
        *,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
        devices: tuple[DeviceMemory, ...] = (),
    ) -> ModelRunner:
        """See `load_decoder`."""
        loaded = load_decoder(path, spec, report=report, cancelled=cancelled, devices=devices)
        return cls(loaded, attention=spec.attention, cache_bits=spec.cache_bits, deterministic=spec.deterministic)

    def settle(self) -> None:
        """The load is over, the first step too: do what makes steps faster and nothing has to wait for."""
        if self._settle is not None:
            self._settle()
            self._settle = None

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
        """Whether it computes on the CPU alone, in memory that is not accounted for as that of other devices."""
        return all(each.device.type == "cpu" and not each.simulated for each in self._layout.memories)

    @property
    def first_memory(self) -> DeviceMemory:
        """The account of the device that its first layer lies on."""
        return self._layout.first

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        """What is held on each device now, and what steps took there so far."""
        return self._layout.shares()

    @property
    def weights_bytes(self) -> int:
        """Bytes that the weights take, those of adapters too."""
        return sum(memory.weights_bytes for memory in self._layout.memories)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV pages take; 0 before `allocate_kv`."""
        return self._kv.total_bytes if self._kv else 0

    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps."""
        return 2 * self.config.layers * self.config.kv_heads * self._heads.head_bytes

    def free_bytes(self) -> int:
        """Bytes that KV pages may take, as far as the devices can give them."""
        return self._layout.kv_room_bytes()

    def allocate_kv(
        self, num_pages: int, page_tokens: int, *, report: Callable[[LoadProgress], None], most_sequences: int = 0
    ) -> int:
        """Hold `num_pages` pages of `page_tokens` tokens in place of any earlier ones; returns their bytes. Where they
        are gathered, up to `most_sequences` that decode may be kept side by side besides (see `mirror`).

        Raises InvalidRequest where the attention or the determinism asked for cannot be, InsufficientMemory with the
        numbers where they do not fit.
        """
        self._kv = self._planner = self._account = self._graphs = self._mirror = None
        if self._decoder is not None:
            self._decoder = replace(self._decoder, stack=None)  # which keeps the pages that it reads
        for each in self._layout.memories:
            each.forget_kv()
        self.attention, self._paged = self.pick_attention(page_tokens)
        if self.deterministic and self._decoder is not None:
            refuse_undetermined(self._decoder, self.attention)
        with torch.inference_mode():
            kv = KvPool(
                self.config,
                num_pages,
                page_tokens,
                heads=self._heads,
                dtype=self._dtype,
                layout=self._layout,
                report=report,
            )
            if self.attention.name == "gathered":
                self._mirror = kv_staging_for(kv, self.config, self._layout, most_sequences)
        self._planner = StepPlanner(
            frozenset(self.config.traits.windows),
            self.config.heads // self.config.kv_heads,
            page_tokens,
            dtype=self._dtype,
            device=torch.device("cpu") if self._staging is not None else self._layout.first.device,
            paged=self._paged,
            native=self._native_attention(kv) if self.attention.name == "native" else None,
            masks=bool(self.config.traits.score_cap),
            mirror=self._mirror,
            adapters=self.adapters.by_key,
        )
        self._account = StepAccount(self.config, self._heads, self._layout, page_tokens)
        self._kv = kv
        return self.kv_bytes

    def pick_attention(self, page_tokens: int) -> tuple[Choice, PagedAttention | None]:
        """What attends over pages of this size; None where pages are gathered, which this backend does by itself.

        Raises InvalidRequest where what was asked for cannot be.
        """
        devices = [each.device for each in self._layout.memories]
        facts = probe(
            *devices,
            page_tokens=page_tokens,
            head_dim=self.config.head_dim,
            dtype=self.dtype_name,
            softcap=self.config.traits.score_cap,
            cache_bits=self._heads.bits,
            window=next((window for window in self.config.traits.windows if window is not None), None),
            native_problem=NO_CPU if self._wanted_attention == "gathered" else self._native_problem(page_tokens),
        )
        choice = engage(self._wanted_attention, facts, devices)
        return choice, None if choice.name in ("gathered", "native") else implementation(choice.name)

    @torch.inference_mode()
    def record_decodes(self, most_sequences: int) -> None:
        """Record the steps that do nothing but go on with answers, of up to so many sequences, where the device and
        the model allow that. After `allocate_kv`, while page 0 is nobody's."""
        recorder = recorder_for(self._layout.first.device)
        if recorder is None or self._paged is None or self._decoder is None or self._kv is None:
            return
        if len(self._layout.spans) > 1:
            return
        self._graphs = recorded_decodes(
            self._decoder,
            self._kv,
            most_sequences,
            attention=self._paged,
            home=self._layout.first,
            recorder=recorder,
            staging=self._staging or PlainStaging(self._layout.first.device),
        )

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: Tensor | None = None
    ) -> Tensor:
        """Feed `chunks` in one batch; returns float32 logits [sum of the chunks' `sampled`, vocab], in their order.

        tell: given what is to be told of prompts, chunk by chunk, before there are any of those logits.
        drawn: the ids that the step before drew, on the device, for those of the chunks that are unread.
        Raises StepOutOfMemory, with nothing computed, where a device is known to have too little left for it.
        """
        if self._decoder is None or self._kv is None or self._planner is None or self._account is None:
            raise RuntimeError("forward needs a loaded model with its KV pages allocated")
        self.finite = None
        if self._graphs is not None and (logits := self._graphs.logits(chunks, drawn)) is not None:
            return logits
        plan = self._planner.plan(chunks)
        if self._staging is not None:
            plan = uploaded(plan, self._staging)
        if drawn is not None:
            fill_pending_ids(plan.ids, drawn)
        most_told = self._enter(plan, self._account, fused=self._decoder.fused)
        try:
            few = not plan.told and len(plan.sampled_rows) < len(plan.ids)
            watch = partial(self._watch, plan.prefilled) if tell is not None and plan.prefilled else None
            hidden = self._decoder.hidden(plan, self._kv, plan.sampled_rows if few else None, watch)
        except BaseException:
            if self._mirror is not None:
                self._mirror.forget()
            raise
        if tell is not None:
            for index, rows in plan.told.items():
                tell(index, FinalStates(self._decoder, hidden[rows.start : rows.stop], most_told))
        return self._decoder.logits(hidden if few else hidden.index_select(0, plan.sampled_rows))

    def unload(self) -> None:
        """Give the weights and the KV pages back; idempotent."""
        self._decoder = self._kv = self._planner = self._account = self._graphs = self._mirror = self._settle = None
        self.adapters.clear()
        for each in self._layout.memories:
            each.weights_bytes = each.kv_bytes = 0
            memory.give_back(each.device)

    def _watch(self, prefilled: Sequence[range], states: Tensor) -> None:
        largest = torch.linalg.vector_norm(states, torch.inf, dim=-1)
        self.finite = torch.stack([largest[rows.start : rows.stop].amax() for rows in prefilled]).isfinite()

    def _native_problem(self, page_tokens: int) -> str:
        if self._decoder is None:
            return NO_CPU
        return native_obstacle(
            self._kernels,
            rotated_heads(self._decoder),
            dtype=self._dtype,
            devices=[each.device for each in self._layout.memories],
            page_tokens=page_tokens,
            bits=self._heads.bits,
        )

    def _native_attention(self, kv: KvPool) -> NativeAttention:
        library = self._kernels.library
        if self._decoder is None or library is None:
            raise RuntimeError("native attention was chosen without a model or its library")
        heads = [each.heads for each in rotated_heads(self._decoder)]
        attention = NativeAttention(library, heads, kv.layers, dtype=self._dtype, bits=self._heads.bits)
        self._decoder = replace(self._decoder, stack=stacked(self._decoder, library, attention))
        return attention

    def foresee(self, chunks: Sequence[ChunkInput]) -> None:
        """Count what a step of `chunks` takes among the working memory, and compute nothing. Raises StepOutOfMemory as
        `forward` does."""
        if self._decoder is None or self._planner is None or self._account is None:
            raise RuntimeError("a step can be foreseen for a loaded model with its KV pages allocated")
        self._enter(self._planner.plan(chunks), self._account, fused=self._decoder.fused)
        if self._mirror is not None:
            self._mirror.forget()

    def _enter(self, plan: StepPlan, account: StepAccount, *, fused: bool) -> int:
        kept_bytes = self._mirror.size_bytes if self._mirror is not None else 0
        return account.enter(plan, fused=fused, kept_bytes=kept_bytes)
