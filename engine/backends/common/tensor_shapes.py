"""Shapes of a model's tensors, by their names in its checkpoint, from its config. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from engine.backends.common.families import architectures
from engine.backends.common.families.base import TensorNames
from engine.backends.common.families.experts import expert_shapes
from engine.backends.common.model_config import ModelConfig

_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
"""Prefixes of a multimodal model's language model in new and old versions of transformers, and those of a text-only
model."""


def language_model_name(name: str) -> str | None:
    """Return the name that a multimodal checkpoint's tensor has in one of its language model; None where it is none of
    that, or has that name already."""
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return None


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model, or of a shard of it, by its name in the checkpoint."""
    return dict(iterate_shapes(config))


def iterate_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the same, one at a time: a file may name any number of layers, heads and experts."""
    names = architectures()[config.architecture].names
    yield f"{names.embedding}.weight", (len(config.vocab_rows), config.hidden_size)
    yield from norm_shapes(config, names.final_norm).items()
    if not config.tie_embeddings:
        yield f"{names.head}.weight", (len(config.vocab_rows), config.hidden_size)
    for layer in range(config.layers):
        prefix = names.layer.format(layer)
        for name, shape in _iterate_block(config, names, layer):
            yield f"{prefix}.{name}", shape


def norm_shapes(config: ModelConfig, name: str, width: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a norm over `width` elements, by default the hidden size; none without a name."""
    kinds = ("weight", "bias") if config.traits.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": (width or config.hidden_size,) for kind in kinds if name}


def block_shapes(config: ModelConfig, names: TensorNames, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer's tensors, by their names in it."""
    return dict(_iterate_block(config, names, layer))


def _iterate_block(config: ModelConfig, names: TensorNames, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    traits, hidden, inner = config.traits, config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = _merge_unnamed((names.q, queries), (names.k, keys), (names.v, keys))
    linears = [
        *((name, rows, hidden, traits.qkv_bias) for name, rows in qkv),
        (names.o, hidden, queries, traits.o_bias),
    ]
    experts = traits.experts_of(layer)
    if experts is None:
        gate_up = _merge_unnamed((names.gate, inner), (names.up, inner))
        linears += [(name, rows, hidden, traits.mlp_bias) for name, rows in gate_up]
        linears.append((names.down, hidden, inner, traits.mlp_bias))
    yield from _iterate_norms(config, names)
    for name, rows, columns, has_bias in linears:
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)
    if experts is not None:
        for name, shape in expert_shapes(names.experts, experts, hidden):
            yield f"{name}.weight", shape


def _iterate_norms(config: ModelConfig, names: TensorNames) -> Iterator[tuple[str, tuple[int, ...]]]:
    rows = [names.input_norm, names.attention_out_norm, names.mlp_out_norm]
    rows += [] if config.traits.parallel else [names.mlp_norm]
    for each in rows:
        yield from norm_shapes(config, each).items()
    for name, heads in ((names.q_norm, config.heads), (names.k_norm, config.kv_heads)):
        match config.traits.qk_norm:
            case "head":
                yield f"{name}.weight", (config.head_dim,)
            case "projection":
                yield from norm_shapes(config, name, heads * config.head_dim).items()
            case "each_head":
                for head in range(heads):
                    yield f"{name}.norms.{head}.weight", (config.head_dim,)


def _merge_unnamed(*parts: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """Yield names and rows of tensors, adding parts without a name to the one before."""
    for index, (name, _) in enumerate(parts):
        if name:
            unnamed = itertools.takewhile(lambda part: not part[0], parts[index + 1 :])
            yield name, parts[index][1] + sum(rows for _, rows in unnamed)
