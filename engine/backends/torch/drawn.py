"""What was drawn for the rows of a batch, on the device until somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.base import TokenLogprob
from engine.backends.torch.draw import rank
from engine.backends.torch.sending import sent


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, with its log-probability where the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class DrawnLogprobs:
    """Log-probabilities of the tokens drawn in some rows.

    wanted: how many alternatives, by row.  own [W]: of the tokens themselves.  top_ids, top [W, most that are wanted]:
    the likeliest tokens, best first, and theirs.
    """

    wanted: dict[int, int]
    own: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """ids [R]: the token of each row, -1 where there is nothing to draw from."""

    ids: Tensor
    logprobs: DrawnLogprobs | None = None

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Drawn:
        """The same with all tensors copied by `copy`."""
        logs = self.logprobs
        if logs is not None:
            logs = DrawnLogprobs(logs.wanted, copy(logs.own), copy(logs.top_ids), copy(logs.top))
        return Drawn(copy(self.ids), logs)

    def tokens(self) -> list[SampledToken | None]:
        """Read it: a token of each row, None where nothing was drawn."""
        chosen: list[int] = self.ids.tolist()
        logprobs = {} if self.logprobs is None else _told(self.logprobs, chosen)
        return [None if token < 0 else SampledToken(token, logprobs.get(index)) for index, token in enumerate(chosen)]


def drawn_logprobs(logits: Tensor, ids: Tensor, wanted: Sequence[int | None]) -> DrawnLogprobs | None:
    """Log-probabilities of `ids` [R] by the model's own float32 `logits` [R, V], of the rows that want them with so
    many alternatives; None where none does."""
    counts = {row: count for row, count in enumerate(wanted) if count is not None}
    if not counts:
        return None
    if len(counts) < len(wanted):
        rows = sent(torch.tensor(list(counts)), logits.device)
        logits, ids = logits.index_select(0, rows), ids.index_select(0, rows)
    logs = logits.log_softmax(dim=-1)
    own = logs.gather(1, ids.clamp(min=0).unsqueeze(1)).squeeze(1)
    width = min(max(counts.values()), logits.shape[1])
    top_ids = rank(logits, width) if width else torch.zeros(len(counts), 0, dtype=torch.int64, device=logits.device)
    return DrawnLogprobs(counts, own, top_ids, logs.gather(1, top_ids))


def _told(logprobs: DrawnLogprobs, chosen: Sequence[int]) -> dict[int, TokenLogprob]:
    """Those of the rows that a token was drawn for."""
    each = zip(logprobs.own.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
    return {
        row: TokenLogprob(token_id=chosen[row], logprob=own, top=tuple(zip(ids[:count], logs[:count], strict=True)))
        for (row, count), (own, ids, logs) in zip(logprobs.wanted.items(), each, strict=True)
        if chosen[row] >= 0
    }
