"""Masks of tokens on a batch of logits, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from engine.backends.base import TokenMask
from engine.backends.torch.sending import sent

_BYTE = 8


def hold(logits: Tensor, masks: Mapping[int, TokenMask]) -> None:
    """Leave each row of float32 `logits` [R, V] that has a mask only what it allows, in place.

    What goes to the device is a bit per token; there, each byte of bits is looked up as eight numbers to add.
    """
    words = bytearray().join(mask.allowed() for mask in masks.values())
    bits = sent(torch.frombuffer(words, dtype=torch.uint8).view(len(masks), -1), logits.device)
    added = functional.embedding(bits.int(), _additions(logits.device)).view(len(masks), -1)[:, : logits.shape[1]]
    logits.index_add_(0, sent(torch.tensor(list(masks)), logits.device), added)


@lru_cache
def _additions(device: torch.device) -> Tensor:
    """Float32 [256, 8]: for each byte, what its bits add, the lowest one first: nothing where set, else -inf."""
    bits = torch.arange(2**_BYTE).unsqueeze(1) >> torch.arange(_BYTE) & 1
    return torch.where(bits.bool(), 0.0, -torch.inf).to(device)
