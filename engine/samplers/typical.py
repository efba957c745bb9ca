"""Locally typical sampling: the tokens whose surprise is closest to the entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.samplers import Sampler

if TYPE_CHECKING:
    from torch import Tensor


def typical(probs: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the fewest tokens with the mass `typical_p` closest to the entropy in surprise (Meister et al. 2023)."""
    probs = probs / probs.sum(dim=-1, keepdim=True)
    surprise = -probs.log()
    entropy = -probs.xlogy(probs).sum(dim=-1, keepdim=True)
    order = (surprise - entropy).abs().argsort(dim=-1, stable=True)
    ordered = probs.gather(1, order)
    ordered = ordered * (ordered.cumsum(dim=-1) - ordered < typical_p)
    return probs.new_zeros(probs.shape).scatter(1, order, ordered)


SAMPLER = Sampler(("typical_p",), typical, on="probabilities")
