"""Rotary position embedding by config.json, as a frozen, checked value. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

from engine.backends.common.config_values import (
    MAX_TOKENS,
    number,
    numbers,
    optional_number,
    positive,
    positive_number,
    refusal,
    source_of,
)
from engine.backends.common.families.base import RawConfig
from engine.config import quote_value
from engine.errors import UnsupportedModel

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]

_EARLY_LONGROPE = ("su", "yarn")
"""What longrope, known by its list of long factors, was called in its first folders."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: a base, a scaling kind with its constants (config.json's names), and what settings add.

    rotary_fraction: the part of each head that is rotated, its first dimensions.
    original_max_positions: context length that the model was trained at before scaling.  max_positions: the length
    that "dynamic" and "longrope" must reach.  short_factors, long_factors: what "longrope" divides each frequency by
    up to the original length, and beyond.
    alpha: NTK stretch of the base.  compress: positions are divided by it.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotary_fraction: float = 1.0
    alpha: float = 1.0
    compress: float = 1.0

    def rotary_dims(self, head_dim: int) -> int:
        """Return how many of a head's dimensions are rotated."""
        return int(head_dim * self.rotary_fraction)


def read_ropes(raw: RawConfig, max_positions: int, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """RoPE from `rope_parameters` (transformers 5) or `rope_scaling` + `rope_theta` (before it), and that of the layers
    with a window where they have their own. Raises UnsupportedModel, naming what is malformed or unknown."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{source_of(raw).file}'s rope_scaling is not an object")
    kinds = {kind: found.get(kind) for kind in ("full_attention", "sliding_attention")}
    by_kind = {kind: each for kind, each in kinds.items() if isinstance(each, dict)}
    rope = _read_rope(raw, by_kind.get("full_attention", {}) if by_kind else found, max_positions, head_dim)
    if not by_kind and raw.get("rope_local_base_freq") is None:
        return rope, None
    local = {**raw, "rope_theta": positive_number(raw, "rope_local_base_freq", rope.theta)}
    return rope, _read_rope(local, by_kind.get("sliding_attention", {}), max_positions, head_dim)


def _read_rope(raw: RawConfig, found: RawConfig, max_positions: int, head_dim: int) -> RopeConfig:
    rope: RawConfig = {key: value for key, value in found.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in _EARLY_LONGROPE and "long_factor" in rope:
        kind = "longrope"
    if not _is_rope_kind(kind):
        raise UnsupportedModel(
            f"unsupported RoPE scaling: {quote_value(kind)} (supported: {', '.join(get_args(RopeKind))})"
        )
    original = _original_length(raw, rope, kind, max_positions)
    read = RopeConfig(
        theta=positive_number(rope, "rope_theta", positive_number(raw, "rope_theta", 10_000.0)),
        kind=kind,
        factor=positive_number(rope, "factor", max_positions / original if kind in ("yarn", "longrope") else 1.0),
        original_max_positions=original,
        max_positions=max_positions,
        low_freq_factor=number(rope, "low_freq_factor", 1.0),
        high_freq_factor=number(rope, "high_freq_factor", 4.0),
        beta_fast=positive_number(rope, "beta_fast", 32.0),
        beta_slow=positive_number(rope, "beta_slow", 1.0),
        attention_factor=optional_number(rope, "attention_factor"),
        mscale=optional_number(rope, "mscale"),
        mscale_all_dim=optional_number(rope, "mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
        short_factors=numbers(rope, "short_factor") if kind == "longrope" else (),
        long_factors=numbers(rope, "long_factor") if kind == "longrope" else (),
        rotary_fraction=number(rope, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0)),
    )
    _refuse_misfit(raw, read, head_dim)
    return read


def _original_length(raw: RawConfig, rope: RawConfig, kind: RopeKind, max_positions: int) -> int:
    """Where the scaling of this kind starts from; Phi-3 says it outside the scaling's own object."""
    if kind == "dynamic":
        return max_positions
    key = "original_max_position_embeddings"
    outside = positive(raw, key, 0, most=MAX_TOKENS) if kind == "longrope" and raw.get(key) is not None else None
    return outside or positive(rope, key, max_positions, most=MAX_TOKENS)


def _refuse_misfit(raw: RawConfig, rope: RopeConfig, head_dim: int) -> None:
    source = source_of(raw)
    file, name_of = source.file, source.name_of
    dims = rope.rotary_dims(head_dim)
    if not 0 < rope.rotary_fraction <= 1 or dims < 2 or dims % 2:
        raise UnsupportedModel(
            f"{file} has {name_of('partial_rotary_factor')} = {rope.rotary_fraction:g}, which rotates {dims} of a "
            f"head's {head_dim} dimensions; it must be an even number of them"
        )
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != dims // 2:
            raise UnsupportedModel(f"{file} has {len(factors)} numbers in {name_of(name)}; it takes {dims // 2}")
        if any(factor <= 0 for factor in factors):
            raise UnsupportedModel(f"{file} has numbers in {name_of(name)} that are not more than 0")
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        least = f"it must be more than low_freq_factor, {rope.low_freq_factor:g}"
        raise refusal(raw, "high_freq_factor", rope.high_freq_factor, least)
    if rope.kind == "yarn" and rope.theta <= 1:
        raise refusal(raw, "rope_theta", rope.theta, "with yarn it must be more than 1")
    for name, scale in (("mscale", rope.mscale), ("mscale_all_dim", rope.mscale_all_dim)):
        if rope.kind == "yarn" and (scale or 0.0) < 0:
            raise refusal(raw, name, scale, "it must be 0 or more")
    if rope.kind == "longrope" and (rope.original_max_positions < 2 or not math.isfinite(rope.factor)):
        original = name_of("original_max_position_embeddings")
        raise UnsupportedModel(f"{file} has longrope with no {original} to stretch")


def _is_rope_kind(value: object) -> TypeGuard[RopeKind]:
    return value in get_args(RopeKind)
