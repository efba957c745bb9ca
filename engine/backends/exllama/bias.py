"""What is added to the logits of one request's next token: penalties on its output, DRY, logit_bias and masks. Pure.

The library adds its `token_bias` after the repetition penalty and after classifier-free guidance, which is where all
of these belong, so one tensor made anew for each position says them exactly, also for positions guessed ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import SamplingParams

LONGEST_REPEAT = 64
"""Repeats are measured up to this many tokens: with any base above 1 their penalty is prohibitive long before."""

_LARGEST = 1e30  # finite, so that something is left to choose from where every token would repeat


@dataclass(frozen=True, slots=True)
class TokenBias:
    """The bias of one request.

    prompt_tokens: length of the prompt, which frequency and presence penalties leave alone.
    end_token_ids: masked before min_tokens.   first: index in the answer of the token that banned_next binds.
    """

    params: SamplingParams
    prompt_tokens: int
    end_token_ids: tuple[int, ...]
    banned_next: tuple[int, ...]
    first: int

    def next(self, known: Tensor, width: int) -> Tensor | None:
        """Float32 [width] to add for the token that follows `known` (int64 [tokens]); None where it would be zero."""
        params, output = self.params, known[self.prompt_tokens :]
        masked = self._masked(len(output))
        counts = params.frequency_penalty != 0 or params.presence_penalty != 0
        if not (masked or params.logit_bias or params.dry_multiplier > 0 or (counts and len(output))):
            return None
        bias = torch.zeros(width)
        if params.logit_bias:
            bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        if counts and len(output):
            bias -= count_penalty(output, width, params)
        if params.dry_multiplier > 0:
            bias -= dry_penalty(known, width, params)
        if masked:
            bias[masked] = -torch.inf
        return bias

    def _masked(self, index: int) -> list[int]:
        """Ids that token number `index` of the answer must not be."""
        ends: Sequence[int] = self.end_token_ids if index < self.params.min_tokens else ()
        return [*ends, *(self.banned_next if index == self.first else ())]


def count_penalty(output: Tensor, width: int, params: SamplingParams) -> Tensor:
    """Float32 [width]: frequency_penalty for each time a token of `output` came, presence_penalty once (OpenAI).

    Both fade over repetition_decay tokens beyond the last repetition_range, as the library's own penalty does.
    """
    if params.repetition_range:
        output = output[-(params.repetition_range + params.repetition_decay) :]
    weights = torch.ones(len(output))
    if params.repetition_range:
        distance = torch.arange(len(output) - 1, -1, -1)
        weights -= (distance - params.repetition_range).clamp(min=0) / max(params.repetition_decay, 1)
    penalty = torch.zeros(width).index_add_(0, output, weights, alpha=params.frequency_penalty)
    strongest = torch.zeros(width).scatter_reduce_(0, output, weights, "amax")
    return penalty.add_(strongest, alpha=params.presence_penalty)


def dry_penalty(known: Tensor, width: int, params: SamplingParams) -> Tensor:
    """Float32 [width]: for each token that would extend a repeat of the text's end, what the longest such repeat
    costs: dry_multiplier * dry_base ** (length - dry_allowed_length), nothing below dry_allowed_length tokens.

    "Don't repeat yourself" (p-e-w, text-generation-webui 2024).
    """
    penalty = torch.zeros(width)
    known = known[-params.dry_range :] if params.dry_range else known
    breakers = torch.tensor(params.dry_breaker_ids, dtype=torch.int64)
    ends, lengths = _repeats_of_the_end(known, breakers)
    extending = known[ends + 1]
    counted = (lengths >= params.dry_allowed_length) & ~torch.isin(extending, breakers)
    cost = params.dry_multiplier * params.dry_base ** (lengths[counted] - params.dry_allowed_length).double()
    return penalty.scatter_reduce_(0, extending[counted], cost.clamp(max=_LARGEST).float(), "amax")


def _repeats_of_the_end(known: Tensor, breakers: Tensor) -> tuple[Tensor, Tensor]:
    """Where earlier stretches end that equal the end of `known`, and over how many tokens they do: int64 [repeats].
    No stretch holds a breaker."""
    last = len(known) - 1
    tail = known[-LONGEST_REPEAT:]
    broken = torch.isin(tail, breakers).nonzero()
    longest = len(tail) - 1 - int(broken[-1]) if len(broken) else len(tail)
    ends = (known[:last] == known[last]).nonzero().squeeze(1)
    if longest < 1:
        ends = ends[:0]
    lengths = torch.ones_like(ends)
    alive = torch.arange(len(ends))
    for length in range(1, longest):
        alive = alive[ends[alive] >= length]
        alive = alive[known[ends[alive] - length] == known[last - length]]
        if not len(alive):
            break
        lengths[alive] += 1
    return ends, lengths
