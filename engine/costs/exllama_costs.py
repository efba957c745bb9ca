"""What the exllamav2 backend holds of a model."""

from __future__ import annotations

from engine.backends.exllama import sizes as exllama
from engine.backends.exllama.sizes import PAGE_TOKENS
from engine.config import ModelSpec
from engine.costs.chosen import chosen_context
from engine.costs.values import DeviceKind, ModelCosts, Workload
from engine.facts import ModelFacts

_CHUNK_TOKENS = 2048


def exllama_costs(
    facts: ModelFacts, spec: ModelSpec, kind: DeviceKind, workload: Workload, dtype: str, identity: str
) -> ModelCosts:
    """Weights stay as the files pack them; the embedding stays in RAM, and a tied head is a copy of it."""
    context = chosen_context(facts, spec)
    main, draft = facts, facts.draft
    cache = _cache(main, spec)
    guessing = _cache(draft, spec) if draft is not None else None
    draft_bytes = 0 if draft is None else sum(part.packed_bytes for part in draft.parts.layers) + _end(draft)
    working = sum(_work(each, spec, context) for each in (main, draft) if each is not None)
    return ModelCosts(
        name=spec.name,
        identity=identity,
        backend="exllamav2",
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


def _work(facts: ModelFacts, spec: ModelSpec, context: int) -> int:
    return exllama.work_bytes(
        hidden_size=facts.shape.hidden_size,
        intermediate_size=facts.shape.intermediate_size,
        vocab_size=facts.shape.vocab_size,
        chunk_tokens=min(context, spec.kv_cache_tokens or _CHUNK_TOKENS, _CHUNK_TOKENS),
    )
