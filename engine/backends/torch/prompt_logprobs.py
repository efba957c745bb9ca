"""Results about prompts besides their answers: log-probabilities of their tokens, or one vector for all of it.

Both are gathered over the steps that compute a prompt, from the final hidden states of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.base import BackendRequest, TokenLogprob
from engine.backends.sampling.draw import rank
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class FinalStates:
    """Final states of adjacent tokens of one prompt. rows: hidden states [tokens, hidden] before the last norm.

    at_once: the number of tokens for whose logits there is memory.
    """

    decoder: Decoder
    rows: Tensor
    at_once: int

    def normalised_chunks(self) -> Iterator[Tensor]:
        """The states after the last norm, in order, [at_once, hidden] at a time."""
        for rows in self.rows.split(self.at_once):
            yield self.decoder.final_norm(rows)

    def logits(self) -> Iterator[Tensor]:
        """Float32 logits [at_once, vocab] of the tokens, in order. Callers do not keep them."""
        for rows in self.rows.split(self.at_once):
            yield self.decoder.logits(rows)


ReadPromptStates = Callable[[int, FinalStates], None]
"""Receives the number of a chunk, and the final states of its tokens that prompt results need."""


class PromptOutput(Protocol):
    """Result about one prompt. `read` may be called again for a step that is repeated; `add` is final.

    until: number of the prompt's leading tokens that have to be read.
    """

    until: int

    def read(self, chunk: ChunkInput, states: FinalStates) -> None:
        """Read a step's states, in place of any that were read and not added."""

    def add(self) -> bool:
        """Add the states read last; False where they were not finite."""

    @property
    def logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """See TokenEvent.prompt_logprobs; once everything was read."""

    @property
    def vector(self) -> bytes:
        """See TokenEvent.vector; once everything was read."""


class PromptLogprobs:
    """The log-probability of each token of a prompt after those before it, with alternatives."""

    vector = b""

    def __init__(self, token_ids: Sequence[int], alternatives: int) -> None:
        self.until = len(token_ids) - 1  # nothing of the prompt comes after its last token
        self._token_ids = token_ids
        self._alternatives = alternatives
        self._logprobs: list[TokenLogprob | None] = [None]
        self._read: list[TokenLogprob] | None = []

    def read(self, chunk: ChunkInput, states: FinalStates) -> None:
        """The states of token i say how likely token i + 1 was."""
        first = chunk.start + chunk.prompt_states.start + 1
        found: list[TokenLogprob] = []
        for logits in states.logits():
            token_ids = self._token_ids[first + len(found) : first + len(found) + len(logits)]
            logprobs = token_logprobs(logits, token_ids, self._alternatives)
            if logprobs is None:
                self._read = None
                return
            found += logprobs
        self._read = found

    def add(self) -> bool:
        """Add the states read last."""
        self._logprobs += self._read or ()
        finite, self._read = self._read is not None, []
        return finite

    @property
    def logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Log-probabilities of all tokens, None for the first."""
        return tuple(self._logprobs)


class PromptMean:
    """The mean of the final states of all tokens of a prompt, of length 1."""

    logprobs = ()

    def __init__(self, tokens: int) -> None:
        self.until = tokens
        self._sum: Tensor | None = None
        self._read: Tensor | None = None

    def read(self, chunk: ChunkInput, states: FinalStates) -> None:
        """Sum up the states in float64: the order of the steps is lost in it."""
        sums = [normed.sum(dim=0, dtype=torch.float64) for normed in states.normalised_chunks()]
        self._read = torch.stack(sums).sum(dim=0).cpu()

    def add(self) -> bool:
        """Add the states read last."""
        if self._read is None:
            return True
        self._sum = self._read if self._sum is None else self._sum + self._read
        finite, self._read = bool(self._read.isfinite().all()), None
        return finite

    @property
    def vector(self) -> bytes:
        """The mean's direction as float32; nothing but zeros has none, and stays."""
        assert self._sum is not None, "a vector was requested before its prompt was computed"
        return torch.nn.functional.normalize(self._sum, dim=0).float().numpy().tobytes()


def prompt_output_for(request: BackendRequest) -> PromptOutput | None:
    """Return the result that a request wants about its prompt; None for none."""
    if request.embed:
        return PromptMean(len(request.prompt_ids))
    alternatives = request.params.prompt_logprobs
    return None if alternatives is None else PromptLogprobs(request.prompt_ids, alternatives)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], alternatives: int) -> list[TokenLogprob] | None:
    """Return how likely row i of float32 `logits` [R, V] made token_ids[i]; None where a row has no probabilities.

    Ranks count from 1, and those of equally likely tokens are the same.
    """
    logs = logits.log_softmax(dim=-1)
    ids = torch.tensor([list(token_ids)], device=logits.device).T
    own, own_logit = logs.gather(1, ids), logits.gather(1, ids)
    if own.isnan().any():
        return None
    ranks = (logits > own_logit).sum(dim=-1) + 1
    top_ids = rank(logits, min(alternatives, logits.shape[1])) if alternatives else ids[:, :0]
    top_logs = logs.gather(1, top_ids)
    return [
        TokenLogprob(token_id=token_id, logprob=logprob, top=tuple(zip(top, values, strict=True)), rank=place)
        for token_id, logprob, top, values, place in zip(
            token_ids, own.squeeze(1).tolist(), top_ids.tolist(), top_logs.tolist(), ranks.tolist(), strict=True
        )
    ]
