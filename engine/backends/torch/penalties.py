"""Penalties for tokens seen before, for a whole batch at once, at a cost of the distinct tokens of penalised rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class TokenCounts:
    """The distinct tokens of one request and how often each is in its output; grows by one token in O(1).

    `ids` [n] int64 and `counts` [n] float32 are views on the CPU; a prompt token not in the output counts 0.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._ids = torch.tensor(distinct, dtype=torch.int64)
        self._counts = torch.zeros(len(distinct), dtype=torch.float32)

    def push(self, token_id: int) -> None:
        """Count one more output token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot >= len(self._ids):
            self._grow()
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> Tensor:
        """Distinct token ids, [n]."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        """How often each of `ids` is in the output, [n]."""
        return self._counts[: len(self._slots)]

    def _grow(self) -> None:
        self._ids = torch.cat([self._ids, torch.zeros(len(self._ids) + 16, dtype=self._ids.dtype)])
        self._counts = torch.cat([self._counts, torch.zeros(len(self._counts) + 16)])


def penalise(
    logits: Tensor,
    rows: Sequence[int],
    seen: Sequence[TokenCounts],
    *,
    repetition: Sequence[float],
    frequency: Sequence[float],
    presence: Sequence[float],
) -> None:
    """Apply the penalties of row rows[i] to `logits` [R, V] in place.

    Repetition (CTRL, Keskar et al. 2019): the logit of a token in prompt or output is divided by it where positive,
    multiplied where negative. Then frequency times its count in the output, and presence where that is not zero,
    are taken off (OpenAI).
    """
    lengths = torch.tensor([len(tokens.ids) for tokens in seen])
    knobs = torch.tensor([rows, repetition, frequency, presence], dtype=torch.float64).repeat_interleave(lengths, dim=1)
    ids = torch.cat([tokens.ids for tokens in seen]).to(logits.device)
    counts = torch.cat([tokens.counts for tokens in seen]).to(logits.device)
    row = knobs[0].to(device=logits.device, dtype=torch.int64)
    factor, per_use, once = knobs[1:].to(device=logits.device, dtype=logits.dtype)
    value = logits[row, ids]
    value = torch.where(value > 0, value / factor, value * factor)
    logits[row, ids] = value - per_use * counts - once * (counts > 0)
