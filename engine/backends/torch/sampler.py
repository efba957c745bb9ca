"""Choosing the next token of every row of a batch of logits, with work only for what some row asks for.

The order, per row: logit_bias, and end tokens masked before min_tokens; repetition, then frequency and presence
penalty; then greedy (temperature 0: exact argmax, the lowest id among equals), or temperature, filters and a draw
(see `draw`). Nothing is random but a function of the row's seed and position, so that an answer does not depend on
what else is in the batch, on preemption, or on the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.base import TokenLogprob
from engine.backends.torch.draw import Knobs, draw_filtered, draw_plain, rank, uniform
from engine.backends.torch.penalties import TokenCounts, penalise
from engine.config import SamplingParams


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, with its log-probability where the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class SampleRow:
    """One request's side of sampling: made once, told of every token, so that a step costs no walk over its tokens.

    position: where the next token goes (tokens known so far).      output_tokens: how many of them are output.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        generated: Sequence[int] = (),
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.position = len(prompt_ids)
        self.output_tokens = 0
        self.greedy = params.temperature == 0
        self.filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1
        self.bias = _as_tensors(params.logit_bias)
        self.end_mask = _as_tensors(dict.fromkeys(end_token_ids, -torch.inf)) if params.min_tokens else None
        self.counts = TokenCounts(prompt_ids if params.repetition_penalty != 1 else ()) if _penalises(params) else None
        for token_id in generated:
            self.push(token_id)

    def push(self, token_id: int) -> None:
        """Note that this token was chosen."""
        self.position += 1
        self.output_tokens += 1
        if self.counts is not None:
            self.counts.push(token_id)

    @property
    def additions(self) -> list[tuple[Tensor, Tensor]]:
        """(ids, values) pairs to add to the logits now."""
        end_mask = self.end_mask if self.output_tokens < self.params.min_tokens else None
        return [pair for pair in (self.bias, end_mask) if pair is not None]

    def noise(self) -> float:
        """The uniform number for the next token."""
        return uniform(self.params.seed or 0, self.position)


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | None]:
    """The next token of each row of float32 `logits` [R, V], which stay as they are.

    None for a row that has no distribution to draw from: a NaN or infinite logit, or every token masked.
    """
    edited = _edit(logits, rows)
    best, tokens = edited.max(dim=-1)
    plain = [index for index, row in enumerate(rows) if not row.greedy and not row.filtered]
    filtered = [index for index, row in enumerate(rows) if not row.greedy and row.filtered]
    if plain:
        _draw(edited, rows, plain, tokens, lambda part, knobs: draw_plain(part, knobs.temperature, knobs.noise))
    if filtered:
        _draw(edited, rows, filtered, tokens, draw_filtered)
    chosen: list[int] = torch.where(best.isfinite(), tokens, -1).tolist()
    logprobs = _logprobs(logits, rows, chosen)
    return [None if token < 0 else SampledToken(token, logprobs.get(index)) for index, token in enumerate(chosen)]


def _draw(
    logits: Tensor,
    rows: Sequence[SampleRow],
    index: list[int],
    tokens: Tensor,
    draw: Callable[[Tensor, Knobs], Tensor],
) -> None:
    """Fill `tokens` at `index` with what `draw` draws from those rows."""
    some = [rows[i] for i in index]
    knobs = Knobs.of([r.params for r in some], [r.noise() for r in some], logits.shape[1], logits.device)
    where = torch.tensor(index, device=logits.device)
    tokens[where] = draw(logits if len(index) == len(rows) else logits[where], knobs)


def _edit(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits after bias, min_tokens and penalties; the same tensor where no row asks for any."""
    added = [(index, pair) for index, row in enumerate(rows) for pair in row.additions]
    penalised = [(index, row.counts) for index, row in enumerate(rows) if row.counts is not None]
    if not added and not penalised:
        return logits
    edited = logits.clone()
    if added:
        lengths = torch.tensor([len(ids) for _, (ids, _) in added])
        where = torch.tensor([index for index, _ in added]).repeat_interleave(lengths)
        ids = torch.cat([ids for _, (ids, _) in added])
        values = torch.cat([values for _, (_, values) in added])
        target = (where.to(logits.device), ids.to(logits.device))
        edited.index_put_(target, values.to(logits.device), accumulate=True)
    if penalised:
        index = [row for row, _ in penalised]
        params = [rows[row].params for row in index]
        penalise(
            edited,
            index,
            [counts for _, counts in penalised],
            repetition=[p.repetition_penalty for p in params],
            frequency=[p.frequency_penalty for p in params],
            presence=[p.presence_penalty for p in params],
        )
    return edited


def _logprobs(logits: Tensor, rows: Sequence[SampleRow], chosen: Sequence[int]) -> dict[int, TokenLogprob]:
    """Log-probabilities by row, of the rows that want them, from the model's own logits."""
    wanted = {
        i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None and chosen[i] >= 0
    }
    if not wanted:
        return {}
    part = logits[list(wanted)]
    logs = part.log_softmax(dim=-1)
    own = logs.gather(1, torch.tensor([[chosen[i]] for i in wanted], device=logits.device)).squeeze(1).tolist()
    width = min(max(wanted.values()), logits.shape[1])
    top_ids = rank(part, width) if width else torch.zeros(len(wanted), 0, dtype=torch.int64, device=logits.device)
    top_logs = logs.gather(1, top_ids).tolist()
    found = {}
    for (index, count), logprob, ids, values in zip(wanted.items(), own, top_ids.tolist(), top_logs, strict=True):
        top = tuple(zip(ids[:count], values[:count], strict=True))
        found[index] = TokenLogprob(token_id=chosen[index], logprob=logprob, top=top)
    return found


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _as_tensors(values: dict[int, float]) -> tuple[Tensor, Tensor] | None:
    if not values:
        return None
    return torch.tensor(list(values)), torch.tensor(list(values.values()), dtype=torch.float32)
