"""The next token of every row of a batch of logits, at the cost of only what some row uses.

The order, per row: repetition, then frequency and presence penalty; logit_bias, DRY, end tokens masked before
min_tokens, tokens banned at this position, and all that a mask does not allow; then greedy (temperature 0:
exact argmax, the lowest id among equals), or temperature, filters and a draw (see `draw`). Nothing is random but a
function of the row's seed and position, so that an answer does not depend on what else is in the batch, on
preemption, or on the worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from engine.backends.base import TokenLogprob, TokenMask
from engine.backends.sampling.draw import UNDECIDED, draw_filtered, draw_plain, rank
from engine.backends.sampling.penalties import DryPenalty, penalise, token_history
from engine.backends.sampling.sampling_tensors import (
    FIRST_LOOK,
    WIDER,
    Draw,
    SamplingTensors,
    columns,
    is_bounded,
    is_filtered,
    to_device,
    used_samplers,
)
from engine.backends.torch_device import one_thread
from engine.config import SamplingParams

# Masks of tokens on a batch of logits, all at once.

_BYTE = 8


def apply_masks(logits: Tensor, masks: Mapping[int, TokenMask]) -> None:
    """Leave each row of float32 `logits` [R, V] that has a mask only what it allows, in place.

    One bit per token is copied to the device; there, each byte of bits is looked up as eight numbers to add.
    """
    words = bytearray().join(mask.bitmask() for mask in masks.values())
    bits = to_device(torch.frombuffer(words, dtype=torch.uint8).view(len(masks), -1), logits.device)
    added = functional.embedding(bits.int(), _additions(logits.device)).view(len(masks), -1)[:, : logits.shape[1]]
    logits.index_add_(0, to_device(torch.tensor(list(masks)), logits.device), added)


@lru_cache
def _additions(device: torch.device) -> Tensor:
    """Float32 [256, 8]: for each byte, the numbers that its bits add, the lowest first: 0 where set, else -inf."""
    bits = torch.arange(2**_BYTE).unsqueeze(1) >> torch.arange(_BYTE) & 1
    return torch.where(bits.bool(), 0.0, -torch.inf).to(device)


# The tokens drawn for the rows of a batch, on the device until they are read.


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, with its log-probability where the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the tokens drawn in some rows.

    wanted: number of alternatives, by row.  own [W]: of the tokens themselves.  top_ids, top [W, largest number]: the
    likeliest tokens, best first, and theirs.
    """

    wanted: dict[int, int]
    own: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """ids [R]: the token of each row, -1 where there is nothing to draw from.

    logits: a copy of the rows' logits, on their device, where an id may be UNDECIDED; else None.
    """

    ids: Tensor
    logprobs: SampledLogprobs | None = None
    logits: Tensor | None = None

    def map_tensors(self, copy: Callable[[Tensor], Tensor]) -> SamplerOutput:
        """The same with all tensors but `logits` copied by `copy`."""
        logs = self.logprobs
        if logs is not None:
            logs = SampledLogprobs(logs.wanted, copy(logs.own), copy(logs.top_ids), copy(logs.top))
        return SamplerOutput(copy(self.ids), logs, self.logits)

    def draw_undecided(self, rows: Sequence[SampleRow]) -> dict[int, SampledToken | None]:
        """Draw for the rows that are UNDECIDED, as their numbers say on the host; by row. Later draws of those look at
        more tokens from the start, as what made the distribution flat is mostly a parameter."""
        if self.logits is None:
            return {}
        index = [row for row, token in enumerate(self.ids.tolist()) if token == UNDECIDED]
        if not index:
            return {}
        for row in index:
            rows[row].look *= WIDER
        logits = self.logits.index_select(0, to_device(torch.tensor(index), self.logits.device))
        return dict(zip(index, sample(logits, [rows[row] for row in index]), strict=True))

    def tokens(self) -> list[SampledToken | None]:
        """Read a token of each row, None where nothing was drawn."""
        chosen: list[int] = self.ids.tolist()
        logprobs = {} if self.logprobs is None else _token_logprobs(self.logprobs, chosen)
        return [None if token < 0 else SampledToken(token, logprobs.get(index)) for index, token in enumerate(chosen)]


def sampled_logprobs(logits: Tensor, ids: Tensor, wanted: Sequence[int | None]) -> SampledLogprobs | None:
    """Log-probabilities of `ids` [R] by the model's own float32 `logits` [R, V], of the rows that want them, with
    that number of alternatives; None where none does."""
    counts = {row: count for row, count in enumerate(wanted) if count is not None}
    if not counts:
        return None
    if len(counts) < len(wanted):
        rows = to_device(torch.tensor(list(counts)), logits.device)
        logits, ids = logits.index_select(0, rows), ids.index_select(0, rows)
    logs = logits.log_softmax(dim=-1)
    own = logs.gather(1, ids.clamp(min=0).unsqueeze(1)).squeeze(1)
    width = min(max(counts.values()), logits.shape[1])
    top_ids = rank(logits, width) if width else torch.zeros(len(counts), 0, dtype=torch.int64, device=logits.device)
    return SampledLogprobs(counts, own, top_ids, logs.gather(1, top_ids))


def _token_logprobs(logprobs: SampledLogprobs, chosen: Sequence[int]) -> dict[int, TokenLogprob]:
    """Those of the rows that a token was drawn for."""
    each = zip(logprobs.own.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
    return {
        row: TokenLogprob(token_id=chosen[row], logprob=own, top=tuple(zip(ids[:count], logs[:count], strict=True)))
        for (row, count), (own, ids, logs) in zip(logprobs.wanted.items(), each, strict=True)
        if chosen[row] >= 0
    }


FindBest = Callable[[Tensor], Tensor]
"""Finds the id of the highest of each row of float32 logits [R, V]; see `best_tokens`."""

_FEW = 1 << 19
"""Logits of which one thread of a CPU finds the best tokens within half a millisecond."""

NOT_FINITE = "the model produced no finite probabilities"


class SampleRow:
    """One request's state in sampling, updated with every token, so that a step costs no walk over its tokens.

    look: how many of the best tokens its filters look at first.

    position: index of the next token.      output_tokens: number of output tokens so far.
    banned_next: ids that the next token must not be.
    mask: of the tokens that are allowed after `generated`, None for all. It decides on end tokens, too.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        generated: Sequence[int] = (),
        end_token_ids: Sequence[int] = (),
        banned_next: Sequence[int] = (),
        mask: TokenMask | None = None,
    ) -> None:
        self.params = params
        self.position = len(prompt_ids) + len(generated)
        self.output_tokens = len(generated)
        self.greedy = params.temperature == 0
        self.look = FIRST_LOOK
        self.samplers = used_samplers(params)
        self.bounded = is_bounded(params)
        self.filtered = is_filtered(params, self.samplers)
        self.end_token_ids = tuple(end_token_ids)
        self.bias = _as_tensors(params.logit_bias)
        self.mask = mask
        self.end_mask = _mask(end_token_ids) if params.min_tokens and mask is None else None
        self.next_mask = _mask(banned_next)
        self.seen = token_history(params, prompt_ids)
        if self.seen is not None:
            for token_id in generated:
                self.seen.push(token_id)
        self.dry = DryPenalty(params, [*prompt_ids, *generated]) if params.dry_multiplier > 0 else None

    def push(self, token_id: int) -> None:
        """Add the token that was chosen."""
        self.position += 1
        self.output_tokens += 1
        self.next_mask = None
        if self.mask is not None:
            self.mask.accept(token_id)
        if self.seen is not None:
            self.seen.push(token_id)
        if self.dry is not None:
            self.dry.push(token_id)

    @property
    def no_token_reason(self) -> str:
        """Why no token could be drawn for it."""
        failed = self.mask is not None and self.mask.error
        return f"its grammar allows no further token: {failed}" if failed else NOT_FINITE

    @property
    def foreseeable(self) -> bool:
        """True if the draw of a later token depends on the tokens before it only by the logits."""
        return self.seen is None and self.dry is None and self.mask is None

    def ahead(self, tokens: int) -> SampleRow:
        """Return the row of the token that many tokens later; only where it is `foreseeable`."""
        if not tokens:
            return self
        row = copy.copy(self)
        row.position += tokens
        row.output_tokens += tokens
        row.next_mask = None
        return row

    @property
    def additions(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of ids and values to add to the logits now."""
        end_mask = self.end_mask if self.output_tokens < self.params.min_tokens else None
        dry = None if self.dry is None else self.dry.penalties()
        return [pair for pair in (self.bias, dry, end_mask, self.next_mask) if pair is not None]

    def draw(self) -> Draw:
        """Return the next draw."""
        return Draw(self.params, self.position, self.end_token_ids, self.samplers, self.look)


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | None]:
    """The next token of each row of float32 `logits` [R, V], which stay as they are.

    None for a row that has no distribution to draw from: a NaN or infinite logit, or every token masked.
    """
    return draw(logits, rows).tokens()


def choose(logits: Tensor, rows: Sequence[SampleRow], best: Tensor | None = None) -> list[int]:
    """Return the ids of `sample`, -1 for none. best: of the logits, by `best_tokens`, where that is known."""
    ids, _ = _choose(logits, rows, wait=True, find_best=best_tokens, best=best)
    chosen: list[int] = ids.tolist()
    return chosen


def best_tokens(logits: Tensor) -> Tensor:
    """Return the id of the highest of each row of [R, V] logits, the lowest among equals; -1 where that is not finite,
    or a logit is NaN."""
    with one_thread() if logits.device.type == "cpu" and logits.numel() <= _FEW else nullcontext():
        best, ids = logits.max(dim=-1)
    return torch.where(best.isfinite(), ids, -1)


def draw(
    logits: Tensor,
    rows: Sequence[SampleRow],
    *,
    wait: bool = True,
    find_best: FindBest = best_tokens,
    best: Tensor | None = None,
) -> SamplerOutput:
    """Return the same as `sample`, still on the logits' device.

    find_best: does what `best_tokens` does.  best: what it returns for the logits, where that is known.

    It waits for them only where filters have to look at more than the best few tokens; without `wait` such rows are
    UNDECIDED until `draw_undecided`.
    """
    ids, decided = _choose(logits, rows, wait=wait, find_best=find_best, best=best)
    logprobs = sampled_logprobs(logits, ids, [row.params.logprobs for row in rows])
    return SamplerOutput(ids, logprobs, None if decided else logits.clone())


def _choose(
    logits: Tensor, rows: Sequence[SampleRow], *, wait: bool, find_best: FindBest, best: Tensor | None
) -> tuple[Tensor, bool]:
    """Return the ids, and False if one may be UNDECIDED."""
    edited = _edit(logits, rows)
    if best is None or edited is not logits:
        best = find_best(edited)
    drawn = [index for index, row in enumerate(rows) if not row.greedy]
    if not drawn:
        return best, True
    tokens = best.clone()
    plain = [index for index in drawn if not rows[index].filtered]
    few = [index for index in drawn if rows[index].filtered and rows[index].bounded]
    whole = [index for index in drawn if rows[index].filtered and not rows[index].bounded]
    decided = True
    if plain:
        _draw(edited, rows, plain, tokens, _draw_plain)
    for index in (few, whole):  # apart, so that no row has the whole vocabulary sorted for another's sake
        if index:
            decided &= _draw(edited, rows, index, tokens, partial(_draw_filtered, wait=wait))
    return torch.where(best < 0, best, tokens), decided


def _draw(
    logits: Tensor,
    rows: Sequence[SampleRow],
    index: list[int],
    tokens: Tensor,
    draw: Callable[[Tensor, Sequence[Draw]], tuple[Tensor, bool]],
) -> bool:
    """Fill `tokens` at `index` with a draw from those rows; return False if one may be UNDECIDED."""
    where = to_device(torch.tensor(index), logits.device)
    drawn, decided = draw(logits if len(index) == len(rows) else logits[where], [rows[i].draw() for i in index])
    tokens[where] = drawn
    return decided


def _draw_plain(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, bool]:
    temperature, noise = columns(
        [[draw.params.temperature for draw in draws], [draw.noise() for draw in draws]], logits.device
    )
    return draw_plain(logits, temperature, noise), True


def _draw_filtered(logits: Tensor, draws: Sequence[Draw], *, wait: bool) -> tuple[Tensor, bool]:
    batch = SamplingTensors.from_draws(draws, logits.shape[1], logits.device)
    return draw_filtered(logits, batch, wait=wait), wait or batch.suffices


def _edit(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return the logits after penalties, biases and masks; the same tensor where no row has any."""
    added = [(index, pair) for index, row in enumerate(rows) for pair in row.additions]
    seen = [(index, row.seen.tokens()) for index, row in enumerate(rows) if row.seen is not None]
    masks = {index: row.mask for index, row in enumerate(rows) if row.mask is not None}
    if not added and not seen and not masks:
        return logits
    edited = logits.clone()
    if seen:
        index = [row for row, _ in seen]
        penalise(edited, index, [rows[row].params for row in index], [tokens for _, tokens in seen])
    if added:
        lengths = torch.tensor([len(ids) for _, (ids, _) in added])
        where = torch.tensor([index for index, _ in added]).repeat_interleave(lengths)
        ids = torch.cat([ids for _, (ids, _) in added])
        values = torch.cat([values for _, (_, values) in added])
        target = (to_device(where, logits.device), to_device(ids, logits.device))
        edited.index_put_(target, to_device(values, logits.device), accumulate=True)
    if masks:
        apply_masks(edited, masks)
    return edited


def _mask(token_ids: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    return _as_tensors(dict.fromkeys(token_ids, -torch.inf))


def _as_tensors(values: dict[int, float]) -> tuple[Tensor, Tensor] | None:
    if not values:
        return None
    return torch.tensor(list(values)), torch.tensor(list(values.values()), dtype=torch.float32)
