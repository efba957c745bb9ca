"""Tail-free sampling: cut where the sorted probabilities stop bending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.samplers import Sampler

if TYPE_CHECKING:
    from torch import Tensor


def tail_free(probs: Tensor, tfs: Tensor) -> Tensor:
    """Keep the tokens up to where the absolute second differences have the share `tfs` of their sum (Bricken 2019).

    Two tokens and equal probabilities have no tail, and stay.
    """
    count = (probs > 0).sum(dim=-1, keepdim=True)
    if probs.shape[1] < 3:
        return probs
    position = probs.new_ones(probs.shape[1]).cumsum(dim=0)  # from 1
    bends = probs.diff(n=2, dim=-1).abs() * (position[:-2] <= count - 2)
    total = bends.sum(dim=-1, keepdim=True)
    within = 1 + (bends.cumsum(dim=-1) <= tfs * total).sum(dim=-1, keepdim=True)
    return probs * (position <= within.where((count >= 3) & (total > 0), count))


SAMPLER = Sampler(("tfs",), tail_free, on="probabilities")
