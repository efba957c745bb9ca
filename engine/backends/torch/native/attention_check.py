"""Whether the native kernel attends for a model: what it takes, and whether it gives what plain attention gives."""

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
"""Of values around 1."""

_ONE_CODE: dict[CacheBits, float] = {16: 0.0, 8: 0.01, 4: 0.15}
"""What a number that falls to the other side of a rounding step may do to them besides."""

_TOKENS, _WINDOW = 150, 37

MAX_ROW_NUMBERS = 1 << 17
"""Of a token's queries, keys and values, for which the kernel is tried: in float32, and a few times over. The largest
models have some twenty thousand; what is more was made to take all memory before anybody accounts for it."""

_NAN_BYTE = 255
"""Two or four of which are no number, whatever the dtype."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RotatedHeads:
    """The heads of a layer, and what turns them."""

    heads: Heads
    rotary: RotaryEmbedding | None


def rotated_heads(decoder: Decoder) -> list[RotatedHeads]:
    """Those of each layer."""
    return [RotatedHeads(_heads(decoder, block), block.rotary) for stage in decoder.stages for block in stage.blocks]


def native_obstacle(
    kernels: Kernels,
    layers: Sequence[RotatedHeads],
    *,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    page_tokens: int,
    bits: CacheBits = 16,
) -> str:
    """Why the kernel does not attend for such a model, as a clause; "" where it does. A kernel that gives something
    else than it should is passed over with a warning. bits: of keys and values in the pages."""
    head_dim = layers[0].heads.head_dim
    if any(device.type != "cpu" for device in devices):
        return "the native kernels attend on a CPU alone"
    if dtype not in DTYPES:
        return f"the native kernels attend to bfloat16 or float32, and this is {dtype}".replace("torch.", "")
    if kernels.library is None:
        return kernels.problem
    if page_tokens % TILE_TOKENS:
        return f"the native kernels take pages of a multiple of {TILE_TOKENS} tokens, and these have {page_tokens}"
    if head_dim % TILE_TOKENS:
        return f"the native kernels take head sizes that {TILE_TOKENS} divides, and this is {head_dim}"
    numbers = max((each.heads.heads + 2 * each.heads.kv_heads) * head_dim for each in layers)
    if numbers > MAX_ROW_NUMBERS:
        return f"the native kernels take heads of {MAX_ROW_NUMBERS} numbers together, and these have {numbers}"
    problem = _misfit(kernels.library, layers, dtype, page_tokens, bits)
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
        cap=config.traits.score_cap,
    )
    if isinstance(norm, HeadNorm) and norm.rms_epsilon is not None:
        return replace(heads, norm=norm.weight.float().contiguous(), epsilon=norm.rms_epsilon)
    return heads


def _misfit(
    library: NativeLibrary, layers: Sequence[RotatedHeads], dtype: torch.dtype, page_tokens: int, bits: CacheBits
) -> str:
    """What is wrong with what the kernel gives for one layer of each kind, as a clause; "" where nothing is."""
    kinds = {(each.rotary, each.heads.window, each.heads.norm is None): each for each in layers}
    try:
        differences = [_difference(library, each, dtype, page_tokens, bits) for each in kinds.values()]
    except AttributeError as error:
        return f"the compiled library cannot be used: {error}"
    worst = max(differences, key=lambda difference: (difference != difference, difference))
    return (
        ""
        if worst <= _TOLERANCES[dtype] + _ONE_CODE[bits]
        else f"the native kernel was tried and is off by {worst:.3g}"
    )


def _difference(
    library: NativeLibrary, layer: RotatedHeads, dtype: torch.dtype, page_tokens: int, bits: CacheBits
) -> float:
    """Between what the kernel gives for one sequence in three chunks and plain attention in float32, at most."""
    window = None if layer.heads.window is None else min(layer.heads.window, _WINDOW)
    heads = replace(layer.heads, window=window)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_TOKENS, heads.heads + 2 * heads.kv_heads, heads.head_dim, generator=generator).to(dtype)
    angles = None if layer.rotary is None else layer.rotary.angles(torch.arange(_TOKENS), torch.float32)
    numbers = list(range(-(-_TOKENS // page_tokens)))[::-1]
    form = HeadFormat(heads.head_dim, bits, dtype.itemsize)
    pages = torch.full((len(numbers), page_tokens, 2 * heads.kv_heads, form.head_bytes), _NAN_BYTE, dtype=torch.uint8)
    attention = NativeAttention(library, [heads], [pages], dtype=dtype, bits=bits)
    found = []
    for first, end in ((0, 100), (100, _TOKENS - 1), (_TOKENS - 1, _TOKENS)):
        step = attention.step([ChunkInput(range(end - first), first, numbers, sample=False)])
        turns = None if angles is None else (angles[0][first:end], angles[1][first:end])
        found.append(step.attend(0, rows[first:end], turns))
    expected = _plain(heads, rows.float(), angles, dtype, form)
    return float((torch.cat(found).float() - expected).abs().max())


def _plain(
    heads: Heads, rows: Tensor, angles: tuple[Tensor, Tensor] | None, dtype: torch.dtype, form: HeadFormat
) -> Tensor:
    """Attention of all rows of one sequence [T, heads + 2 * kv_heads, head_dim], in float32, over what `form` leaves
    of keys and values."""
    turned = rows[:, : heads.heads + heads.kv_heads]
    if heads.norm is not None:
        turned.copy_(torch.nn.functional.rms_norm(turned, (heads.head_dim,), eps=heads.epsilon) * heads.norm)
    if angles is not None:
        rotate_(turned, *angles)
    if form.coded:
        kept, codec = rows[:, heads.heads :], HeadCodec(form, [rows.device])
        kept.copy_(codec.turn(codec.decode(codec.encode(kept), torch.empty_like(kept))))
    else:
        turned.copy_(turned.to(dtype))
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
