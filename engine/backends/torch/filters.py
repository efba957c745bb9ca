"""Filters that need all that is left of a distribution: [R, W] probabilities, best first, 0 where left out.

They need not add up to 1, neither before nor after.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-300  # a temperature at which the best token alone is left, yet nothing is divided by 0


def tail_free(probs: Tensor, tfs: Tensor) -> Tensor:
    """Tail free sampling (Bricken 2019): the tokens up to where the absolute second differences of the sorted
    probabilities have the share `tfs` of their sum; `tfs` more than 1 is off.

    Two tokens and equal probabilities have no tail, and stay.
    """
    left = (probs > 0).sum(dim=-1, keepdim=True)
    if probs.shape[1] < 3:
        return probs
    bends = probs.diff(n=2, dim=-1).abs()
    bends = bends * (torch.arange(bends.shape[1], device=probs.device) < left - 2)
    total = bends.sum(dim=-1, keepdim=True)
    within = (bends.cumsum(dim=-1) <= tfs * total).sum(dim=-1, keepdim=True)
    kept = torch.where((left < 3) | (total == 0) | (tfs > 1), left, 1 + within)
    return probs * (torch.arange(probs.shape[1], device=probs.device) < kept)


def typical(probs: Tensor, typical_p: Tensor) -> Tensor:
    """The fewest tokens with the mass typical_p whose surprise is closest to the entropy (locally typical, Meister
    et al. 2023)."""
    probs = probs / probs.sum(dim=-1, keepdim=True)
    surprise = -probs.log()
    entropy = -torch.xlogy(probs, probs).sum(dim=-1, keepdim=True)
    order = (surprise - entropy).abs().argsort(dim=-1, stable=True)
    ordered = probs.gather(1, order)
    kept = ordered * (ordered.cumsum(dim=-1) - ordered < typical_p)
    return torch.zeros_like(probs).scatter(1, order, kept)


def entropy_tempered(probs: Tensor, low: Tensor, high: Tensor, exponent: Tensor) -> Tensor:
    """Dynamic temperature (kalomaze 2023, "entropy sampling"): between `low` where one token has all the probability
    and `high` where the tokens left are equally likely, [R, 1]; the share of the greatest entropy, to the power of
    `exponent`, says where between."""
    probs = probs / probs.sum(dim=-1, keepdim=True)
    entropy = -torch.xlogy(probs, probs).sum(dim=-1, keepdim=True)
    greatest = (probs > 0).sum(dim=-1, keepdim=True).double().log()
    share = torch.where(greatest > 0, entropy / greatest, 0.0).clamp(0.0, 1.0)
    return (low + (high - low) * share**exponent).clamp(min=_TINY)


def without_top_choices(probs: Tensor, ids: Tensor, threshold: Tensor, ends: Tensor) -> Tensor:
    """XTC, "exclude top choices" (p-e-w, text-generation-webui, pull request 6335, 2024), for rows whose coin fell so:
    of the tokens with at least the probability `threshold`, all but the least likely are left out.

    ids: the tokens [R, W].  ends: [R, E] ids that take no part, so that an answer can end.
    """
    probs = probs / probs.sum(dim=-1, keepdim=True)
    above = (probs > 0) & (probs >= threshold)
    for end in ends.unbind(dim=1):
        above &= ids != end.unsqueeze(1)
    last = above.sum(dim=-1, keepdim=True)
    return probs.masked_fill(above & (above.cumsum(dim=-1) < last), 0.0)
