"""Sequences that attend through the native kernel, and the same by plain float64 attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.native.attention import Heads, NativeAttention
from engine.backends.torch.native.library import NativeLibrary
from engine.config import CacheBits
from tests.fakes.coded_pages import Coded, hadamard_rotate, laid

NUM_PAGES = 144
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Heads, how much of each is turned, and whether they are normed first."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    cap: float = 0.0
    turned: int = 0
    normed: bool = False
    page_tokens: int = 16

    def of_kernel(self) -> Heads:
        """As the kernel is told of them."""
        weight = 0.5 + torch.rand(self.heads + self.kv_heads, self.head_dim, generator=seeded(3))
        return Heads(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=self.window,
            scale=self.head_dim**-0.5,
            cap=self.cap,
            norm=weight if self.normed else None,
            epsilon=1e-6,
        )

    def angles(self, positions: Tensor) -> Angles | None:
        """cos and sin of what heads at `positions` are turned by, as RotaryEmbedding gives them."""
        if not self.turned:
            return None
        turns = positions[:, None] * 10_000.0 ** (-torch.arange(0, self.turned, 2) / self.turned)
        cos, sin = turns.cos().float(), turns.sin().float()
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Attending:
    """One sequence: random rows of the fused projection, and pages in no order."""

    def __init__(self, shape: Shape, tokens: int, dtype: torch.dtype, pages: Sequence[int], seed: int = 0) -> None:
        fused = shape.heads + 2 * shape.kv_heads
        self.rows = torch.randn(tokens, fused, shape.head_dim, generator=seeded(seed)).to(dtype)
        self.pages, self.computed = pages, 0

    def chunk(self, tokens: int) -> ChunkInput:
        """Its next tokens."""
        return ChunkInput(range(tokens), self.computed, self.pages, sample=False)


class Kernel:
    """Native attention of one layer over pages full of NaN, which what is not written must not reach."""

    def __init__(self, library: NativeLibrary, shape: Shape, dtype: torch.dtype, bits: CacheBits = 16) -> None:
        self.shape, self.dtype = shape, dtype
        self.form = HeadFormat(shape.head_dim, bits, dtype.itemsize)
        self._pairs = dtype is torch.bfloat16 and library.isa in ("avx512-bf16", "amx-bf16")
        self._pool = torch.full(
            (NUM_PAGES, shape.page_tokens, 2 * shape.kv_heads, self.form.head_bytes), 255, dtype=torch.uint8
        )
        self._attention = NativeAttention(library, [shape.of_kernel()], [self._pool], dtype=dtype, bits=bits)
        self._free = torch.randperm(NUM_PAGES, generator=seeded(7)).tolist()

    def sequence(self, tokens: int, seed: int = 0) -> Attending:
        """A sequence of so many tokens, with pages."""
        pages = [self._free.pop() for _ in range(-(-tokens // self.shape.page_tokens))]
        return Attending(self.shape, tokens, self.dtype, pages, seed)

    def feed(self, *parts: tuple[Attending, int]) -> list[Tensor]:
        """One step: so many further tokens of each; what each of them attended [tokens, heads * head_dim]."""
        chunks = [sequence.chunk(tokens) for sequence, tokens in parts]
        ends = [chunk.end for chunk in chunks]
        rows = torch.cat([each.rows[c.start : c.end] for (each, _), c in zip(parts, chunks, strict=True)])
        step = self._attention.step(chunks)
        attended = step.attend(0, rows, self.shape.angles(torch.tensor(step.positions)))
        for (sequence, _), end in zip(parts, ends, strict=True):
            sequence.computed = end
        return list(attended.split([tokens for _, tokens in parts]))

    def laid(self, sequence: Attending) -> Coded:
        """Keys and values of a sequence as they lie in its pages, in fewer than 16 bits."""
        return laid(self._pool, sequence.pages, sequence.computed, self.form, pairs=self._pairs)

    def kept(self, sequence: Attending) -> Tensor | None:
        """What they stand for, float64 [tokens, 2 * kv_heads, head_dim]; None where they lie there as they are."""
        return hadamard_rotate(self.laid(sequence).dequantise(), self.form) if self.form.is_quantised else None

    def whole(self, sequence: Attending, cuts: Sequence[int]) -> Tensor:
        """What all tokens of a sequence attended that came in chunks of these sizes."""
        return torch.cat([self.feed((sequence, tokens))[0] for tokens in cuts])


def expected(shape: Shape, rows: Tensor, kept: Tensor | None = None) -> Tensor:
    """What the tokens of one sequence attend [T, heads * head_dim], in float64. kept: what is left of their keys and
    values; None where nothing is lost."""
    kernel, dtype, tokens = shape.of_kernel(), rows.dtype, len(rows)
    ready = rows[:, : shape.heads + shape.kv_heads].double()
    if kernel.norm is not None:
        ready = ready / (ready.square().mean(-1, keepdim=True) + 1e-6).sqrt() * kernel.norm
    angles = shape.angles(torch.arange(tokens))
    if angles is not None:
        part = ready[..., : shape.turned]
        part = part * angles[0] + part.roll(shape.turned // 2, -1) * angles[1]
        ready = torch.cat((part, ready[..., shape.turned :]), -1)
    ready = ready.to(dtype).double().transpose(0, 1)
    shared = shape.heads // shape.kv_heads
    queries, keys = ready[: shape.heads], ready[shape.heads :]
    values = rows[:, shape.heads + shape.kv_heads :].double().transpose(0, 1)
    if kept is not None:
        keys, values = kept.transpose(0, 1).split(shape.kv_heads)
    keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
    scores = queries @ keys.mT * shape.head_dim**-0.5
    if shape.cap:
        scores = shape.cap * (scores / shape.cap).tanh()
    position = torch.arange(tokens)
    hidden = position > position[:, None]
    if shape.window is not None:
        hidden |= position <= position[:, None] - shape.window
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)
