"""Memory that a model takes of each device: weights, KV pages, working memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from engine.backends.common import exllama_memory as exllama
from engine.backends.common.exllama_memory import PAGE_TOKENS
from engine.backends.common.families import architectures
from engine.backends.common.gguf_codes import SLAB_BYTES, CodedSizes, computes_from_codes
from engine.backends.common.kv_format import TYPICAL_TOKENS, HeadFormat, refuse_format
from engine.backends.common.model_config import ModelConfig, Shard
from engine.backends.common.packed_weights import (
    MAX_HEAD_COPY_BYTES,
    PACK_FLOAT32_MIN_ELEMENTS,
    fp16_saved_bytes,
    fp16_saved_head_bytes,
    head_bytes,
    keeps_float16,
    saved_bytes,
)
from engine.backends.common.sharding import shard_config
from engine.backends.common.step_memory import (
    MULTIPROCESSORS,
    graph_bytes,
    largest_step,
    max_answer_rows,
    max_recorded_rows,
    split_keys_bytes,
    step_bytes,
)
from engine.backends.common.tensor_shapes import block_shapes
from engine.backends.common.torch_load_settings import draft_spec, with_num_experts
from engine.config import BackendKind, CacheBits, DeviceShare, ModelSpec, WeightsName
from engine.models.inspect import ModelParts, Part
from engine.placement.model_facts import ModelFacts

DeviceKind = Literal["cpu", "cuda", "simulated"]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Work that a worker has to be able to do at once; the fields are EngineConfig's."""

    max_prompts: int = 16
    step_tokens: int = 512
    page_tokens: int = 16
    max_models: int = 0


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """Correction by earlier loads: weights are multiplied by a factor, working memory on each device has bytes added.

    loads: how many they were.
    """

    weights_factor: float = 1.0
    working_bytes: int = 0
    loads: int = 0


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one worker takes. A worker is its layers in order, adjacent ones on a device.

    identity: of what was counted; the same for the same files held in the same way.
    first_bytes, last_bytes: what goes with the first and with the last layer.  joined_bytes: of these, what is held
    once where both lie on the same device (a tied head).
    page_bytes: a KV page of page_tokens, in one layer.  device_page_bytes: what it takes besides on each device, and
    first_page_bytes on the first.
    working_bytes: on each device, for steps and the runtime.  head_working_bytes: on the last instead.
    unseen_bytes: of these, what LoadedModel.shares says nothing of.
    shares_weights: whether workers on one device hold them once.
    host_process_bytes: RAM of the machine for each worker's process, where the devices are simulated and so all that
    it holds is in RAM too; 0 elsewhere.  host_shares_weights: whether workers of one machine hold them once there.
    ranks: of tensor parallelism that a worker has; 1 for whole layers. Each has a part of every layer on a device of
    its own, which all of these are of; on a CPU, which they share, of all ranks.
    correction: by which all of these are corrected already.
    """

    name: str
    identity: str
    backend: BackendKind
    dtype: str
    kind: DeviceKind
    cache_bits: CacheBits
    context_tokens: int
    page_tokens: int
    layer_bytes: tuple[int, ...]
    first_bytes: int = 0
    last_bytes: int = 0
    joined_bytes: int = 0
    page_bytes: int = 0
    device_page_bytes: int = 0
    first_page_bytes: int = 0
    working_bytes: int = 0
    head_working_bytes: int = 0
    unseen_bytes: int = 0
    shares_weights: bool = False
    host_process_bytes: int = 0
    host_shares_weights: bool = False
    weights: WeightsName = "auto"
    ranks: int = 1
    correction: Correction = Correction()

    @property
    def num_devices(self) -> int:
        """Devices that each worker takes, where layers are split within themselves."""
        return 1 if self.kind == "cpu" else self.ranks

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.layer_bytes)

    @property
    def weights_bytes(self) -> int:
        """Of a worker that lies on one device."""
        return self.weights_of(0, self.layers)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers, rounded up."""
        return -(-self.layers * self.page_bytes // self.page_tokens)

    def pages(self, tokens: int) -> int:
        """Return the KV pages that hold these tokens."""
        return -(-tokens // self.page_tokens)

    def weights_of(self, start: int, stop: int) -> int:
        """Weights of layers [start, stop) and what goes with them."""
        first, last = start == 0, stop == self.layers
        ends = self.first_bytes * first + self.last_bytes * last - self.joined_bytes * (first and last)
        return sum(self.layer_bytes[start:stop]) + ends

    def share(self, device: str, start: int, stop: int, pages: int) -> DeviceShare:
        """Return the share of layers [start, stop) on `device`, with `pages` KV pages."""
        first, last = start == 0, stop == self.layers
        working = self.head_working_bytes if last else self.working_bytes
        weights = self.weights_of(start, stop)
        return DeviceShare(
            device=device,
            layers=stop - start,
            ranks=self.ranks,
            weights_bytes=weights,
            shared_bytes=weights if self.shares_weights or self.host_shares_weights else 0,
            kv_bytes=pages * ((stop - start) * self.page_bytes + self.first_page_bytes * first),
            working_bytes=working + pages * self.device_page_bytes,
        )


def device_kind(device: str) -> DeviceKind:
    """The kind of the device of that name, as in DeviceShare.device."""
    return "cpu" if device == "cpu" else "simulated" if device.startswith("sim") else "cuda"


def apply_correction(costs: ModelCosts, by: Correction) -> ModelCosts:
    """The costs as earlier loads bear them out."""

    def weigh(size_bytes: int) -> int:
        return int(size_bytes * by.weights_factor)

    return msgspec.structs.replace(
        costs,
        layer_bytes=tuple(map(weigh, costs.layer_bytes)),
        first_bytes=weigh(costs.first_bytes),
        last_bytes=weigh(costs.last_bytes),
        joined_bytes=weigh(costs.joined_bytes),
        working_bytes=max(0, costs.working_bytes + by.working_bytes),
        head_working_bytes=max(0, costs.head_working_bytes + by.working_bytes),
        correction=by,
    )


# What a backend chooses where the settings leave it open.


def default_context(facts: ModelFacts, spec: ModelSpec) -> int:
    """As asked for, else the model's own, stretched as asked."""
    stretch = (spec.alpha_value or 1.0) * (spec.compress_pos_emb or 1.0)
    return spec.max_model_len or int(facts.shape.max_model_len * stretch) or TYPICAL_TOKENS


def default_dtype(facts: ModelFacts, spec: ModelSpec, kind: DeviceKind, bfloat16: bool) -> str:
    """As the backend chooses it: what is stored on CUDA, on a CPU bfloat16 or else float32."""
    if facts.backend != "torch":
        return "float16"
    if spec.dtype != "auto":
        return spec.dtype
    if kind == "cuda":
        return facts.stored_dtype
    return "bfloat16" if bfloat16 else "float32"


# What the backends over the ExLlama libraries hold of a model.

_CHUNK_TOKENS = 2048


def exllama_costs(
    facts: ModelFacts, spec: ModelSpec, kind: DeviceKind, workload: Workload, dtype: str, identity: str
) -> ModelCosts:
    """Weights stay as the files pack them; the embedding stays in RAM, and a tied head is a copy of it. exllamav3 has
    an attention of its own."""
    context = default_context(facts, spec)
    main, draft = facts, facts.draft
    cache = _cache(main, spec)
    guessing = _cache(draft, spec) if draft is not None else None
    draft_bytes = 0 if draft is None else sum(part.packed_bytes for part in draft.parts.layers) + _end(draft)
    uses_triton = facts.backend == "exllamav2" and spec.attention in ("auto", "triton")
    models = [main] if draft is None else [main, draft]
    working = sum(_work(each, spec, context, uses_triton=uses_triton) for each in models)
    return ModelCosts(
        name=spec.name,
        identity=identity,
        backend=facts.backend,
        dtype=dtype,
        kind=kind,
        cache_bits=spec.cache_bits,
        context_tokens=context,
        page_tokens=PAGE_TOKENS,
        layer_bytes=tuple(layer.packed_bytes for layer in main.parts.layers),
        first_bytes=draft_bytes + main.adapter_bytes,
        last_bytes=_end(main),
        page_bytes=cache.layer_page_bytes,
        device_page_bytes=cache.unpacked_page_bytes,
        first_page_bytes=guessing.page_bytes + guessing.unpacked_page_bytes if guessing is not None else 0,
        working_bytes=working,
        head_working_bytes=working,
    )


def _cache(facts: ModelFacts, spec: ModelSpec) -> exllama.CacheShape:
    return exllama.CacheShape(facts.shape.layers, facts.shape.kv_heads, facts.shape.head_dim, spec.cache_bits)


def _end(facts: ModelFacts) -> int:
    """Final norm and head."""
    head = 2 * facts.parts.embedding.elements if facts.tied else facts.parts.head.packed_bytes
    return head + facts.parts.norm.packed_bytes


def _work(facts: ModelFacts, spec: ModelSpec, context: int, *, uses_triton: bool) -> int:
    return exllama.work_bytes(
        hidden_size=facts.shape.hidden_size,
        intermediate_size=facts.shape.intermediate_size,
        vocab_size=facts.shape.vocab_size,
        chunk_tokens=min(context, spec.kv_cache_tokens or _CHUNK_TOKENS, _CHUNK_TOKENS),
        triton_head_dim=facts.shape.head_dim if uses_triton else 0,
    )


# What the torch backend holds of a model.

RUNTIME_BYTES: dict[DeviceKind, int] = {"cpu": 256 << 20, "cuda": 512 << 20, "simulated": 0}
"""A worker's process besides its model. CPU: Python, torch and oneDNN, as measured on Linux. CUDA: the context, loaded
kernels and cuBLAS's workspace. A simulated device holds what the worker allocates for its model alone; the rest is
counted where the process is (ModelCosts.host_process_bytes)."""

WORKERS_SHARE_WEIGHTS = sys.platform == "linux"
"""Whether workers that compute on a CPU hold the weights of a model once for all of them."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def torch_costs(
    facts: ModelFacts,
    spec: ModelSpec,
    kind: DeviceKind,
    workload: Workload,
    dtype: str,
    identity: str,
    *,
    processors: int = MULTIPROCESSORS,
) -> ModelCosts:
    """Return the costs of a model, with all of its draft model where the first layer is."""
    answer_rows = max_answer_rows(spec, workload.max_prompts)
    workload = msgspec.structs.replace(workload, max_prompts=answer_rows)
    main = _alone(facts, spec, kind, workload, dtype, identity, processors)
    if facts.draft is None:
        return main
    guessing = draft_spec(spec)
    draft_dtype = default_dtype(facts.draft, guessing, kind, bfloat16=dtype == "bfloat16")
    draft = _alone(facts.draft, guessing, kind, workload, draft_dtype, identity, processors)
    return msgspec.structs.replace(
        main,
        first_bytes=main.first_bytes + draft.weights_bytes,
        first_page_bytes=draft.layers * draft.page_bytes,
        device_page_bytes=main.device_page_bytes + draft.device_page_bytes,
        working_bytes=max(main.working_bytes, draft.head_working_bytes),
        head_working_bytes=max(main.head_working_bytes, draft.head_working_bytes),
    )


def _alone(
    facts: ModelFacts,
    spec: ModelSpec,
    kind: DeviceKind,
    workload: Workload,
    dtype: str,
    identity: str,
    processors: int,
) -> ModelCosts:
    """Weights are plain numbers of one dtype, those of linear layers in fewer bits where that is asked for. On a CPU
    the pages are gathered, layer by layer, into a buffer."""
    ranks, item = spec.tensor_parallel_size, _ITEM_BYTES[dtype]
    shape = shard_config(with_num_experts(facts.shape, spec.num_experts), Shard(0, ranks))
    facts = facts if ranks == 1 else msgspec.structs.replace(facts, parts=_parts_of_rank(facts.parts, shape))
    context = default_context(facts, spec)
    refuse_format(shape.head_dim, spec.cache_bits)
    heads = HeadFormat(shape.head_dim, spec.cache_bits, item)
    halves = kind == "cpu" and keeps_float16(spec, dtype, shape.checkpoint_dtype)
    gathers = kind != "cuda" or spec.attention == "gathered" or heads.is_quantised
    page_heads = 2 * shape.kv_heads * workload.page_tokens
    codes = _coded(facts, spec, kind, dtype)
    first, last, joined = _ends_bytes(facts, spec, shape, kind, item, codes, halves=halves)
    records = kind == "cuda" and spec.attention != "gathered"
    working, head_working = _working_bytes(shape, workload, context, heads, gathers=gathers, records=records)
    if kind == "cuda" and spec.attention in ("auto", "triton"):  # recorded steps run on a stream of their own
        split = split_keys_bytes(shape.head_dim, processors)
        working, head_working = working + split, head_working + (1 + records) * split
    if kind == "cuda" and codes is not None:  # of a step; decodes of many rows that are recorded have their own
        working, head_working = working + SLAB_BYTES, head_working + 2 * SLAB_BYTES
    costs = ModelCosts(
        name=spec.name,
        identity=identity,
        backend="torch",
        dtype=dtype,
        kind=kind,
        cache_bits=spec.cache_bits,
        context_tokens=context,
        page_tokens=workload.page_tokens,
        weights=spec.weights,
        ranks=ranks,
        layer_bytes=_layer_bytes(facts, spec, shape, item, codes, halves=halves),
        first_bytes=first,
        last_bytes=last,
        joined_bytes=joined,
        page_bytes=page_heads * heads.head_bytes,
        device_page_bytes=page_heads * heads.copied_bytes if gathers else 0,
        shares_weights=kind == "cpu" and WORKERS_SHARE_WEIGHTS and not halves,
        host_process_bytes=RUNTIME_BYTES["cpu"] if kind == "simulated" else 0,
        host_shares_weights=kind == "simulated" and WORKERS_SHARE_WEIGHTS,
        working_bytes=RUNTIME_BYTES[kind] + working,
        head_working_bytes=RUNTIME_BYTES[kind] + head_working,
        unseen_bytes=RUNTIME_BYTES[kind],
    )
    return costs if kind != "cpu" or ranks == 1 else _of_all_ranks(costs)


def _of_all_ranks(costs: ModelCosts) -> ModelCosts:
    """Return the costs of ranks that share a device, from those of one."""
    sizes = ("first_bytes", "last_bytes", "joined_bytes", "page_bytes", "device_page_bytes", "working_bytes")
    return msgspec.structs.replace(
        costs,
        layer_bytes=tuple(costs.ranks * size for size in costs.layer_bytes),
        **{name: costs.ranks * getattr(costs, name) for name in (*sizes, "head_working_bytes", "unseen_bytes")},
    )


def _parts_of_rank(parts: ModelParts, shape: ModelConfig) -> ModelParts:
    """Return the parts of a model of which rank 0 has `shape`, which has the most."""
    names = architectures()[shape.architecture].names
    ends = Part(elements=len(shape.vocab_rows) * shape.hidden_size)
    layers = (sum(map(math.prod, block_shapes(shape, names, layer).values())) for layer in range(shape.layers))
    return msgspec.structs.replace(
        parts,
        embedding=ends,
        head=ends if parts.head.elements else parts.head,
        layers=tuple(
            Part(elements=elements, packed_bytes=part.packed_bytes // shape.shard.size)
            for elements, part in zip(layers, parts.layers, strict=True)
        ),
    )


def _coded(facts: ModelFacts, spec: ModelSpec, kind: DeviceKind, dtype: str) -> CodedSizes | None:
    """Sizes of weights computed from a GGUF file's codes."""
    if kind == "cuda":
        return facts.cuda_codes if computes_from_codes(spec, "cuda", dtype=dtype) else None
    return facts.codes if kind == "cpu" and computes_from_codes(spec) else None


def _layer_bytes(
    facts: ModelFacts, spec: ModelSpec, shape: ModelConfig, item: int, coded: CodedSizes | None, *, halves: bool
) -> tuple[int, ...]:
    def saved(layer: int) -> int:
        if coded is not None:
            return coded.saved_bytes(layer, item)
        return fp16_saved_bytes(shape, layer) if halves else saved_bytes(shape, layer, spec.weights, item)

    return tuple(max(0, item * part.elements - saved(layer)) for layer, part in enumerate(facts.parts.layers))


def _ends_bytes(
    facts: ModelFacts,
    spec: ModelSpec,
    shape: ModelConfig,
    kind: DeviceKind,
    item: int,
    codes: CodedSizes | None,
    *,
    halves: bool,
) -> tuple[int, int, int]:
    """Return the bytes that go with the first layer and with the last, and those of both that are the same tensor."""
    parts, quantised = facts.parts, spec.weights != "auto"
    embedding = item * parts.embedding.elements
    head = embedding if facts.tied else item * parts.head.elements
    copied = quantised or (
        kind == "cpu"
        and embedding <= MAX_HEAD_COPY_BYTES
        and (item < _ITEM_BYTES["float32"] or parts.embedding.elements >= PACK_FLOAT32_MIN_ELEMENTS)
    )
    if halves and (copied or not facts.tied):
        head -= fp16_saved_head_bytes(shape)
    used = head_bytes(shape) if quantised else head
    if codes is not None and codes.embedding_bytes is not None:
        embedding, copied = codes.embedding_bytes, False
    if codes is not None and codes.head_bytes is not None:
        used = codes.head_bytes
    return (
        embedding + facts.adapter_bytes,
        used + item * parts.norm.elements,
        embedding if facts.tied and not copied else 0,
    )


def _working_bytes(
    shape: ModelConfig, workload: Workload, context: int, heads: HeadFormat, *, gathers: bool, records: bool
) -> tuple[int, int]:
    """Return the bytes of the largest step on a device without the head, and on the one that has it. records: steps of
    few tokens are recorded."""
    steps = largest_step(
        step_tokens=workload.step_tokens,
        max_prompts=workload.max_prompts,
        context=context,
        page_tokens=workload.page_tokens,
    )
    masks = workload.step_tokens * context * (heads.itemsize + 1) if gathers else 0
    without, with_head = (masks + step_bytes(shape, steps, heads, layers=True, head=head) for head in (False, True))
    if records:
        rows = max_recorded_rows(workload.max_prompts, workload.step_tokens)
        without += graph_bytes(shape, rows, 0, heads.itemsize, workload.page_tokens)
        with_head += graph_bytes(shape, rows, workload.max_prompts, heads.itemsize, workload.page_tokens)
    return without, with_head


# From what a folder says of a model to what it takes of a device.


def costs_of(
    facts: ModelFacts,
    spec: ModelSpec,
    kind: DeviceKind,
    workload: Workload,
    *,
    bfloat16: bool,
    correct: Callable[[str], Correction] = lambda identity: Correction(),
    processors: int = MULTIPROCESSORS,
) -> ModelCosts:
    """Return the costs of `facts` on devices of `kind`. bfloat16: whether a CPU computes in it if nothing else is asked
    for.

    correct: the correction by earlier loads of that identity.  processors: multiprocessors of the largest GPU.
    """
    dtype = default_dtype(facts, spec, kind, bfloat16)
    weights = "codes" if _coded(facts, spec, kind, dtype) else spec.weights
    ranks = (f"{spec.tensor_parallel_size} ranks",) if spec.tensor_parallel_size > 1 else ()
    fields = (str(facts.path), facts.stamp, facts.backend, dtype, weights, str(spec.cache_bits), kind, *ranks)
    draft = () if facts.draft is None else (str(facts.draft.path), facts.draft.stamp)
    identity = "|".join((*fields, *draft))
    bill = partial(torch_costs, processors=processors) if facts.backend == "torch" else exllama_costs
    return apply_correction(bill(facts, spec, kind, workload, dtype, identity), correct(identity))
