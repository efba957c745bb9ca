"""Penalties for tokens seen before, for a whole batch at once, at a cost of the distinct tokens of penalised rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.sampling.sampling_tensors import to_device
from engine.config import SamplingParams

# The last tokens of a sequence, newest first, in a tensor that grows in constant time.

_SPARE = 64


class RecentTokens:
    """The last `limit` tokens (all of them where it is 0); their order makes "how long ago" an index."""

    def __init__(self, tokens: Sequence[int], limit: int = 0) -> None:
        self._limit = limit
        recent = tokens[-limit:] if limit else tokens
        self._buffer = torch.zeros(len(recent) + _SPARE, dtype=torch.int64)
        self._start = _SPARE
        self._buffer[_SPARE:] = torch.tensor(recent, dtype=torch.int64).flip(0)

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
        length = len(self._buffer) - self._start
        return min(length, self._limit) if self._limit else length


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Distinct tokens of one row, all [n] on the CPU.

    uses: how often each is in the output.  repeated, used: how much of the repetition and of the presence penalty
    applies, from 0 (none) to 1 (all).
    """

    ids: Tensor
    uses: Tensor
    repeated: Tensor
    used: Tensor


class TokenHistory(Protocol):
    """The tokens of one request that penalties look at; grows by one at a time."""

    def push(self, token_id: int) -> None:
        """Add an output token."""

    def tokens(self) -> SeenTokens:
        """Return the tokens to penalise now."""


class TokenCounts:
    """Every token of a request and how often each is in its output; grows by one token in O(1).

    prompt_ids: tokens of the prompt that the repetition penalty looks at; one that is not in the output counts 0.
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

    def tokens(self) -> SeenTokens:
        """Return all of them, each with its full penalty."""
        distinct = len(self._slots)
        counts = self._counts[:distinct]
        return SeenTokens(self._ids[:distinct], counts, torch.ones(distinct), (counts > 0).float())

    def _grow(self) -> None:
        self._ids = torch.cat([self._ids, torch.zeros(len(self._ids) + 16, dtype=self._ids.dtype)])
        self._counts = torch.cat([self._counts, torch.zeros(len(self._counts) + 16)])


class TokenWindow:
    """The last tokens of a request, prompt and output. Beyond `reach` tokens their weight falls, to 0 from reach +
    decay on (as ExLlamaV2 defines it); a step costs one pass over them.
    """

    def __init__(self, prompt_ids: Sequence[int], *, reach: int, decay: int) -> None:
        self._recent = RecentTokens(prompt_ids, reach + decay)
        self._reach = reach
        self._decay = decay
        self._output_tokens = 0

    def push(self, token_id: int) -> None:
        """Add an output token."""
        self._recent.push(token_id)
        self._output_tokens += 1

    def tokens(self) -> SeenTokens:
        """Return the distinct tokens within reach. A penalty fades by the latest use, frequency by each use."""
        ids, slots = self._recent.ids.unique(return_inverse=True)
        ages = torch.arange(len(slots))
        weights = 1 - (ages - self._reach).clamp(min=0) / max(self._decay, 1)
        in_output = weights * (ages < self._output_tokens)
        zeros = torch.zeros(len(ids))
        return SeenTokens(
            ids,
            uses=zeros.scatter_add(0, slots, in_output),
            repeated=zeros.scatter_reduce(0, slots, weights, "amax"),
            used=zeros.scatter_reduce(0, slots, in_output, "amax"),
        )


def token_history(params: SamplingParams, prompt_ids: Sequence[int]) -> TokenHistory | None:
    """Return the history that the penalties of a request look at; None where it has no penalty."""
    if params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0:
        return None
    if params.repetition_range:
        return TokenWindow(prompt_ids, reach=params.repetition_range, decay=params.repetition_decay)
    return TokenCounts(prompt_ids if params.repetition_penalty != 1 else ())


def penalise(logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], seen: Sequence[SeenTokens]) -> None:
    """Apply the penalties of row rows[i] to `logits` [R, V] in place.

    Repetition (CTRL, Keskar et al. 2019): the logit of a token in prompt or output is divided by it where positive,
    multiplied where negative. Then frequency times its count in the output, and presence where that is not zero,
    are taken off (OpenAI).
    """
    lengths = torch.tensor([len(tokens.ids) for tokens in seen])
    values = [
        rows,
        [p.repetition_penalty for p in params],
        [p.frequency_penalty for p in params],
        [p.presence_penalty for p in params],
    ]
    row, *penalties = to_device(
        torch.tensor(values, dtype=torch.float64).repeat_interleave(lengths, dim=1), logits.device
    )
    ids, uses, repeated, used = (
        to_device(torch.cat(parts), logits.device)
        for parts in zip(*((each.ids, each.uses, each.repeated, each.used) for each in seen), strict=True)
    )
    repetition, frequency, presence = (penalty.to(logits.dtype) for penalty in penalties)
    where = (row.to(torch.int64), ids)
    factor = 1 + (repetition - 1) * repeated
    value = logits[where]
    value = torch.where(value > 0, value / factor, value * factor)
    logits[where] = value - frequency * uses - presence * used


# DRY, "don't repeat yourself": a penalty on the token that would carry on a repeat of earlier text.
#
# The sampler of p-e-w (text-generation-webui, pull request 5677, 2024). Where the last L tokens stand earlier in the
# text too, the token that followed them there loses multiplier * base ** (L - allowed_length), for the longest such L
# of at least allowed_length. No repeat reaches over a breaker, and no breaker loses anything.

_LARGEST = 1e30  # finite, so that a row keeps a distribution however long its repeats are


class DryPenalty:
    """The repeats of one request; a new token costs one pass over the tokens in range, not one for each length.

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
        """Add the next token."""
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
        """Return ids and the values to add to their logits, both on the CPU; None while nothing repeats."""
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
    """Return how far the tokens, read backwards, repeat those d = 1, 2, ... tokens before them.

    That is the Z-function (Gusfield 1997, section 1.3), in linear time, ended at the first breaker.
    """
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
