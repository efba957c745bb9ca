"""Choosing the next token of every row of a batch of logits, with work only for what some row asks for.

The order, per row: repetition, then frequency and presence penalty; logit_bias, DRY, end tokens masked before
min_tokens, tokens that the next one must not be, and all that a mask does not allow; then greedy (temperature 0:
exact argmax, the lowest id among equals), or temperature, filters and a draw (see `draw`). Nothing is random but a
function of the row's seed and position, so that an answer does not depend on what else is in the batch, on
preemption, or on the worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.backends.base import TokenMask
from engine.backends.torch.draw import draw_filtered, draw_plain
from engine.backends.torch.drawn import Drawn, SampledToken, drawn_logprobs
from engine.backends.torch.dry import DryPenalty
from engine.backends.torch.knobs import Draw, Knobs, bounded, columns, filtered
from engine.backends.torch.masks import hold
from engine.backends.torch.penalties import penalise, seen_by
from engine.backends.torch.sending import sent
from engine.config import SamplingParams


class SampleRow:
    """One request's side of sampling: made once, told of every token, so that a step costs no walk over its tokens.

    position: where the next token goes (tokens known so far).      output_tokens: how many of them are output.
    banned_next: ids that the first token to come must not be.
    mask: what the tokens are held to, at where `generated` ends; None for nothing. It decides on end tokens too.
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
        self.filtered = filtered(params)
        self.bounded = bounded(params)
        self.end_token_ids = tuple(end_token_ids)
        self.bias = _as_tensors(params.logit_bias)
        self.mask = mask
        self.end_mask = _mask(end_token_ids) if params.min_tokens and mask is None else None
        self.next_mask = _mask(banned_next)
        self.seen = seen_by(params, prompt_ids)
        if self.seen is not None:
            for token_id in generated:
                self.seen.push(token_id)
        self.dry = DryPenalty(params, [*prompt_ids, *generated]) if params.dry_multiplier > 0 else None

    def push(self, token_id: int) -> None:
        """Note that this token was chosen."""
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
    def foreseeable(self) -> bool:
        """Whether how a later token is drawn does not depend on the tokens before it, but for the logits."""
        return self.seen is None and self.dry is None and self.mask is None

    def ahead(self, tokens: int) -> SampleRow:
        """The row of the token that comes after so many others; only where it is `foreseeable`."""
        if not tokens:
            return self
        row = copy.copy(self)
        row.position += tokens
        row.output_tokens += tokens
        row.next_mask = None
        return row

    @property
    def additions(self) -> list[tuple[Tensor, Tensor]]:
        """(ids, values) pairs to add to the logits now."""
        end_mask = self.end_mask if self.output_tokens < self.params.min_tokens else None
        dry = None if self.dry is None else self.dry.penalties()
        return [pair for pair in (self.bias, dry, end_mask, self.next_mask) if pair is not None]

    def draw(self) -> Draw:
        """What the next draw needs to know of it."""
        return Draw(self.params, self.position, self.end_token_ids)


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | None]:
    """The next token of each row of float32 `logits` [R, V], which stay as they are.

    None for a row that has no distribution to draw from: a NaN or infinite logit, or every token masked.
    """
    return draw(logits, rows).tokens()


def choose(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The ids alone of what `sample` gives, -1 for none."""
    chosen: list[int] = _choose(logits, rows).tolist()
    return chosen


def draw(logits: Tensor, rows: Sequence[SampleRow]) -> Drawn:
    """The same as `sample`, still where the logits are. Nothing waits for them, unless filters have to look at more
    than the best few tokens where those do not do."""
    ids = _choose(logits, rows)
    return Drawn(ids, drawn_logprobs(logits, ids, [row.params.logprobs for row in rows]))


def _choose(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    edited = _edit(logits, rows)
    best, tokens = edited.max(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.greedy]
    plain = [index for index in drawn if not rows[index].filtered]
    few = [index for index in drawn if rows[index].filtered and rows[index].bounded]
    whole = [index for index in drawn if rows[index].filtered and not rows[index].bounded]
    if plain:
        _draw(edited, rows, plain, tokens, _draw_plain)
    for index in (few, whole):  # apart, so that no row has the whole vocabulary sorted for another's sake
        if index:
            _draw(edited, rows, index, tokens, _draw_filtered)
    return torch.where(best.isfinite(), tokens, -1)


def _draw(
    logits: Tensor,
    rows: Sequence[SampleRow],
    index: list[int],
    tokens: Tensor,
    draw: Callable[[Tensor, Sequence[Draw]], Tensor],
) -> None:
    """Fill `tokens` at `index` with what `draw` draws from those rows."""
    where = sent(torch.tensor(index), logits.device)
    tokens[where] = draw(logits if len(index) == len(rows) else logits[where], [rows[i].draw() for i in index])


def _draw_plain(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    temperature, noise = columns(
        [[draw.params.temperature for draw in draws], [draw.noise() for draw in draws]], logits.device
    )
    return draw_plain(logits, temperature, noise)


def _draw_filtered(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    return draw_filtered(logits, Knobs.of(draws, logits.shape[1], logits.device))


def _edit(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits after penalties and everything that is added; the same tensor where no row asks for any."""
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
        target = (sent(where, logits.device), sent(ids, logits.device))
        edited.index_put_(target, sent(values, logits.device), accumulate=True)
    if masks:
        hold(edited, masks)
    return edited


def _mask(token_ids: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    return _as_tensors(dict.fromkeys(token_ids, -torch.inf))


def _as_tensors(values: dict[int, float]) -> tuple[Tensor, Tensor] | None:
    if not values:
        return None
    return torch.tensor(list(values)), torch.tensor(list(values.values()), dtype=torch.float32)
