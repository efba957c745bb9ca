"""A mixture of experts in place of a block's MLP (Shazeer et al. 2017), as data. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from engine.backends.common.config_values import MAX_LAYERS, positive, refusal


@dataclass(frozen=True, slots=True)
class Experts:
    """Which layers have experts, and how these share their work.

    count: experts of a layer.  per_token: how many of them a token goes to.  inner: their intermediate size.
    normalised: whether the weights of a token's experts are made to add up to one.  shared_inner: intermediate size of
    one more expert that every token goes through, weighted by a gate of its own; 0 where there is none.
    """

    layers: tuple[bool, ...]
    count: int
    per_token: int
    inner: int
    normalised: bool = True
    shared_inner: int = 0


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a layer keeps its experts, relative to it; gate, up and down are relative to `expert.format(i)`."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


def expert_shapes(names: ExpertNames, experts: Experts, hidden: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The weights of a layer's mixture by their names in it, [out, in]; one at a time, as there may be any number."""
    yield names.router, (experts.count, hidden)
    stems: Iterator[tuple[str, int]] = ((names.expert.format(number), experts.inner) for number in range(experts.count))
    if experts.shared_inner:
        yield names.shared_gate, (1, hidden)
        stems = chain(stems, [(names.shared, experts.shared_inner)])
    for stem, inner in stems:
        yield f"{stem}.{names.gate}", (inner, hidden)
        yield f"{stem}.{names.up}", (inner, hidden)
        yield f"{stem}.{names.down}", (hidden, inner)


def mixture_elements(experts: Experts, hidden: int) -> int:
    """Weights of a layer's mixture: the sum over `expert_shapes`."""
    shared = hidden + 3 * hidden * experts.shared_inner if experts.shared_inner else 0
    return experts.count * (hidden + 3 * hidden * experts.inner) + shared


def idle_elements(experts: Experts, hidden: int) -> int:
    """Weights of a layer's experts that a token does not go through."""
    return (experts.count - experts.per_token) * 3 * hidden * experts.inner


def qwen_experts(raw: Mapping[str, object], layers: int, *, shared_inner: int = 0) -> Experts | None:
    """Qwen's rule: experts in every `decoder_sparse_step`th layer but those in `mlp_only_layers`."""
    step = positive(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers")
    dense_layers = {layer for layer in dense if isinstance(layer, int)} if isinstance(dense, list) else set()
    sparse = tuple((layer + 1) % step == 0 and layer not in dense_layers for layer in range(layers))
    if not any(sparse):
        return None
    count, per_token = expert_counts(raw)
    return Experts(
        layers=sparse,
        count=count,
        per_token=per_token,
        inner=positive(raw, "moe_intermediate_size"),
        normalised=bool(raw.get("norm_topk_prob", False)),
        shared_inner=shared_inner,
    )


def expert_counts(raw: Mapping[str, object]) -> tuple[int, int]:
    """Return how many experts a layer has, and to how many of them a token goes. transformers 5 writes
    `num_local_experts` for every family, older folders of Qwen's have `num_experts`."""
    count = positive(raw, "num_experts" if "num_experts" in raw else "num_local_experts", most=MAX_LAYERS)
    per_token = positive(raw, "num_experts_per_tok")
    if per_token > count:
        raise refusal(raw, "num_experts_per_tok", per_token, f"a layer has {count} experts")
    return count, per_token
