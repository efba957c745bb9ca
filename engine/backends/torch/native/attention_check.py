"""Checks whether native attention applies to a model, and whether it gives the same as plain attention."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.kv.codec import HeadCodec
from engine.backends.torch.model.attention import softcap_
from engine.backends.torch.model.norms import HeadNorm
from engine.backends.torch.model.rope import RotaryEmbedding, rotate_
from engine.backends.torch.native.attention import DTYPES, TILE_TOKENS, Heads, NativeAttention
from engine.backends.torch.native.library import Kernels, NativeLibrary
from engine.config import CacheBits

if TYPE_CHECKING:
    from engine.backends.torch.model.decoder import Block, Decoder

_TOLERANCES = {torch.bfloat16: 0.03, torch.float32: 1e-4}
"""For values around 1."""

_CODE_TOLERANCES: dict[CacheBits, float] = {16: 0.0, 8: 0.01, 4: 0.15}
"""Additional tolerance for codes that are rounded the other way."""

_TOKENS, _WINDOW = 150, 37

MAX_ROW_NUMBERS = 1 << 17
"""Max numbers in a token's queries, keys and values for which the kernel is tested, in several float32 copies. The
largest models have about 20,000; more could exhaust memory before it is accounted for."""

_NAN_BYTE = 255
"""Two or four such bytes are NaN in every dtype."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The heads of a layer, and their rotary embedding."""

    heads: Heads
    rotary: RotaryEmbedding | None


def layer_heads(decoder: Decoder) -> list[LayerHeads]:
    """Return the heads of each layer."""
    return [LayerHeads(_heads(decoder, block), block.rotary) for stage in decoder.stages for block in stage.blocks]


def native_obstacle(
    kernels: Kernels,
    layers: Sequence[LayerHeads],
    *,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    page_tokens: int,
    bits: CacheBits = 16,
) -> str:
    """Return why native attention does not apply to such a model, as a clause; "" where it does. A kernel with wrong
    results is not used, with a warning. bits: of keys and values in the pages."""
    head_dim = layers[0].heads.head_dim
    if any(device.type != "cpu" for device in devices):
        return "native attention is for the CPU only"
    if dtype not in DTYPES:
        return f"native attention is for bfloat16 or float32, not {dtype}".replace("torch.", "")
    if kernels.library is None:
        return kernels.problem
    if page_tokens % TILE_TOKENS:
        return f"native attention needs pages of a multiple of {TILE_TOKENS} tokens, not {page_tokens}"
    if head_dim % TILE_TOKENS:
        return f"native attention needs head sizes of a multiple of {TILE_TOKENS}, not {head_dim}"
    row_numbers = max((each.heads.heads + 2 * each.heads.kv_heads) * head_dim for each in layers)
    if row_numbers > MAX_ROW_NUMBERS:
        return f"native attention needs heads with max {MAX_ROW_NUMBERS} values together, not {row_numbers}"
    problem = _problem(kernels.library, layers, dtype, page_tokens, bits)
    if problem:
        _logger.warning("attention stays on torch's kernels: %s", problem)
    return problem


def _heads(decoder: Decoder, block: Block) -> Heads:
    config, norm = decoder.config, block.qk_norm
    heads = Heads(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        window=block.window,
        scale=config.score_scale,
        cap=config.traits.attn_softcap,
    )
    if isinstance(norm, HeadNorm) and norm.rms_epsilon is not None:
        return replace(heads, norm=norm.weight.float().contiguous(), epsilon=norm.rms_epsilon)
    return heads


def _problem(
    library: NativeLibrary, layers: Sequence[LayerHeads], dtype: torch.dtype, page_tokens: int, bits: CacheBits
) -> str:
    """Return what is wrong with the kernel's results for one layer of each kind, as a clause; "" for nothing."""
    kinds = {(each.rotary, each.heads.window, each.heads.norm is None): each for each in layers}
    try:
        differences = [_max_difference(library, each, dtype, page_tokens, bits) for each in kinds.values()]
    except AttributeError as error:
        return f"the compiled library cannot be used: {error}"
    worst = max(differences, key=lambda difference: (difference != difference, difference))
    return (
        ""
        if worst <= _TOLERANCES[dtype] + _CODE_TOLERANCES[bits]
        else f"results of the native kernel are off by {worst:.3g}"
    )


def _max_difference(
    library: NativeLibrary, layer: LayerHeads, dtype: torch.dtype, page_tokens: int, bits: CacheBits
) -> float:
    """Return the max difference between the kernel, for one sequence in three chunks, and plain attention in
    float32."""
    window = None if layer.heads.window is None else min(layer.heads.window, _WINDOW)
    heads = replace(layer.heads, window=window)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_TOKENS, heads.heads + 2 * heads.kv_heads, heads.head_dim, generator=generator).to(dtype)
    angles = None if layer.rotary is None else layer.rotary.angles(torch.arange(_TOKENS), torch.float32)
    row_numbers = list(range(-(-_TOKENS // page_tokens)))[::-1]
    format = HeadFormat(heads.head_dim, bits, dtype.itemsize)
    pages = torch.full(
        (len(row_numbers), page_tokens, 2 * heads.kv_heads, format.head_bytes), _NAN_BYTE, dtype=torch.uint8
    )
    attention = NativeAttention(library, [heads], [pages], dtype=dtype, bits=bits)
    outputs = []
    for first, end in ((0, 100), (100, _TOKENS - 1), (_TOKENS - 1, _TOKENS)):
        step = attention.step([ChunkInput(range(end - first), first, row_numbers, sample=False)])
        chunk_angles = None if angles is None else (angles[0][first:end], angles[1][first:end])
        outputs.append(step.attend(0, rows[first:end], chunk_angles))
    expected = _plain_attention(heads, rows.float(), angles, dtype, format)
    return float((torch.cat(outputs).float() - expected).abs().max())


def _plain_attention(
    heads: Heads, rows: Tensor, angles: tuple[Tensor, Tensor] | None, dtype: torch.dtype, format: HeadFormat
) -> Tensor:
    """Return attention of all rows of one sequence [T, heads + 2 * kv_heads, head_dim], in float32, with keys and
    values rounded as in pages of that format."""
    rotated = rows[:, : heads.heads + heads.kv_heads]
    if heads.norm is not None:
        rotated.copy_(torch.nn.functional.rms_norm(rotated, (heads.head_dim,), eps=heads.epsilon) * heads.norm)
    if angles is not None:
        rotate_(rotated, *angles)
    if format.is_quantised:
        keys_values, codec = rows[:, heads.heads :], HeadCodec(format, [rows.device])
        keys_values.copy_(codec.rotate(codec.decode(codec.encode(keys_values), torch.empty_like(keys_values))))
    else:
        rotated.copy_(rotated.to(dtype))
    queries, keys, values = rows.transpose(0, 1).split((heads.heads, heads.kv_heads, heads.kv_heads))
    shared = heads.heads // heads.kv_heads
    keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
    scores = (queries @ keys.transpose(1, 2)).mul_(heads.scale)
    if heads.cap:
        softcap_(scores, heads.cap)
    position = torch.arange(len(rows))
    hidden = position > position[:, None]
    if heads.window is not None:
        hidden |= position <= position[:, None] - heads.window
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    attended: Tensor = weights @ values
    return attended.transpose(0, 1).flatten(1)
