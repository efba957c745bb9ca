"""DRY, "don't repeat yourself": a penalty on the token that would carry on a repeat of earlier text.

The sampler of p-e-w (text-generation-webui, pull request 5677, 2024). Where the last L tokens stand earlier in the
text too, the token that followed them there loses multiplier * base ** (L - allowed_length), for the longest such L
of at least allowed_length. No repeat reaches over a breaker, and no breaker loses anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backends.torch.recent import RecentTokens
from engine.config import SamplingParams

_LARGEST = 1e30  # finite, so that a row keeps a distribution however long its repeats are


class DryPenalty:
    """The repeats of one request; a new token costs one pass over the tokens looked at, not one for each length.

    lengths[d - 1] is how many of the last tokens equal those d tokens before them. A new token makes that one more
    where it equals the token d before it, and nothing elsewhere.
    """

    def __init__(self, params: SamplingParams, tokens: Sequence[int]) -> None:
        self._params = params
        self._breakers = frozenset(params.dry_breaker_ids)
        self._breaker_ids = torch.tensor(sorted(self._breakers), dtype=torch.int64)
        self._recent = RecentTokens(tokens, params.dry_range)
        lengths = _repeats(self._recent.ids.tolist(), self._breakers)
        self._lengths = torch.tensor(lengths, dtype=torch.int64)

    def push(self, token_id: int) -> None:
        """Take the next token."""
        ids = self._recent.ids
        if len(ids) > len(self._lengths):
            self._lengths = torch.cat([self._lengths, torch.zeros(len(ids), dtype=torch.int64)])
        lengths = self._lengths[: len(ids)]
        if token_id in self._breakers:
            lengths.zero_()
        else:
            lengths.add_(1).mul_(ids == token_id)
        self._recent.push(token_id)

    def penalties(self) -> tuple[Tensor, Tensor] | None:
        """(ids, what to add to their logits), both on the CPU; None while nothing repeats."""
        reach = len(self._recent) - 1
        lengths = self._lengths[:reach]
        if self._params.dry_range:  # the earlier text must lie within the range as well
            lengths = lengths.minimum(torch.arange(reach, 0, -1))
        where = (lengths >= self._params.dry_allowed_length).nonzero().squeeze(1)
        if len(self._breaker_ids):
            where = where[~torch.isin(self._recent.ids[where], self._breaker_ids)]
        if not len(where):
            return None
        ids, slots = self._recent.ids[where].unique(return_inverse=True)
        longest = torch.zeros(len(ids), dtype=torch.int64).scatter_reduce_(0, slots, lengths[where], "amax")
        excess = (longest - self._params.dry_allowed_length).double()
        loss = self._params.dry_multiplier * self._params.dry_base**excess
        return ids, -loss.clamp(max=_LARGEST).float()


def _repeats(newest_first: Sequence[int], breakers: frozenset[int]) -> list[int]:
    """How far the tokens, read backwards, repeat those d = 1, 2, ... tokens before them: the Z-function (Gusfield
    1997, section 1.3), which takes linear time, ended at the first breaker."""
    count = len(newest_first)
    limit = next((age for age, token_id in enumerate(newest_first) if token_id in breakers), count)
    lengths = [0] * count
    left = right = 0
    for lag in range(1, count):
        length = min(right - lag, lengths[lag - left]) if lag < right else 0
        while length < limit and lag + length < count and newest_first[length] == newest_first[lag + length]:
            length += 1
        lengths[lag] = length
        if lag + length > right:
            left, right = lag, lag + length
    return lengths[1:]
