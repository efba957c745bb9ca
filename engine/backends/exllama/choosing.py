"""How a job of ours chooses each token: around the library's sampler, never instead of it.

`Choosing` takes the place of a job's `receive_logits`, which the library calls once for every token that an answer
gets, also for those guessed ahead, in order. Standing there, it mends what the library gets wrong:
* its penalties and masks write into the logits it would return: log-probabilities are read before;
* it holds tokens back while their text has a stray "\\ufffd": tokens are taken here, and that text is emptied;
* logits that are not finite crash its greedy path: they end the request instead;
* tiny temperatures underflow to no probabilities at all: their limit, the most likely token, is taken then;
* its XTC compares neighbours in memory: here a left-out token is drawn again, which is the same distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backends.base import TokenLogprob, TokenMask
from engine.backends.exllama.bias import TokenBias
from engine.backends.exllama.draws import Draws
from engine.backends.exllama.masks import held_to
from engine.backends.exllama.sampling import uses_xtc
from engine.config import SamplingParams

Sampled = tuple[Tensor, Tensor, Tensor, Tensor, bool]
"""What the library's `receive_logits` returns: token [1, 1], top tokens and their probabilities [1, 1, k] or meta
tensors, the token's probability [1, 1], and whether a filter ended the answer."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token of an answer."""

    token_id: int
    logprob: TokenLogprob | None


class Choosing:
    """Chooses the tokens of one job, and keeps them until they are taken.

    job: the library's; its random generator is replaced by `draws`.  tokens: how many the answer has already.
    mask: what the tokens are held to, None for nothing.
    failed: there is nothing to choose from.  whole: the mask allows nothing more after what was chosen. What comes
    after either is not kept.
    """

    def __init__(
        self,
        job: Any,
        params: SamplingParams,
        bias: TokenBias,
        draws: Draws,
        *,
        tokens: int,
        vocab_size: int,
        mask: TokenMask | None = None,
    ) -> None:
        self._job = job
        self._params = params
        self._bias = bias
        self._mask = mask
        self._draws = draws
        self._receive: Callable[[Tensor], Sampled] = job.receive_logits
        self._vocab_size = vocab_size
        self._tokens = tokens
        self._chosen: list[Chosen] = []
        self._xtc = uses_xtc(params)
        self._may_underflow = params.temperature_last or params.max_temp > 0
        self.failed = self.whole = False
        job.rng = draws
        job.receive_logits = self

    @property
    def why_failed(self) -> str:
        """Why there is nothing to choose from."""
        if self._mask is not None and self._mask.error:
            return f"its grammar allows nothing more: {self._mask.error}"
        return "the model gave no finite probabilities for it"

    def take(self) -> list[Chosen]:
        """The tokens since the last call."""
        taken, self._chosen = self._chosen, []
        return taken

    def __call__(self, logits: Tensor) -> Sampled:
        """Choose from float32 logits [1, 1, vocab], or [2, 1, vocab] with guidance. Called on a sampling thread."""
        self._job.held_text = ""
        own = logits[0, 0, : self._vocab_size]
        if not math.isfinite(logits[..., : self._vocab_size].amax()):
            self.failed = True
            logits.zero_()
        own = own.clone() if self._params.logprobs is not None else own
        sampled = self._sample(logits)
        token_id = int(sampled[0].item())
        if not (self.failed or self.whole):
            if self._mask is not None:
                self._mask.accept(token_id)
                self.whole = self._mask.ended
            self._chosen.append(Chosen(token_id, logprob_of(own, token_id, self._params.logprobs)))
        self._tokens += 1
        return sampled

    def _sample(self, logits: Tensor) -> Sampled:
        """Draw until a token comes that is not left out."""
        settings = self._job.gen_settings
        settings.token_bias = self._next_bias(logits)
        leave_out = self._draws.move_to(self._tokens) < self._params.xtc_probability and self._xtc
        pristine = logits.clone() if leave_out or self._may_underflow else logits
        surprise = settings.mirostat_mu
        threshold, ends = self._params.xtc_threshold, self._bias.end_token_ids
        while True:
            sampled = self._receive(logits)
            if not math.isfinite(sampled[3].item()):
                return self._most_likely(logits.copy_(pristine))
            if not leave_out or sampled[0].item() not in left_out(sampled, threshold, ends):
                return sampled
            logits.copy_(pristine)
            settings.mirostat_mu = surprise

    def _next_bias(self, logits: Tensor) -> Tensor | None:
        """What is added to the logits of the next token; where that leaves none, it has failed."""
        width = logits.shape[-1]
        bias = self._bias.next(self._job.sequences[0].sequence_ids.torch()[0], width)
        if self._mask is None:
            return bias
        bias = held_to(self._mask, bias, width)
        if math.isfinite(bias.amax()):
            return bias
        self.failed = True
        return None

    def _most_likely(self, logits: Tensor) -> Sampled:
        settings = self._job.gen_settings
        settings.top_k, top_k = 1, settings.top_k
        try:
            return self._receive(logits)
        finally:
            settings.top_k = top_k


def left_out(sampled: Sampled, threshold: float, ends: Sequence[int]) -> set[int]:
    """XTC ("exclude top choices", p-e-w 2024): of the tokens at least as likely as `threshold`, all but the least
    likely; `ends` take no part, so that an answer can end. The library's list of top tokens is sorted, best first."""
    likely = sampled[1][0, 0][sampled[2][0, 0] >= threshold]
    return set([token_id for token_id in likely.tolist() if token_id not in ends][:-1])


def logprob_of(logits: Tensor, token_id: int, top: int | None) -> TokenLogprob | None:
    """The token's log-probability under float32 logits [vocab], with the `top` most likely ones; None for None."""
    if top is None:
        return None
    logprobs = torch.log_softmax(logits, dim=-1)
    best = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprob(
        token_id=token_id,
        logprob=logprobs[token_id].item(),
        top=tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    )
