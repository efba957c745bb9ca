"""The decoder: embedding, blocks of attention and gated MLP, norm and head, over a mixed batch of token rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.common.model_config import ModelConfig
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.model.attention import Scores, attend, softcap_
from engine.backends.torch.model.linear import Linear, sum_onto
from engine.backends.torch.model.lora import AdaptedRows, Place, add_adapters
from engine.backends.torch.model.mlp import GatedMlp, Mlp
from engine.backends.torch.model.norms import Norm
from engine.backends.torch.model.rope import Angles, RotaryEmbedding, rotate_
from engine.backends.torch.model.step_plan import StepPlan
from engine.backends.torch.native.layer import Fused
from engine.backends.torch.native.stack import Stack

# A block whose norms, gate and residual sums are part of its native products.


@dataclass(frozen=True, slots=True)
class Residual:
    """hidden + alpha * norm(linear(x)), in the place of `hidden` where no norm stands between them.

    fused: both in one, where they can be.
    """

    linear: Linear
    norm: Norm
    alpha: float
    place: Place
    fused: Fused | None

    def __call__(self, x: Tensor, hidden: Tensor, layer: int, adapted: Iterable[AdaptedRows]) -> Tensor:
        if self.fused is None:
            added = self.norm(add_adapters(self.linear(x), x, layer, self.place, adapted))
            return torch.add(hidden, added, alpha=self.alpha)
        self.fused(x, hidden)
        if adapted:
            hidden.add_(add_adapters(torch.zeros_like(hidden), x, layer, self.place, adapted), alpha=self.alpha)
        return hidden


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """A block of attention and a gated MLP, one after the other. What adapters change of their rows is computed apart:
    the other rows get what they would get without them."""

    input_norm: Norm
    qkv: Fused
    o: Residual
    mlp_norm: Norm
    mlp: GatedMlp
    gated: Fused
    down: Residual

    def into_attention(self, hidden: Tensor, layer: int, adapted: Iterable[AdaptedRows]) -> Tensor:
        """Queries, keys and values of hidden states [rows, hidden]."""
        qkv = self.qkv(hidden)
        return add_adapters(qkv, self.input_norm(hidden), layer, "qkv", adapted) if adapted else qkv

    def out_of_attention(self, attended: Tensor, hidden: Tensor, layer: int, adapted: Iterable[AdaptedRows]) -> Tensor:
        """The block's output, of what its heads made and what went into it, which is used up."""
        hidden = self.o(attended, hidden, layer, adapted)
        gated = self.mlp.adapt_(self.gated(hidden), lambda rows: self.mlp_norm(hidden[rows]), layer, adapted)
        return self.down(gated, hidden, layer, adapted)


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer. qkv is fused; qk_norm is over [T, heads + kv_heads, head_dim].

    rotary: what turns its queries and keys; None where nothing does.  fused: what computes the same in fewer calls.
    sums: its MLP, where attention and MLP are added to the hidden states one after the other as they come out.
    """

    input_norm: Norm
    qkv: Linear
    qk_norm: Norm | None
    o: Linear
    attention_out_norm: Norm
    mlp_norm: Norm
    mlp: Mlp
    mlp_out_norm: Norm
    window: int | None
    rotary: RotaryEmbedding | None
    fused: FusedBlock | None = None
    sums: GatedMlp | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """Adjacent layers that lie on one device."""

    first_layer: int
    blocks: tuple[Block, ...]
    device: torch.device

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Mapping[RotaryEmbedding | None, Angles | None]:
        """What each of its blocks turns queries and keys by."""
        rotaries = dict.fromkeys(block.rotary for block in self.blocks)
        return {rotary: rotary.angles(positions, dtype) if rotary is not None else None for rotary in rotaries}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal language model. Every row of a batch is one token; rows meet only in attention.

    Its stages compute one after another. The embedding lies where the first does, final norm and head where the last.

    fused_head: float32 logits, scaled, of states before the final norm in one call, where there is such a kernel.
    stack: all blocks in one call, for rows without adapters that attend natively.
    """

    config: ModelConfig
    embedding: Tensor
    stages: tuple[Stage, ...]
    final_norm: Norm
    head: Linear
    fused_head: Fused | None = None
    stack: Stack | None = None

    @property
    def fused(self) -> bool:
        """Whether all of its blocks are."""
        return all(block.fused is not None for stage in self.stages for block in stage.blocks)

    def hidden(
        self, plan: StepPlan, kv: KvPool, rows: Tensor | None = None, watch: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Run one step: write its keys and values to `kv`, return hidden states [rows, hidden] before the last norm:
        of all rows, or of `rows` [R] alone, which the last block then computes alone once it has attended.

        watch: given the states [T, hidden] of all rows before the last block, or after it.
        `plan` and `rows` lie on the first stage's device, the states on the last one's.
        """
        traits = self.config.traits
        hidden = F.embedding(plan.ids, self.embedding)
        if traits.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(traits.embedding_scale, dtype=hidden.dtype)
        for stage in self.stages:
            plan, hidden = plan.on(stage.device), hidden.to(stage.device)
            angles = stage.angles(plan.positions, hidden.dtype if plan.native is None else torch.float32)
            if self.stack is not None and plan.native is not None and not plan.adapted:
                found = self.stack(hidden, plan.native, angles, rows)
                if watch is not None:
                    watch(hidden)
                return found
            for layer, block in enumerate(stage.blocks, stage.first_layer):
                last = layer + 1 == self.config.layers
                if last and watch is not None:
                    watch(hidden)
                taken = rows.to(stage.device) if last and rows is not None and not plan.adapted else None
                hidden = self._block(layer, block, hidden, plan, kv, angles[block.rotary], taken)
        return hidden.index_select(0, rows.to(hidden.device)) if rows is not None and plan.adapted else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of hidden states before the last norm."""
        traits = self.config.traits
        if self.fused_head is not None:
            logits = self.fused_head(hidden)
        else:
            logits = self.head(self.final_norm(hidden) * traits.logit_scale).float()
        return softcap_(logits, traits.logit_cap) if traits.logit_cap else logits

    def _block(
        self,
        layer: int,
        block: Block,
        hidden: Tensor,
        plan: StepPlan,
        kv: KvPool,
        angles: Angles | None,
        taken: Tensor | None,
    ) -> Tensor:
        """States after a block, of the rows `taken` [R] alone where they are given."""
        if block.fused is not None:
            qkv = block.fused.into_attention(hidden, layer, plan.adapted)
            attended = self._attend(layer, block, qkv, plan, kv, angles)
            del qkv  # its memory is that of the products to come
            return block.fused.out_of_attention(_of(attended, taken), _of(hidden, taken), layer, plan.adapted)
        if block.sums is not None and not plan.adapted:
            attended = self._attend(layer, block, block.qkv(block.input_norm(hidden)), plan, kv, angles)
            hidden = sum_onto(_of(hidden, taken), block.o, _of(attended, taken))
            return block.sums.onto(hidden, block.mlp_norm(hidden), layer)
        scale = self.config.traits.residual_scale
        normed = block.input_norm(hidden)
        attended = block.attention_out_norm(_of(self._attention(layer, block, normed, plan, kv, angles), taken))
        hidden = torch.add(_of(hidden, taken), attended, alpha=scale)
        normed = _of(normed, taken) if self.config.traits.parallel else block.mlp_norm(hidden)
        return torch.add(hidden, block.mlp_out_norm(block.mlp(normed, layer, plan.adapted)), alpha=scale)

    def _attention(
        self, layer: int, block: Block, normed: Tensor, plan: StepPlan, kv: KvPool, angles: Angles | None
    ) -> Tensor:
        qkv = add_adapters(block.qkv(normed), normed, layer, "qkv", plan.adapted)
        attended = self._attend(layer, block, qkv, plan, kv, angles)
        return add_adapters(block.o(attended), attended, layer, "o", plan.adapted)

    def _attend(
        self, layer: int, block: Block, qkv: Tensor, plan: StepPlan, kv: KvPool, angles: Angles | None
    ) -> Tensor:
        """What the heads make of their queries, keys and values [rows, (heads + 2 * kv_heads) * head_dim]."""
        heads, kv_heads, size = self.config.heads, self.config.kv_heads, self.config.head_dim
        qkv = qkv.view(-1, heads + 2 * kv_heads, size)
        turned = qkv[:, : heads + kv_heads]
        if block.qk_norm is not None and not (plan.native and plan.native.attention.norms(layer)):
            turned.copy_(block.qk_norm(turned))
        if plan.native is not None:
            return plan.native.attend(layer, qkv, angles)
        if angles is not None:
            rotate_(turned, *angles)
        kv.write(layer, plan.slots, qkv[:, heads:])
        scores = Scores(heads, self.config.score_scale, self.config.traits.score_cap)
        return attend(layer, block.window, qkv, plan, kv, scores)


def _of(states: Tensor, rows: Tensor | None) -> Tensor:
    return states if rows is None else states.index_select(0, rows)
