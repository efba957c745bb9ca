"""DecoderLoader: builds a decoder from a checkpoint, one tensor at a time, so that memory peaks at about its weights'
size."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.checkpoints.checkpoint import Checkpoint
from engine.backends.checkpoints.quantized_weight import method_of, methods_of
from engine.backends.common.families import architectures
from engine.backends.common.families.base import TensorNames
from engine.backends.common.gguf_codes import CODED_FORMATS, NO_CODES, CodedTensors, Codes
from engine.backends.common.model_config import ModelConfig
from engine.backends.common.packed_weights import (
    BITS,
    HALF_BYTES,
    HEAD_BITS,
    MAX_HEAD_COPY_BYTES,
    fp16_saved_bytes,
    fp16_saved_head_bytes,
    head_bytes,
    saved_bytes,
)
from engine.backends.common.tensor_shapes import block_shapes, norm_shapes
from engine.backends.torch.cuda.coded_linear import CodedKernels, CodedLinear, GgufEmbedding
from engine.backends.torch.cuda.layer_ops import MAX_NORM_WIDTH, LayerOps
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.layout import Layout, Span
from engine.backends.torch.model.decoder import Block, Decoder, Stage
from engine.backends.torch.model.linear import Fp16Linear, Linear, LinearFactory, PlainLinear, packing_pays
from engine.backends.torch.model.mlp import GatedMlp, MakeLinear, Mlp, make_mixture
from engine.backends.torch.model.norms import (
    HeadNorm,
    LayerNorm,
    Norm,
    ProjectionNorm,
    RmsNorm,
    WideRmsNorm,
    identity,
    norm_without_weight,
)
from engine.backends.torch.model.parallel import (
    CallHead,
    Group,
    ParallelEmbedding,
    ParallelHead,
    ParallelProjectionNorm,
    ReducedLinear,
)
from engine.backends.torch.model.rope import RotaryEmbedding
from engine.backends.torch.native.fusing import fuse_decoder
from engine.backends.torch.native.layer import CodedEmbedding, NativeLinear
from engine.backends.torch.native.library import NativeLibrary, Rows, concatenate
from engine.backends.torch.weights.reader import WeightReader
from engine.backends.torch.weights.store import WeightStore
from engine.config import WeightsName

_logger = logging.getLogger(__name__)

# A model's norms, by its traits and tensor names.


class ReadTensor(Protocol):
    """Reads the tensor of that name, and transforms it."""

    def __call__(self, name: str, *, transform: Callable[[Tensor], Tensor] = ...) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class NormLoader:
    """Makes norms from tensors whose names begin with `prefix`."""

    config: ModelConfig
    read: ReadTensor
    prefix: str = ""
    group: Group | None = None

    def norm(self, name: str) -> Norm:
        """Return the norm of that name, of the model's kind; the identity without a name."""
        if not name:
            return identity
        eps = self.config.norm_eps
        match self.config.traits.norm:
            case "rms":
                return RmsNorm(self._weight(name), eps)
            case "rms_plus_one":
                return WideRmsNorm(self._weight(name), eps)
            case "layer":
                return LayerNorm(self._weight(name), self.read(f"{self.prefix}{name}.bias"), eps)

    def qk_norm(self, names: TensorNames) -> Norm | None:
        """Return the norm of query and key heads together, [T, heads + kv_heads, head_dim]; None for none."""
        config = self.config
        match config.traits.qk_norm:
            case "projection" if self.group is not None:
                weights = self._weight(names.q_norm), self._weight(names.k_norm)
                return ParallelProjectionNorm(*weights, config.norm_eps, self.group)
            case "projection":
                return ProjectionNorm(self.norm(names.q_norm), self.norm(names.k_norm), config.heads)
            case "head":
                queries, keys = self._weight(names.q_norm), self._weight(names.k_norm)
                weight = torch.cat((queries.expand(config.heads, -1), keys.expand(config.kv_heads, -1)))
            case "each_head":
                first, first_kv = config.shard.rank * config.heads, config.shard.first_kv_head
                heads = [(names.q_norm, head) for head in range(first, first + config.heads)]
                heads += [(names.k_norm, head) for head in range(first_kv, first_kv + config.kv_heads)]
                weight = torch.stack([self._weight(f"{name}.norms.{head}") for name, head in heads])
            case None:
                return None
        norm = norm_without_weight(config.traits.norm, config.head_dim, config.norm_eps)
        return HeadNorm(norm, weight, None if config.traits.norm == "layer" else config.norm_eps)

    def _weight(self, name: str) -> Tensor:
        transform = _plus_one if self.config.traits.norm == "rms_plus_one" else identity
        return self.read(f"{self.prefix}{name}.weight", transform=transform)


def _plus_one(weight: Tensor) -> Tensor:
    return weight.float() + 1.0


def match_checkpoint(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return `config`, corrected by the checkpoint's tensors.

    Weights packed into words are float16 once read, whatever config.json says of the original model, and the head may
    be quantised even where that model tied it to the embedding. Configs of multimodal models contradict themselves on
    whether the head is tied.
    """
    architecture, methods = architectures()[config.architecture], methods_of(checkpoint)
    head = architecture.names.head
    if architecture.multimodal and not methods:
        return replace(config, tie_embeddings=f"{head}.weight" not in checkpoint)
    if not methods:
        return config
    tied = config.tie_embeddings and method_of(checkpoint, head) is None
    dtype = config.checkpoint_dtype if methods == {"fp8"} else "float16"
    return replace(config, tie_embeddings=tied, checkpoint_dtype=dtype)


def weights_bytes(
    config: ModelConfig,
    layout: Layout,
    dtype: torch.dtype,
    weights: WeightsName = "auto",
    *,
    keep_fp16: bool = False,
    coded: CodedTensors = NO_CODES,
) -> dict[DeviceMemory, int]:
    """Return the bytes of the weights on each device, loaded as `dtype`, quantised to `weights`, kept as float16, or
    `coded`. The copy of a tied head counts only if it is quantised."""
    names = architectures()[config.architecture].names
    embedding = len(config.vocab_rows) * config.hidden_size
    elements = dict.fromkeys(layout.memories, 0)
    for layer, memory in enumerate(layout.by_layer):
        elements[memory] += sum(map(math.prod, block_shapes(config, names, layer).values()))
    elements[layout.first] += embedding
    elements[layout.last] += sum(map(math.prod, norm_shapes(config, names.final_norm).values()))
    if weights == "auto" and (not config.tie_embeddings or layout.last is not layout.first):
        elements[layout.last] += embedding
    needed = {memory: dtype.itemsize * number for memory, number in elements.items()}
    if weights != "auto":
        needed[layout.last] += head_bytes(config)
        for layer, memory in enumerate(layout.by_layer):
            needed[memory] -= saved_bytes(config, layer, weights, dtype.itemsize)
    if coded:
        sizes = coded.sizes(config, tied=config.tie_embeddings)
        for layer, memory in enumerate(layout.by_layer):
            needed[memory] -= sizes.saved_bytes(layer, dtype.itemsize)
        if sizes.embedding_bytes is not None:
            needed[layout.first] += sizes.embedding_bytes - dtype.itemsize * embedding
        if sizes.head_bytes is not None and (not config.tie_embeddings or layout.last is not layout.first):
            needed[layout.last] += sizes.head_bytes - dtype.itemsize * embedding
    if keep_fp16:
        for layer, memory in enumerate(layout.by_layer):
            needed[memory] -= fp16_saved_bytes(config, layer)
        if not config.tie_embeddings:
            needed[layout.last] -= fp16_saved_head_bytes(config)
    return needed


def head_copy_bytes(embedding: Tensor, head: Linear) -> int:
    """Return the memory of a `head` that is a copy of `embedding`."""
    return HALF_BYTES * embedding.numel() if isinstance(head, Fp16Linear) else embedding.nbytes


@dataclass(frozen=True, slots=True)
class DecoderLoader:
    """Builds a decoder of `config`, its weights of `dtype` on the devices of `layout`, from `store`; `reader` reads
    what is not there.

    native: the native kernels of linear layers, if any.  all_native: True if they must compute the head too, even where
    a packed copy of the embedding is not worth its memory.  weights: quantisation of linear layers; other than "auto"
    needs `native`.  coded: tensors that are computed from the codes of their files, by `native` or, without it, by the
    Triton kernels.
    keep_fp16: True to store float32 weights as float16 where that is exact.
    ops: the Triton kernels of each CUDA device, where they work.
    group: the ranks of which `config` is one's part; None where it is all of the model.  call_head: of ParallelHead.
    """

    config: ModelConfig
    reader: WeightReader
    layout: Layout
    dtype: torch.dtype
    store: WeightStore
    native: NativeLibrary | None = None
    all_native: bool = False
    weights: WeightsName = "auto"
    keep_fp16: bool = False
    coded: CodedTensors = NO_CODES
    ops: Mapping[torch.device, LayerOps] = field(default_factory=dict)
    group: Group | None = None
    call_head: CallHead = lambda rows: None

    def load(self) -> Decoder:
        """Read all weights, and count them for the devices.

        Raises ModelLoadFailed or LoadCancelled, or InsufficientMemory before anything is read.
        """
        needed = weights_bytes(
            self.config, self.layout, self.dtype, self.weights, keep_fp16=self.keep_fp16, coded=self.coded
        )
        with ExitStack() as reservations:
            for memory, size_bytes in needed.items():
                needed_bytes = 0 if self.store.complete and not memory.simulated else size_bytes
                reservations.enter_context(memory.room_for(needed_bytes, "the weights"))
            decoder = self._read()
        for memory, size_bytes in needed.items():
            memory.weights_bytes += size_bytes
        return decoder

    def _read(self) -> Decoder:
        names = architectures()[self.config.architecture].names
        linears = {memory: self._factory(memory) for memory in self.layout.memories}
        embedding = self._embedding(f"{names.embedding}.weight", linears[self.layout.first])
        stages = tuple(self._stage(span, names, linears[span.memory]) for span in self.layout.spans)
        final_norm = self._norms(self.layout.last.device).norm(names.final_norm)
        head = self._head(embedding, names, linears[self.layout.last])
        decoder = Decoder(config=self.config, embedding=embedding, stages=stages, final_norm=final_norm, head=head)
        if self.group is not None:
            decoder = self._parallel_ends(decoder, self.group)
        return fuse_decoder(decoder) if self.native is not None else decoder

    def _parallel_ends(self, decoder: Decoder, group: Group) -> Decoder:
        """Return `decoder` with its part of the embedding and of the head as ranks compute them together."""
        assert isinstance(decoder.embedding, Tensor), "ranks compute from no codes"
        rows, vocab_size = self.config.vocab_rows, self.config.vocab_size
        width = -(-vocab_size // group.shard.size)
        return replace(
            decoder,
            embedding=ParallelEmbedding(decoder.embedding, rows.start, group),
            head=ParallelHead(decoder.head, width, vocab_size, group, self.call_head),
        )

    def _embedding(self, name: str, linears: LinearFactory) -> Tensor | CodedEmbedding | GgufEmbedding:
        coded = self.coded.parts([name])
        if coded is None:
            return self._tensor(name, self.layout.first.device)
        [part] = coded
        layer = self.store.linear(
            f"{name} from codes", lambda _: linears.make_embedding(self.reader.read_codes(name)[0], part)
        )
        if isinstance(layer, CodedLinear):
            return GgufEmbedding(layer)
        assert isinstance(layer, NativeLinear), "as it was made"
        return CodedEmbedding(layer)

    def _stage(self, span: Span, names: TensorNames, linears: LinearFactory) -> Stage:
        ropes = dict.fromkeys(self.config.rope_of(layer) for layer in span.layers)
        rotaries = {
            rope: RotaryEmbedding(rope, self.config.head_dim, span.device) if rope is not None else None
            for rope in ropes
        }
        blocks = (
            self._block(layer, names, span.memory, linears, rotaries[self.config.rope_of(layer)])
            for layer in span.layers
        )
        return Stage(first_layer=span.layers.start, blocks=tuple(blocks), device=span.device)

    def _block(
        self,
        layer: int,
        names: TensorNames,
        memory: DeviceMemory,
        linears: LinearFactory,
        rotary: RotaryEmbedding | None,
    ) -> Block:
        traits, prefix, device = self.config.traits, names.layer.format(layer), memory.device

        def linear(*parts: str, bias: bool, gates: bool = False, exact: bool = False) -> Linear:
            names = [f"{prefix}.{part}.weight" for part in parts]
            coded = None if exact else self.coded.parts(names, gates=gates)

            def make(copied: bool) -> Linear:
                biases = (
                    concatenate(self._rows([f"{prefix}.{part}.bias" for part in parts], device, copied))
                    if bias
                    else None
                )
                if coded is not None:
                    return self._coded_linear(names, coded, memory, linears, biases, gates=gates)
                weight = self._rows(names, device, copied)
                return linears.make(weight, biases, interleave=gates, bits=None if exact else BITS.get(self.weights))

            return self.store.linear(f"{prefix}.{'+'.join(parts)}", make)

        def summed(*parts: str, bias: bool, gates: bool = False, exact: bool = False) -> Linear:
            """Return a layer of which each rank has some inputs; rank 0 adds the bias."""
            if self.group is None:
                return linear(*parts, bias=bias, gates=gates, exact=exact)
            bias = bias and self.group.shard.rank == 0
            return ReducedLinear(linear(*parts, bias=bias, gates=gates, exact=exact), self.group)

        norms = self._norms(device, prefix)
        ops = self.ops.get(device)
        mlp = self._mlp(layer, names, linear, summed, ops)
        out_norms = [norms.norm(names.attention_out_norm), norms.norm(names.mlp_out_norm)]
        sums = not traits.parallel and traits.residual_scale == 1.0 and out_norms == [identity, identity]
        input_norm, mlp_norm = norms.norm(names.input_norm), norms.norm("" if traits.parallel else names.mlp_norm)
        rms = all(isinstance(norm, RmsNorm | WideRmsNorm) for norm in (input_norm, mlp_norm))
        return Block(
            input_norm=input_norm,
            qkv=linear(*names.qkv, bias=traits.qkv_bias),
            qk_norm=norms.qk_norm(names),
            o=summed(names.o, bias=traits.o_bias),
            attention_out_norm=out_norms[0],
            mlp_norm=mlp_norm,
            mlp=mlp,
            mlp_out_norm=out_norms[1],
            window=traits.windows[layer],
            rotary=rotary,
            sums=mlp if sums and isinstance(mlp, GatedMlp) else None,
            ops=ops,
            chains=ops is not None and sums and rms and self.config.hidden_size <= MAX_NORM_WIDTH,
        )

    def _coded_linear(
        self,
        names: Sequence[str],
        parts: Sequence[Codes],
        memory: DeviceMemory,
        linears: LinearFactory,
        bias: Tensor | None,
        *,
        gates: bool = False,
    ) -> Linear:
        """Return the layer of the weights `names`, computed from their codes; decoded, with a warning, where their
        headers do not show that the kernels cannot."""
        if parts[0].format in CODED_FORMATS:
            return linears.make_coded(self.reader.read_codes(*names), parts, bias, interleave=gates)
        layer = linears.make_packed(self.reader.read_packed(*names), parts, bias)
        if layer is not None:
            return layer
        _logger.warning("%s: decoded at load, as its groups or numbers are of no kind that kernels take", names[0])
        memory.weights_bytes += sum(self.dtype.itemsize * part.elements - part.cuda_bytes for part in parts)
        return linears.make(self.reader.read(*names, device=memory.device), bias)

    def _mlp(self, layer: int, names: TensorNames, linear: MakeLinear, summed: MakeLinear, ops: LayerOps | None) -> Mlp:
        traits = self.config.traits
        experts = traits.experts_of(layer)
        gated = partial(GatedMlp, activation=self.config.activation, ops=ops)
        if experts is not None:
            reduce = identity if self.group is None else self.group.all_reduce
            return make_mixture(names.experts, experts, linear, gated, ops, reduce)
        gate_up = linear(*names.gate_up, bias=traits.mlp_bias, gates=True)
        return gated(gate_up, summed(names.down, bias=traits.mlp_bias))

    def _head(
        self, embedding: Tensor | CodedEmbedding | GgufEmbedding, names: TensorNames, linears: LinearFactory
    ) -> Linear:
        """Return the head; a tied one is the embedding itself, or a copy on another device or packed."""
        memory = self.layout.last
        tied_codes = self.config.tie_embeddings and not isinstance(embedding, Tensor)
        if not isinstance(embedding, Tensor) and tied_codes and memory is self.layout.first:
            return embedding.layer
        name = f"{names.embedding if tied_codes else names.head}.weight"
        if (tied_codes or not self.config.tie_embeddings) and (coded := self.coded.parts([name])) is not None:
            return self.store.linear(
                f"{names.head} from codes", lambda _: self._coded_linear([name], coded, memory, linears, None)
            )
        bits = None if self.weights == "auto" else HEAD_BITS
        if not self.config.tie_embeddings:
            return self.store.linear(
                names.head,
                lambda copied: linears.make(self._rows([f"{names.head}.weight"], memory.device, copied), bits=bits),
            )
        assert isinstance(embedding, Tensor), "codes are neither quantised again nor copied"
        if bits is not None:
            return self.store.linear(f"{names.head} of the embedding", lambda _: linears.make(embedding, bits=bits))
        elsewhere = memory is not self.layout.first
        may_pack = self.all_native or (packing_pays(embedding) and embedding.nbytes <= MAX_HEAD_COPY_BYTES)
        head = self.store.linear(
            f"{names.head} of the embedding{' packed' if may_pack else ''}",
            lambda _: linears.make(embedding.to(memory.device, copy=True) if elsewhere else embedding, pack=may_pack),
        )
        if not isinstance(head, PlainLinear) and not elsewhere and not memory.simulated:
            memory.weights_bytes += head_copy_bytes(embedding, head)
        return head

    def _norms(self, device: torch.device, prefix: str = "") -> NormLoader:
        return NormLoader(self.config, partial(self._tensor, device=device), f"{prefix}." if prefix else "", self.group)

    def _tensor(self, name: str, device: torch.device, transform: Callable[[Tensor], Tensor] = identity) -> Tensor:
        return self.store.tensor(name, lambda copied: transform(concatenate(self._rows([name], device, copied))))

    def _rows(self, names: Sequence[str], device: torch.device, copied: bool) -> Rows:
        return self.reader.view(*names, device=device) if copied else self.reader.read(*names, device=device)

    def _factory(self, memory: DeviceMemory) -> LinearFactory:
        return LinearFactory(
            memory.device,
            self.dtype,
            self.native,
            self.store.allocate,
            keep_fp16=self.keep_fp16,
            coded=CodedKernels(memory.device) if self.coded and self.native is None else None,
        )
