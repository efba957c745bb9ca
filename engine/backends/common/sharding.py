"""Tensor parallelism (Shoeybi et al. 2019): which part of each tensor a rank has. No torch here.

Queries, keys, values, gates and what they gate are split by their outputs, a head being whole; the layers after them by
their inputs, so that the ranks' products are summed up. Embedding and head are split by tokens. Norms, routers and the
biases of summed products are not split. Ranks that are more than the key heads have the same one in groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.backends.common.families import architectures
from engine.backends.common.families.experts import Experts
from engine.backends.common.model_config import ModelConfig, Shard
from engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Ranges of a tensor along one of its dimensions, in order."""

    dim: int
    ranges: tuple[range, ...]

    @property
    def length(self) -> int:
        """The size of the part along its dimension."""
        return sum(map(len, self.ranges))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the shape of what one rank computes of each layer. Raises InvalidRequest where the ranks cannot share the
    model evenly."""
    if shard.size == 1:
        return config
    _refuse_uneven(config, shard.size)
    traits, size = config.traits, shard.size
    if traits.experts is not None:
        experts = replace(
            traits.experts, inner=traits.experts.inner // size, shared_inner=traits.experts.shared_inner // size
        )
        traits = replace(traits, experts=experts)
    return replace(
        config,
        traits=traits,
        heads=config.heads // size,
        kv_heads=max(1, config.kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        shard=replace(shard, first_kv_head=_first_kv_head(config, shard)),
    )


def tensor_parts(config: ModelConfig, shard: Shard) -> Mapping[str, TensorPart]:
    """Return the part of each split tensor of a model that a rank has, by the tensor's name in the checkpoint; the
    others it has whole. config: of all of the model."""
    return {} if shard.size == 1 else dict(_parts(config, shard))


def _parts(config: ModelConfig, shard: Shard) -> Iterator[tuple[str, TensorPart]]:
    names, experts = architectures()[config.architecture].names, config.traits.experts
    vocabulary = TensorPart(0, (replace(config, shard=shard).vocab_rows,))
    yield f"{names.embedding}.weight", vocabulary
    yield f"{names.head}.weight", vocabulary
    queries, keys = _rows_of_heads(config, shard)
    width, key_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    inner = _slice(config.intermediate_size, shard)
    qkv = ((names.q, width, queries), (names.k, key_width, keys), (names.v, key_width, keys))
    gate_up = ((names.gate, config.intermediate_size, inner), (names.up, config.intermediate_size, inner))
    for layer in range(config.layers):
        prefix = names.layer.format(layer)
        mixture = config.traits.experts_of(layer)
        for name, part in _outputs(*qkv, *(gate_up if mixture is None else ())):
            yield f"{prefix}.{name}.weight", part
            yield f"{prefix}.{name}.bias", part
        yield f"{prefix}.{names.o}.weight", TensorPart(1, (queries,))
        if config.traits.qk_norm == "projection":
            yield f"{prefix}.{names.q_norm}.weight", TensorPart(0, (queries,))
            yield f"{prefix}.{names.k_norm}.weight", TensorPart(0, (keys,))
        if mixture is None:
            yield f"{prefix}.{names.down}.weight", TensorPart(1, (inner,))
    if experts is None:
        return
    own = names.experts
    stems = [(own.expert.format(number), experts.inner) for number in range(experts.count)]
    stems += [(own.shared, experts.shared_inner)] if experts.shared_inner else []
    for layer in range(config.layers):
        prefix = names.layer.format(layer)
        for stem, size in stems if config.traits.experts_of(layer) is not None else ():
            for name in (own.gate, own.up):
                yield f"{prefix}.{stem}.{name}.weight", TensorPart(0, (_slice(size, shard),))
            yield f"{prefix}.{stem}.{own.down}.weight", TensorPart(1, (_slice(size, shard),))


def _outputs(*parts: tuple[str, int, range]) -> Iterator[tuple[str, TensorPart]]:
    """Yield the rows of each tensor that has a name, of those that follow without one too. parts: name, rows, and the
    range of these."""
    grouped: dict[str, list[range]] = {}
    name, before = "", 0
    for own_name, rows, wanted in parts:
        name, before = (own_name, 0) if own_name else (name, before)
        grouped.setdefault(name, []).append(range(before + wanted.start, before + wanted.stop))
        before += rows
    for each, ranges in grouped.items():
        yield each, TensorPart(0, tuple(ranges))


def _rows_of_heads(config: ModelConfig, shard: Shard) -> tuple[range, range]:
    """Return the rows of a rank's query heads and of its key heads."""
    keys = max(1, config.kv_heads // shard.size)
    first = _first_kv_head(config, shard)
    return (
        _slice(config.heads * config.head_dim, shard),
        range(first * config.head_dim, (first + keys) * config.head_dim),
    )


def _first_kv_head(config: ModelConfig, shard: Shard) -> int:
    return shard.rank * config.kv_heads // shard.size


def _slice(length: int, shard: Shard) -> range:
    each = length // shard.size
    return range(shard.rank * each, (shard.rank + 1) * each)


def _refuse_uneven(config: ModelConfig, size: int) -> None:
    traits = config.traits
    uneven: list[tuple[str, int, bool]] = [
        ("attention heads", config.heads, config.heads % size != 0),
        ("key-value heads", config.kv_heads, config.kv_heads % size != 0 and size % config.kv_heads != 0),
        *((name, length, length % size != 0) for name, length in _inner_sizes(config, traits.experts)),
        ("tokens in its vocabulary", config.vocab_size, config.vocab_size < size * size),
    ]
    for what, number, is_uneven in uneven:
        if is_uneven:
            raise InvalidRequest(
                f"tensor_parallel_size is {size}; this model has {number} {what}, which {size} ranks cannot share "
                "evenly",
                param="tensor_parallel_size",
                value=size,
            )


def _inner_sizes(config: ModelConfig, experts: Experts | None) -> Sequence[tuple[str, int]]:
    plain = experts is None or not all(experts.layers)
    sizes = [("neurons in an MLP", config.intermediate_size)] if plain else []
    if experts is not None:
        sizes += [("neurons in an expert", experts.inner), ("neurons in the shared expert", experts.shared_inner)]
    return sizes
