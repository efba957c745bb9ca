"""Quadratic smoothing: the square of a logit's distance from the best one, times a factor, replaces that distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.samplers import Sampler

if TYPE_CHECKING:
    from torch import Tensor


def smooth(distances: Tensor, factor: Tensor) -> Tensor:
    """Replace distances from the best logit by their squares times the factor (kalomaze 2023, "quadratic sampling")."""
    return -factor * distances.square()


SAMPLER = Sampler(("smoothing_factor",), smooth, on="distances")
