"""The demo model for training: a plain Llama decoder (Touvron et al. 2023) with grouped-query attention.

Parameter names are those of Hugging Face's `LlamaForCausalLM`, so a state dict is a shippable checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are those of the shipped one."""

    vocab_size: int
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 768
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def to_config(self, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """Return the config.json of this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and shared key/value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.groups = shape.num_heads // shape.num_kv_heads
        kv_width = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key, value = (part.repeat_interleave(self.groups, dim=1) for part in (key, value))
        out = causal_attention(query, key, value)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        return x.view(rows, tokens, width // self.head_dim, self.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.norm_eps)


class DemoModel(nn.Module):
    """The whole model; the output head shares the embedding's weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        residual_std = 0.02 / (2 * shape.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else 0.02)

    def hidden(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Final hidden states (rows, tokens, hidden_size) of `ids` (rows, tokens), computed in `dtype`."""
        cos, sin = rope_tables(ids.shape[1], self.shape.head_dim, self.shape.rope_theta, dtype)
        x = self.model.embed_tokens(ids).to(dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for hidden states of any leading shape."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention over earlier positions; all three are (rows, heads, tokens, head_dim).

    Written out because the fused CPU kernel's backward is several times slower at training's short lengths.
    """
    length = query.shape[2]
    later = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1)
    scores = torch.baddbmm(
        later.expand(query.shape[0] * query.shape[1], length, length),
        query.flatten(0, 1),
        key.flatten(0, 1).transpose(1, 2),
        alpha=query.shape[3] ** -0.5,
    )
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view_as(query)


def rope_tables(length: int, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, head_dim) of rotary positions 0..length-1 (Su et al. 2021)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim/2) of `x` by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
