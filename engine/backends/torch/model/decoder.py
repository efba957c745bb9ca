"""The decoder: embedding, blocks of attention and gated MLP, norm and head, over a mixed batch of token rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.common.families.base import NormKind
from engine.backends.common.model_config import ModelConfig
from engine.backends.torch.cuda.coded_linear import GgufEmbedding
from engine.backends.torch.cuda.layer_ops import HeadNormWeight, LayerOps
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.model.attention import Scores, attend, softcap_
from engine.backends.torch.model.linear import Linear, add_product
from engine.backends.torch.model.lora import Adapted, LinearName, add_adapters
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp, Mlp
from engine.backends.torch.model.norms import HeadNorm, Norm, RmsNorm, WideRmsNorm
from engine.backends.torch.model.parallel import ParallelEmbedding
from engine.backends.torch.model.rope import Angles, RotaryEmbedding, rotate_
from engine.backends.torch.model.step_plan import StepPlan
from engine.backends.torch.native.layer import CodedEmbedding, FusedLinear

# Blocks whose norms, gates and residual sums are fused into native products.


@dataclass(frozen=True, slots=True)
class Residual:
    """hidden + alpha * norm(linear(x)), in place if fused.

    fused: product and sum in one call, where there is no norm between them.
    """

    linear: Linear
    norm: Norm
    alpha: float
    place: LinearName
    fused: FusedLinear | None

    def __call__(self, x: Tensor, hidden: Tensor, layer: int, adapted: Iterable[Adapted]) -> Tensor:
        if self.fused is None:
            added = self.norm(add_adapters(self.linear(x), x, layer, self.place, adapted))
            return torch.add(hidden, added, alpha=self.alpha)
        self.fused(x, hidden)
        if adapted:
            hidden.add_(add_adapters(torch.zeros_like(hidden), x, layer, self.place, adapted), alpha=self.alpha)
        return hidden


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """A block of attention, then a gated MLP. What adapters add to their rows is computed separately, so that it
    changes no other row."""

    input_norm: Norm
    qkv: FusedLinear
    o: Residual
    mlp_norm: Norm
    mlp: GatedMlp
    gated: FusedLinear
    down: Residual

    def into_attention(self, hidden: Tensor, layer: int, adapted: Iterable[Adapted]) -> Tensor:
        """Return queries, keys and values of hidden states [rows, hidden]."""
        qkv = self.qkv(hidden)
        return add_adapters(qkv, self.input_norm(hidden), layer, "qkv", adapted) if adapted else qkv

    def out_of_attention(self, attended: Tensor, hidden: Tensor, layer: int, adapted: Iterable[Adapted]) -> Tensor:
        """Return the block's output, from attention outputs and its input, which is overwritten."""
        hidden = self.o(attended, hidden, layer, adapted)
        gated = self.mlp.adapt_(self.gated(hidden), lambda rows: self.mlp_norm(hidden[rows]), layer, adapted)
        return self.down(gated, hidden, layer, adapted)


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer. qkv is fused; qk_norm is over [T, heads + kv_heads, head_dim].

    rotary: rotates its queries and keys; None without RoPE.  fused: the same block in fewer calls, or None.
    sums: its MLP, where outputs of attention and MLP are added to the hidden states without a norm or scale; else None.
    ops: the Triton kernels, where they work.  chains: True if those compute a sum and the RMS norm after it in one.
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
    ops: LayerOps | None = None
    chains: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Adjacent layers on one device."""

    first_layer: int
    blocks: tuple[Block, ...]
    device: torch.device

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Mapping[RotaryEmbedding | None, Angles | None]:
        """Return the rotation angles of each distinct rotary embedding of its blocks."""
        rotaries = dict.fromkeys(block.rotary for block in self.blocks)
        return {rotary: rotary.angles(positions, dtype) if rotary is not None else None for rotary in rotaries}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A causal language model. Every row of a batch is one token; rows depend on each other only in attention.

    The embedding is on the first stage's device, final norm and head on the last one's.

    fused_head: final norm, head and scaling in one call to float32 logits, where there is such a kernel.
    """

    config: ModelConfig
    embedding: Tensor | CodedEmbedding | GgufEmbedding | ParallelEmbedding
    stages: tuple[Stage, ...]
    final_norm: Norm
    head: Linear
    fused_head: FusedLinear | None = None

    @property
    def fused(self) -> bool:
        """True if all of its blocks are fused."""
        return all(block.fused is not None for stage in self.stages for block in stage.blocks)

    @property
    def needs_host(self) -> bool:
        """True if the host reads in the middle of a step which experts it needs."""
        mlps = (block.mlp for stage in self.stages for block in stage.blocks)
        return any(isinstance(mlp, MixtureMlp) and mlp.grouped is None for mlp in mlps)

    def hidden(
        self, plan: StepPlan, kv: KvPool, rows: Tensor | None = None, check: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Run one step: write its keys and values to `kv`, and return hidden states [rows, hidden] before the last
        norm: of all rows, or only of `rows` [R], to which the last block is restricted after its attention.

        check: called with the states [T, hidden] of all rows before or after the last block.
        `plan` and `rows` are on the first stage's device, the states on the last one's.
        """
        hidden = self.embed(plan.ids)
        for stage in self.stages:
            plan, hidden = plan.on(stage.device), hidden.to(stage.device)
            selected = rows.to(stage.device) if rows is not None else None
            hidden = self.run_stage(stage, plan, hidden, kv, selected, check)
        return hidden

    def embed(self, ids: Tensor) -> Tensor:
        """Return the states [T, hidden] before the first block."""
        table, scale = self.embedding, self.config.traits.embedding_scale
        hidden = F.embedding(ids, table) if isinstance(table, Tensor) else table(ids)
        return hidden * torch.tensor(scale, dtype=hidden.dtype) if scale != 1.0 else hidden

    def run_stage(
        self,
        stage: Stage,
        plan: StepPlan,
        hidden: Tensor,
        kv: KvPool,
        rows: Tensor | None = None,
        check: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Return the states after the blocks of `stage`, on whose device all is. The stage with the last block
        restricts them to `rows`, and calls `check`; see `hidden`."""
        angles = stage.angles(plan.positions, hidden.dtype if plan.native is None else torch.float32)
        normed: Tensor | None = None
        last = False
        for layer, block in enumerate(stage.blocks, stage.first_layer):
            last = layer + 1 == self.config.layers
            if last and check is not None:
                check(hidden)
            selected = rows if last and not plan.adapted else None
            if block.ops is not None and block.chains:
                following = stage.blocks[layer + 1 - stage.first_layer :][:1]
                next_norm = following[0].input_norm if following else None
                normed = block.input_norm(hidden) if normed is None else normed
                hidden, normed = self._chained(
                    layer, block, block.ops, hidden, normed, next_norm, plan, kv, angles[block.rotary], selected
                )
            else:
                hidden = self._block(layer, block, hidden, plan, kv, angles[block.rotary], selected)
        return hidden.index_select(0, rows) if last and rows is not None and plan.adapted else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab] of hidden states before the last norm."""
        traits = self.config.traits
        if self.fused_head is not None:
            logits = self.fused_head(hidden)
        else:
            logits = self.head(self.final_norm(hidden) * traits.logit_scale).float()
        return softcap_(logits, traits.logit_softcap) if traits.logit_softcap else logits

    def _block(
        self,
        layer: int,
        block: Block,
        hidden: Tensor,
        plan: StepPlan,
        kv: KvPool,
        angles: Angles | None,
        rows: Tensor | None,
    ) -> Tensor:
        """Return the states after a block; only of `rows` [R] if given."""
        if block.fused is not None:
            qkv = block.fused.into_attention(hidden, layer, plan.adapted)
            attended = self._attend(layer, block, qkv, plan, kv, angles)
            del qkv  # frees its memory for the next products
            return block.fused.out_of_attention(_select(attended, rows), _select(hidden, rows), layer, plan.adapted)
        if block.sums is not None and not plan.adapted:
            attended = self._attend(layer, block, block.qkv(block.input_norm(hidden)), plan, kv, angles)
            hidden = add_product(_select(hidden, rows), block.o, _select(attended, rows))
            return block.sums.add_to(hidden, block.mlp_norm(hidden), layer)
        scale = self.config.traits.residual_scale
        normed = block.input_norm(hidden)
        attended = block.attention_out_norm(_select(self._attention(layer, block, normed, plan, kv, angles), rows))
        hidden = torch.add(_select(hidden, rows), attended, alpha=scale)
        normed = _select(normed, rows) if self.config.traits.parallel else block.mlp_norm(hidden)
        return torch.add(hidden, block.mlp_out_norm(block.mlp(normed, layer, plan.adapted)), alpha=scale)

    def _chained(
        self,
        layer: int,
        block: Block,
        ops: LayerOps,
        hidden: Tensor,
        normed: Tensor,
        next_norm: Norm | None,
        plan: StepPlan,
        kv: KvPool,
        angles: Angles | None,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `_block` does and `next_norm` of it; normed: the input norm of `hidden`, which is overwritten."""
        qkv = add_adapters(block.qkv(normed), normed, layer, "qkv", plan.adapted)
        attended = _select(self._attend(layer, block, qkv, plan, kv, angles), rows)
        hidden = _select(hidden, rows)
        added = add_adapters(block.o(attended), attended, layer, "o", plan.adapted)
        added = block.mlp(_add_norm(ops, hidden, added, block.mlp_norm), layer, plan.adapted)
        if next_norm is None:
            return hidden.add_(added), None
        return hidden, _add_norm(ops, hidden, added, next_norm)

    def _attention(
        self, layer: int, block: Block, normed: Tensor, plan: StepPlan, kv: KvPool, angles: Angles | None
    ) -> Tensor:
        qkv = add_adapters(block.qkv(normed), normed, layer, "qkv", plan.adapted)
        attended = self._attend(layer, block, qkv, plan, kv, angles)
        return add_adapters(block.o(attended), attended, layer, "o", plan.adapted)

    def _attend(
        self, layer: int, block: Block, qkv: Tensor, plan: StepPlan, kv: KvPool, angles: Angles | None
    ) -> Tensor:
        """Return the attention outputs of queries, keys and values [rows, (heads + 2 * kv_heads) * head_dim]."""
        heads, kv_heads, size = self.config.heads, self.config.kv_heads, self.config.head_dim
        qkv = qkv.view(-1, heads + 2 * kv_heads, size)
        rotated = qkv[:, : heads + kv_heads]
        ops = block.ops if plan.paged is not None and kv.codec is None else None
        norm = _head_norm(block.qk_norm, self.config.traits.norm) if ops is not None else None
        if block.qk_norm is not None and norm is None and not (plan.native and plan.native.attention.norms(layer)):
            rotated.copy_(block.qk_norm(rotated))
        if plan.native is not None:
            return plan.native.attend(layer, qkv, angles)
        if ops is not None:
            ops.rotate_and_write(qkv, heads, norm, angles, kv.layers[layer], plan.slots)
        else:
            if angles is not None:
                rotate_(rotated, *angles)
            kv.write(layer, plan.slots, qkv[:, heads:], attended=plan.paged is None)
        scores = Scores(heads, self.config.score_scale, self.config.traits.attn_softcap)
        return attend(layer, block.window, qkv, plan, kv, scores)


def _add_norm(ops: LayerOps, hidden: Tensor, added: Tensor, norm: Norm) -> Tensor:
    """Add `added` to `hidden` in place, and return the norm of the sum."""
    assert isinstance(norm, RmsNorm | WideRmsNorm), "a block chains such norms alone"
    return ops.add_norm(hidden, added, norm.weight, norm.eps)


def _head_norm(norm: Norm | None, kind: NormKind) -> HeadNormWeight | None:
    """Return the norm for the kernel that rotates; None where it cannot compute that."""
    if not isinstance(norm, HeadNorm) or norm.rms_epsilon is None:
        return None
    return HeadNormWeight(kind, norm.weight, norm.rms_epsilon)


def _select(states: Tensor, rows: Tensor | None) -> Tensor:
    return states if rows is None else states.index_select(0, rows)
