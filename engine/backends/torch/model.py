"""The decoder: embedding, blocks of attention and gated MLP, norm and head, over a mixed batch of token rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.torch.attention import attend
from engine.backends.torch.kv import KvPool
from engine.backends.torch.linear import Linear
from engine.backends.torch.lora import add_adapters
from engine.backends.torch.mlp import Mlp
from engine.backends.torch.model_config import ModelConfig
from engine.backends.torch.rope import RotaryEmbedding, rotate_
from engine.backends.torch.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer. qkv is fused; qk_norm [heads + kv_heads, head_dim] where the model has it."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    mlp: Mlp
    window: int | None


@dataclass(frozen=True, slots=True)
class Stage:
    """Adjacent layers that lie on one device."""

    first_layer: int
    blocks: tuple[Block, ...]
    rope: RotaryEmbedding
    device: torch.device


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal language model. Every row of a batch is one token; rows meet only in attention.

    Its stages compute one after another. The embedding lies where the first does, final norm and head where the last.
    """

    config: ModelConfig
    embedding: Tensor
    stages: tuple[Stage, ...]
    final_norm: Tensor
    head: Linear

    def logits(self, plan: StepPlan, kv: KvPool) -> Tensor:
        """Run one step: write its keys and values to `kv`, return float32 logits [len(plan.sampled_rows), vocab].

        `plan` lies on the first stage's device, the logits on the last one's.
        """
        hidden = F.embedding(plan.ids, self.embedding)
        for stage in self.stages:
            plan, hidden = plan.on(stage.device), hidden.to(stage.device)
            cos, sin = stage.rope.angles(plan.positions, hidden.dtype)
            for layer, block in enumerate(stage.blocks, stage.first_layer):
                hidden = hidden + self._attention(layer, block, hidden, plan, kv, cos, sin)
                hidden = hidden + block.mlp(self._norm(hidden, block.mlp_norm), layer, plan.adapted)
        sampled = hidden.index_select(0, plan.sampled_rows)
        return self.head(self._norm(sampled, self.final_norm)).float()

    def _attention(
        self, layer: int, block: Block, hidden: Tensor, plan: StepPlan, kv: KvPool, cos: Tensor, sin: Tensor
    ) -> Tensor:
        heads, kv_heads, size = self.config.heads, self.config.kv_heads, self.config.head_dim
        normed = self._norm(hidden, block.input_norm)
        qkv = add_adapters(block.qkv(normed), normed, layer, "qkv", plan.adapted)
        qkv = qkv.view(-1, heads + 2 * kv_heads, size)
        turned = qkv[:, : heads + kv_heads]
        if block.qk_norm is not None:
            turned.copy_(F.rms_norm(turned, (size,), eps=self.config.norm_eps) * block.qk_norm)
        rotate_(turned, cos, sin)
        kv.write(layer, plan.slots, qkv[:, heads:])
        attended = attend(layer, block.window, qkv, plan, kv, heads)
        return add_adapters(block.o(attended), attended, layer, "o", plan.adapted)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)
