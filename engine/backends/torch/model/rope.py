"""Rotary position embedding (Su et al. 2021) and the ways to stretch it; angles are always computed in float32."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from engine.backends.common.rope_config import RopeConfig
from engine.backends.torch_device import one_thread

Angles = tuple[Tensor, Tensor]
"""cos and sin of the rotation angles of a step's positions."""


class RotaryEmbedding:
    """Rotates query and key heads, or a part of each, by angles proportional to their positions.

    Angles are computed per step instead of stored in a table: a step has few positions, and a long context would need a
    large table. Native steps, for which this takes too long, have one (`native.stack.AngleTable`).
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies, self._scale = inverse_frequencies(config, head_dim)
        self._frequencies = torch.cat((frequencies, frequencies)).to(device)
        scale = torch.full_like(frequencies, self._scale)
        self._sine_scale = torch.cat((-scale, scale)).to(device)

    @property
    def rotated_dims(self) -> int:
        """How many dimensions of a head are rotated."""
        return len(self._frequencies)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Return (cos, sin) for int positions [T], each [T, 1, rotated dimensions] in `dtype`; sin's first half is
        negated."""
        with one_thread() if positions.device.type == "cpu" else nullcontext():
            radians = positions.float()[:, None, None] * self._frequencies
            cos, sin = radians.cos(), radians.sin() * self._sine_scale
            if self._scale != 1.0:
                cos *= self._scale
        return cos.to(dtype), sin.to(dtype)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first dimensions of `heads` [T, H, head_dim] in place by `angles`, one half against the other."""
    rotated = heads[..., : cos.shape[-1]]
    swapped = rotated.roll(rotated.shape[-1] // 2, dims=-1)
    rotated.mul_(cos).addcmul_(swapped, sin)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return radians per position, float32 [rotated dimensions / 2], and the factor of cos and sin."""
    dims = config.rotary_dims(head_dim)
    base = _base(config, dims)
    frequencies = 1.0 / (base ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims))
    scale = 1.0
    match config.kind:
        case "linear":
            frequencies = frequencies / config.factor
        case "llama3":
            frequencies = _llama3(config, frequencies)
        case "yarn":
            frequencies = _yarn(config, frequencies, base)
            scale = _yarn_attention_factor(config)
        case "longrope":
            frequencies = frequencies / torch.tensor(_longrope_factors(config))
            scale = _longrope_attention_factor(config)
    return frequencies / config.compress, scale


def _base(config: RopeConfig, dims: int) -> float:
    """Return the base, scaled by NTK-aware alpha: base * alpha^(d / (d - 2)) (u/bloc97, r/LocalLLaMA 2023).

    The original "dynamic" increases alpha with the sequence; here it is fixed for the longest possible sequence, so
    that a token's key never depends on its sequence's final length.
    """
    alpha = config.alpha
    if config.kind == "dynamic":
        ratio = max(1.0, config.max_positions / config.original_max_positions)
        alpha *= config.factor * ratio - (config.factor - 1.0)
    return config.theta * alpha ** (dims / (dims - 2)) if alpha != 1.0 else config.theta


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: divide low frequencies by the factor, keep high ones, blend those between."""
    wavelengths = 2 * math.pi / frequencies
    radians = config.original_max_positions / wavelengths
    blend = (radians - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(config: RopeConfig, frequencies: Tensor, base: float) -> Tensor:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, ramp between."""
    size = 2 * len(frequencies)

    def dimension(rotations: float) -> float:
        return size * math.log(config.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0.0, 1.0)
    return ramp * frequencies / config.factor + (1 - ramp) * frequencies


def _yarn_attention_factor(config: RopeConfig) -> float:
    """Return YaRN's attention temperature, folded into cos and sin: configured, or 0.1 ln(factor) + 1."""
    if config.attention_factor is not None:
        return config.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def _longrope_factors(config: RopeConfig) -> tuple[float, ...]:
    """LongRoPE (Ding et al. 2024): a factor per frequency.

    The original chooses between the two lists by the sequence's length; here by the longest possible sequence, so that
    a token's key never depends on its sequence's final length.
    """
    long = config.max_positions > config.original_max_positions
    return config.long_factors if long else config.short_factors


def _longrope_attention_factor(config: RopeConfig) -> float:
    """Return the configured factor, or that of the paper for the extension of the context."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_positions))
