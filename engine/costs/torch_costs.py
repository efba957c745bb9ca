"""What the torch backend holds of a model."""

from __future__ import annotations

import sys

import msgspec

from engine.backends.torch.kv_format import HeadFormat, refuse_format
from engine.backends.torch.model_config import ModelConfig
from engine.backends.torch.quantised_size import (
    PACK_FLOAT32_MIN_ELEMENTS,
    halved_bytes,
    halved_head_bytes,
    head_bytes,
    keeps_halves,
    saved_bytes,
)
from engine.backends.torch.settings import draft_spec, with_num_experts
from engine.backends.torch.step_memory import graph_bytes, largest_step, step_bytes
from engine.config import ModelSpec
from engine.costs.chosen import chosen_context, chosen_dtype
from engine.costs.values import DeviceKind, ModelCosts, Workload
from engine.facts import ModelFacts

MAX_HEAD_COPY_BYTES = 256 << 20
"""Up to this size the torch backend packs a tied head for the CPU as a copy of the embedding."""

RUNTIME_BYTES: dict[DeviceKind, int] = {"cpu": 256 << 20, "cuda": 512 << 20, "simulated": 0}
"""A worker's process besides its model. CPU: Python, torch and oneDNN, as measured on Linux. CUDA: the context, loaded
kernels and cuBLAS's workspace. A simulated device holds what the worker allocates for its model alone; the rest is
counted where the process is (ModelCosts.host_process_bytes)."""

WORKERS_SHARE_WEIGHTS = sys.platform == "linux"
"""Whether workers that compute on a CPU hold the weights of a model once for all of them."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def torch_costs(
    facts: ModelFacts, spec: ModelSpec, kind: DeviceKind, workload: Workload, dtype: str, identity: str
) -> ModelCosts:
    """What the model takes, and all of its draft model where the first layer is."""
    main = _alone(facts, spec, kind, workload, dtype, identity)
    if facts.draft is None:
        return main
    guessing = draft_spec(spec)
    draft_dtype = chosen_dtype(facts.draft, guessing, kind, bfloat16=dtype == "bfloat16")
    draft = _alone(facts.draft, guessing, kind, workload, draft_dtype, identity)
    return msgspec.structs.replace(
        main,
        first_bytes=main.first_bytes + draft.weights_bytes,
        first_page_bytes=draft.layers * draft.page_bytes,
        device_page_bytes=main.device_page_bytes + draft.device_page_bytes,
        working_bytes=max(main.working_bytes, draft.head_working_bytes),
        head_working_bytes=max(main.head_working_bytes, draft.head_working_bytes),
    )


def _alone(
    facts: ModelFacts, spec: ModelSpec, kind: DeviceKind, workload: Workload, dtype: str, identity: str
) -> ModelCosts:
    """Weights are plain numbers of one dtype, those of linear layers in fewer bits where that is asked for. On a CPU
    the pages are gathered, layer by layer, into a buffer."""
    shape, parts, item = with_num_experts(facts.shape, spec.num_experts), facts.parts, _ITEM_BYTES[dtype]
    context = chosen_context(facts, spec)
    refuse_format(shape.head_dim, spec.cache_bits)
    heads = HeadFormat(shape.head_dim, spec.cache_bits, item)
    halves = kind == "cpu" and keeps_halves(spec, dtype, shape.checkpoint_dtype)
    gathers = kind != "cuda" or spec.attention == "gathered" or heads.coded
    page_heads = 2 * shape.kv_heads * workload.page_tokens
    first, last, joined = _ends_bytes(facts, spec, shape, kind, item, halves=halves)
    working, head_working = _working_bytes(shape, workload, context, heads, gathers=gathers)
    return ModelCosts(
        name=spec.name,
        identity=identity,
        backend="torch",
        dtype=dtype,
        kind=kind,
        cache_bits=spec.cache_bits,
        context_tokens=context,
        page_tokens=workload.page_tokens,
        weights=spec.weights,
        layer_bytes=tuple(
            max(0, item * layer.elements - _saved_bytes(shape, number, spec, item, halves=halves))
            for number, layer in enumerate(parts.layers)
        ),
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


def _saved_bytes(shape: ModelConfig, layer: int, spec: ModelSpec, item: int, *, halves: bool) -> int:
    return halved_bytes(shape, layer) if halves else saved_bytes(shape, layer, spec.weights, item)


def _ends_bytes(
    facts: ModelFacts, spec: ModelSpec, shape: ModelConfig, kind: DeviceKind, item: int, *, halves: bool
) -> tuple[int, int, int]:
    """What goes with the first layer and with the last, and what of that is one thing where both lie together."""
    parts, quantised = facts.parts, spec.weights != "auto"
    embedding = item * parts.embedding.elements
    head = embedding if facts.tied else item * parts.head.elements
    copied = quantised or (
        kind == "cpu"
        and embedding <= MAX_HEAD_COPY_BYTES
        and (item < _ITEM_BYTES["float32"] or parts.embedding.elements >= PACK_FLOAT32_MIN_ELEMENTS)
    )
    if halves and (copied or not facts.tied):
        head -= halved_head_bytes(shape)
    return (
        embedding + facts.adapter_bytes,
        (head_bytes(shape) if quantised else head) + item * parts.norm.elements,
        embedding if facts.tied and not copied else 0,
    )


def _working_bytes(
    shape: ModelConfig, workload: Workload, context: int, heads: HeadFormat, *, gathers: bool
) -> tuple[int, int]:
    """What the largest step takes on a device without the head, and on the one that has it."""
    steps = largest_step(
        step_tokens=workload.step_tokens,
        max_prompts=workload.max_prompts,
        context=context,
        page_tokens=workload.page_tokens,
    )
    masks = workload.step_tokens * context * (heads.itemsize + 1) if gathers else 0
    without, with_head = (masks + step_bytes(shape, steps, heads, layers=True, head=head) for head in (False, True))
    if not gathers and shape.traits.experts is None:  # decodes are recorded
        with_head += graph_bytes(shape, workload.max_prompts, heads.itemsize)
    return without, with_head
