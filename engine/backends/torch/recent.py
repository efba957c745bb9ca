"""The last tokens of a sequence, newest first, in a tensor that grows in constant time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SPARE = 64


class RecentTokens:
    """The last `limit` tokens (all of them where it is 0); their order makes "how long ago" an index."""

    def __init__(self, tokens: Sequence[int], limit: int = 0) -> None:
        self._limit = limit
        kept = tokens[-limit:] if limit else tokens
        self._buffer = torch.zeros(len(kept) + _SPARE, dtype=torch.int64)
        self._start = _SPARE
        self._buffer[_SPARE:] = torch.tensor(kept, dtype=torch.int64).flip(0)

    def push(self, token_id: int) -> None:
        """Put one more token before the others."""
        if self._start == 0:
            ids = self.ids
            self._start = len(ids) + _SPARE
            self._buffer = torch.cat([torch.zeros(self._start, dtype=torch.int64), ids])
        self._start -= 1
        self._buffer[self._start] = token_id

    @property
    def ids(self) -> Tensor:
        """Token ids [n] int64 on the CPU, newest first; a view, good until the next push."""
        ids = self._buffer[self._start :]
        return ids[: self._limit] if self._limit else ids

    def __len__(self) -> int:
        held = len(self._buffer) - self._start
        return min(held, self._limit) if self._limit else held
