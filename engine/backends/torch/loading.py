"""From a checkpoint to a decoder, one tensor at a time: memory peaks at about the size of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backends.torch.archs import ARCHITECTURES
from engine.backends.torch.archs.base import TensorNames
from engine.backends.torch.checkpoint import Checkpoint
from engine.backends.torch.linear import Linear, LinearFactory, PackedLinear
from engine.backends.torch.model import Block, Decoder
from engine.backends.torch.model_config import ModelConfig
from engine.backends.torch.quant.weight import is_quantised, method_of
from engine.backends.torch.rope import RotaryEmbedding
from engine.backends.torch.weights import WeightReader

MAX_HEAD_COPY_BYTES = 256 << 20
"""A tied head is packed as a second copy of the embedding up to this size; a larger one is used as it lies."""


def as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """`config` as the weights bear it out.

    Quantised weights are float16 once read, whatever config.json says of the model that they were made from, and the
    head is quantised by itself even where that model tied it to the embedding.
    """
    if not is_quantised(checkpoint):
        return config
    head = ARCHITECTURES[config.architecture].names.head
    tied = config.tie_embeddings and method_of(checkpoint, head) is None
    return replace(config, tie_embeddings=tied, checkpoint_dtype="float16")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of `config` is made of, by its name in the checkpoint."""
    names = ARCHITECTURES[config.architecture].names
    shapes = {
        f"{names.embedding}.weight": (config.vocab_size, config.hidden_size),
        f"{names.final_norm}.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.layers):
        prefix = names.layer.format(layer)
        shapes |= {f"{prefix}.{name}": shape for name, shape in _block_shapes(config, names).items()}
    return shapes


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the weights take once loaded as `dtype`, a packed copy of a tied head not counted."""
    return dtype.itemsize * sum(math.prod(shape) for shape in tensor_shapes(config).values())


def _block_shapes(config: ModelConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    traits, hidden, inner = config.traits, config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = (
        (names.q, queries, hidden, traits.qkv_bias),
        (names.k, keys, hidden, traits.qkv_bias),
        (names.v, keys, hidden, traits.qkv_bias),
        (names.o, hidden, queries, traits.o_bias),
        (names.gate, inner, hidden, traits.mlp_bias),
        (names.up, inner, hidden, traits.mlp_bias),
        (names.down, hidden, inner, traits.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.input_norm}.weight": (hidden,),
        f"{names.mlp_norm}.weight": (hidden,),
    }
    for name, rows, columns, has_bias in linears:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if traits.qk_norm:
        shapes[f"{names.q_norm}.weight"] = (config.head_dim,)
        shapes[f"{names.k_norm}.weight"] = (config.head_dim,)
    return shapes


@dataclass(frozen=True, slots=True)
class DecoderLoader:
    """Builds a decoder of `config` from what `reader` reads, its linear layers made by `linears`."""

    config: ModelConfig
    reader: WeightReader
    linears: LinearFactory
    device: torch.device

    def load(self) -> Decoder:
        """Read everything. Raises ModelLoadFailed or LoadCancelled."""
        names = ARCHITECTURES[self.config.architecture].names
        embedding = self.reader.read(f"{names.embedding}.weight")
        blocks = tuple(self._block(layer, names) for layer in range(self.config.layers))
        final_norm = self.reader.read(f"{names.final_norm}.weight")
        head = self._head(embedding, names)
        copied_bytes = embedding.nbytes if self.config.tie_embeddings and isinstance(head, PackedLinear) else 0
        return Decoder(
            config=self.config,
            embedding=embedding,
            blocks=blocks,
            final_norm=final_norm,
            head=head,
            rope=RotaryEmbedding(self.config.rope, self.config.head_dim, self.device),
            weights_bytes=weights_bytes(self.config, embedding.dtype) + copied_bytes,
        )

    def _block(self, layer: int, names: TensorNames) -> Block:
        traits, prefix = self.config.traits, names.layer.format(layer)
        qk_norm = None
        if traits.qk_norm:
            q_norm, k_norm = (self.reader.read(f"{prefix}.{name}.weight") for name in (names.q_norm, names.k_norm))
            qk_norm = torch.cat((q_norm.expand(self.config.heads, -1), k_norm.expand(self.config.kv_heads, -1)))
        return Block(
            input_norm=self.reader.read(f"{prefix}.{names.input_norm}.weight"),
            qkv=self._linear(prefix, names.q, names.k, names.v, bias=traits.qkv_bias),
            qk_norm=qk_norm,
            o=self._linear(prefix, names.o, bias=traits.o_bias),
            mlp_norm=self.reader.read(f"{prefix}.{names.mlp_norm}.weight"),
            gate_up=self._linear(prefix, names.gate, names.up, bias=traits.mlp_bias),
            down=self._linear(prefix, names.down, bias=traits.mlp_bias),
            window=traits.windows[layer],
        )

    def _linear(self, prefix: str, *names: str, bias: bool) -> Linear:
        weight = self.reader.read(*(f"{prefix}.{name}.weight" for name in names))
        biases = self.reader.read(*(f"{prefix}.{name}.bias" for name in names)) if bias else None
        return self.linears.make(weight, biases)

    def _head(self, embedding: Tensor, names: TensorNames) -> Linear:
        if not self.config.tie_embeddings:
            return self.linears.make(self.reader.read(f"{names.head}.weight"))
        return self.linears.make(embedding, pack=embedding.nbytes <= MAX_HEAD_COPY_BYTES)
