"""Penalties for tokens seen before, for a whole batch at once, at a cost of the distinct tokens of penalised rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.torch.recent import RecentTokens
from engine.backends.torch.sending import sent
from engine.config import SamplingParams


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Distinct tokens of one row, all [n] on the CPU.

    uses: how often each is in the output.  repeated, used: how much of the repetition and of the presence penalty
    it gets, from 0 (none) to 1 (all).
    """

    ids: Tensor
    uses: Tensor
    repeated: Tensor
    used: Tensor


class Seen(Protocol):
    """What was seen in one request; grows by one token at a time."""

    def push(self, token_id: int) -> None:
        """Note one more output token."""

    def tokens(self) -> SeenTokens:
        """What to penalise now."""


class TokenCounts:
    """Every token of a request and how often each is in its output; grows by one token in O(1).

    prompt_ids: what the repetition penalty sees of the prompt; a token not in the output counts 0.
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
        """All of them, each with its full penalty."""
        known = len(self._slots)
        counts = self._counts[:known]
        return SeenTokens(self._ids[:known], counts, torch.ones(known), (counts > 0).float())

    def _grow(self) -> None:
        self._ids = torch.cat([self._ids, torch.zeros(len(self._ids) + 16, dtype=self._ids.dtype)])
        self._counts = torch.cat([self._counts, torch.zeros(len(self._counts) + 16)])


class TokenWindow:
    """The last tokens of a request, prompt and output. What is further back than `reach` tokens counts less and less,
    and nothing from reach + decay on (as ExLlamaV2 defines it); a step costs one pass over them.
    """

    def __init__(self, prompt_ids: Sequence[int], *, reach: int, decay: int) -> None:
        self._recent = RecentTokens(prompt_ids, reach + decay)
        self._reach = reach
        self._decay = decay
        self._output_tokens = 0

    def push(self, token_id: int) -> None:
        """Note one more output token."""
        self._recent.push(token_id)
        self._output_tokens += 1

    def tokens(self) -> SeenTokens:
        """The distinct tokens within reach; the latest use says how much a penalty fades, frequency fades per use."""
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


def seen_by(params: SamplingParams, prompt_ids: Sequence[int]) -> Seen | None:
    """What a request with these parameters keeps of its tokens; None where no penalty asks for any."""
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
    knobs = [
        rows,
        [p.repetition_penalty for p in params],
        [p.frequency_penalty for p in params],
        [p.presence_penalty for p in params],
    ]
    row, *penalties = sent(torch.tensor(knobs, dtype=torch.float64).repeat_interleave(lengths, dim=1), logits.device)
    ids, uses, repeated, used = (
        sent(torch.cat(parts), logits.device)
        for parts in zip(*((each.ids, each.uses, each.repeated, each.used) for each in seen), strict=True)
    )
    repetition, frequency, presence = (penalty.to(logits.dtype) for penalty in penalties)
    where = (row.to(torch.int64), ids)
    factor = 1 + (repetition - 1) * repeated
    value = logits[where]
    value = torch.where(value > 0, value / factor, value * factor)
    logits[where] = value - frequency * uses - presence * used
