"""SamplingParams as settings of the library's sampler, with every field given. Pure.

The library is not used for what it applies to the prompt, too, or in its own way: frequency and presence penalties,
DRY, logit_bias and masks go in as one bias per token, and XTC is drawn around it (`jobs.py`).
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.backends.base import TokenLogprob, TokenMask
from engine.config import SamplingParams
from engine.errors import InvalidRequest

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy in the library, and so they are here in every combination."""

XTC_MIN_THRESHOLD = 0.01
"""Looking for all tokens above a lower threshold would mean sorting the vocabulary for each token."""

_JUST_ABOVE_ZERO = 1e-30
_JUST_BELOW_ONE = 1.0 - 2.0**-24  # the float32 before 1


def is_greedy(params: SamplingParams) -> bool:
    """Return whether the answer takes the most likely token each time."""
    return params.temperature < GREEDY_BELOW


def uses_xtc(params: SamplingParams) -> bool:
    """Return whether top choices may be excluded; above a threshold of a half there never are two to choose from."""
    return params.xtc_probability > 0 and params.xtc_threshold <= 0.5 and not is_greedy(params)


def refuse_unsupported(params: SamplingParams) -> None:
    """Raise InvalidRequest naming the first parameter whose value this sampler has no meaning for."""
    if params.mirostat not in (0, 2):
        raise InvalidRequest(f"mirostat is {params.mirostat}; it must be 0 (off) or 2", param="mirostat")
    if params.max_temp and params.max_temp <= params.min_temp:
        raise InvalidRequest(
            f"max_temp is {params.max_temp:g}; it must be more than min_temp, {params.min_temp:g}", param="max_temp"
        )
    if uses_xtc(params) and params.xtc_threshold < XTC_MIN_THRESHOLD:
        raise InvalidRequest(
            f"xtc_threshold is {params.xtc_threshold:g}; this backend takes {XTC_MIN_THRESHOLD:g} or more",
            param="xtc_threshold",
        )


def settings_of(params: SamplingParams, vocab_size: int) -> dict[str, Any]:
    """Return arguments of the library's Settings for one job; their state makes them good for that job alone."""
    settings = _neutral() | _everywhere(params)
    if is_greedy(params):
        return settings | {"top_k": 1}
    return settings | _drawn(params, vocab_size)


def _neutral() -> dict[str, Any]:
    """Return every field at its neutral value; the library's defaults are not neutral."""
    return {
        "token_repetition_penalty": 1.0,
        "token_repetition_range": -1,
        "token_repetition_decay": 0,
        "token_frequency_penalty": 0.0,
        "token_presence_penalty": 0.0,
        "temperature": 1.0,
        "smoothing_factor": 0.0,
        "min_temp": 0.0,
        "max_temp": 0.0,
        "temp_exponent": 1.0,
        "top_k": 0,
        "top_p": 0.0,
        "top_a": 0.0,
        "min_p": 0.0,
        "tfs": 0.0,
        "typical": 0.0,
        "skew": 0.0,
        "temperature_last": False,
        "mirostat": False,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "mirostat_mu": None,
        "token_bias": None,
        "cfg_scale": None,
        "post_sampling_hooks": [],
        "dry_allowed_length": 2,
        "dry_base": 1.75,
        "dry_multiplier": 0.0,
        "dry_sequence_breakers": set(),
        "dry_range": 0,
        "dry_max_ngram": 20,
        "ngram_trie": None,
        "ngram_index": 0,
        "ngram_history": deque(),
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "xtc_ignore_tokens": frozenset(),
    }


def _everywhere(params: SamplingParams) -> dict[str, Any]:
    """Return settings that shape the logits themselves, greedy or not."""
    return {
        "token_repetition_penalty": params.repetition_penalty,
        "token_repetition_range": params.repetition_range or -1,
        "token_repetition_decay": params.repetition_decay,
        "cfg_scale": None if params.cfg_scale == 1.0 else params.cfg_scale,
    }


def _drawn(params: SamplingParams, vocab_size: int) -> dict[str, Any]:
    """Return settings that shape the choice among them.

    0 and 1 are both "off" to the library's filters, so that a bound that is tiny in float32 stays above 0, and min_p,
    which means most at 1, below it.
    """
    return {
        "temperature": params.temperature,
        "temperature_last": params.temperature_last,
        "smoothing_factor": params.smoothing_factor,
        "min_temp": params.min_temp if params.max_temp else 0.0,
        "max_temp": params.max_temp,
        "temp_exponent": params.temp_exponent,
        "top_k": params.top_k if params.top_k < vocab_size else 0,
        "top_p": max(params.top_p, _JUST_ABOVE_ZERO),
        "top_a": params.top_a,
        "min_p": min(params.min_p, _JUST_BELOW_ONE),
        "tfs": max(params.tfs, _JUST_ABOVE_ZERO),
        "typical": max(params.typical_p, _JUST_ABOVE_ZERO),
        "mirostat": params.mirostat == 2,
        "mirostat_tau": params.mirostat_tau,
        "mirostat_eta": params.mirostat_eta,
    }


# The random numbers of one request: functions of its seed and the token's position alone.


class RandomDraws:
    """Replacement of a job's random generator, so that a request resumed elsewhere draws the same tokens.

    A position is the index of a token in the answer. Its first number decides about XTC, the others are its tries.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._position = 0
        self._used = 0

    def move_to(self, position: int) -> float:
        """Go to a token's position and return the number that decides about XTC there."""
        self._position = position
        self._used = 0
        return self.random()

    def random(self) -> float:
        """The position's next number in [0, 1)."""
        key = struct.pack("<qqq", self._seed, self._position, self._used)
        self._used += 1
        return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


# A mask of tokens as the bias that the library adds to logits.


def masked_bias(mask: TokenMask, bias: Tensor | None, width: int) -> Tensor:
    """Return `bias` (float32 [width], None is zeros) with minus infinity for tokens that the mask does not allow."""
    bits = np.unpackbits(np.frombuffer(mask.bitmask(), dtype=np.uint8), count=width, bitorder="little")
    bias = torch.zeros(width) if bias is None else bias
    return bias.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)


# The bias on the logits of one request's next token: penalties on its output, DRY, logit_bias and masks. Pure.
#
# The library adds its `token_bias` after the repetition penalty and after classifier-free guidance, where all of these
# belong, so that one tensor for each position, also for drafted ones, has exactly their effect.

MAX_REPEAT = 64
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

    def next(self, token_ids: Tensor, width: int) -> Tensor | None:
        """Return float32 [width] to add for the token after `token_ids` (int64 [tokens]); None where all is zero."""
        params, output = self.params, token_ids[self.prompt_tokens :]
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
            bias -= dry_penalty(token_ids, width, params)
        if masked:
            bias[masked] = -torch.inf
        return bias

    def _masked(self, index: int) -> list[int]:
        """Return the ids that token number `index` of the answer must not be."""
        ends: Sequence[int] = self.end_token_ids if index < self.params.min_tokens else ()
        return [*ends, *(self.banned_next if index == self.first else ())]


def count_penalty(output: Tensor, width: int, params: SamplingParams) -> Tensor:
    """Return float32 [width]: frequency_penalty for each use of a token in `output`, presence_penalty once (OpenAI).

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


def dry_penalty(token_ids: Tensor, width: int, params: SamplingParams) -> Tensor:
    """Return float32 [width]: for each token that would extend a repeat of the text's end, the cost of the longest
    such repeat: dry_multiplier * dry_base ** (length - dry_allowed_length), nothing below dry_allowed_length tokens.

    "Don't repeat yourself" (p-e-w, text-generation-webui 2024).
    """
    penalty = torch.zeros(width)
    token_ids = token_ids[-params.dry_range :] if params.dry_range else token_ids
    breakers = torch.tensor(params.dry_breaker_ids, dtype=torch.int64)
    ends, lengths = _repeats_of_the_end(token_ids, breakers)
    extending = token_ids[ends + 1]
    counted = (lengths >= params.dry_allowed_length) & ~torch.isin(extending, breakers)
    cost = params.dry_multiplier * params.dry_base ** (lengths[counted] - params.dry_allowed_length).double()
    return penalty.scatter_reduce_(0, extending[counted], cost.clamp(max=_LARGEST).float(), "amax")


def _repeats_of_the_end(token_ids: Tensor, breakers: Tensor) -> tuple[Tensor, Tensor]:
    """Return where earlier stretches end that equal the end of `token_ids`, and their lengths: int64 [repeats].

    No stretch has a breaker.
    """
    last = len(token_ids) - 1
    tail = token_ids[-MAX_REPEAT:]
    broken = torch.isin(tail, breakers).nonzero()
    longest = len(tail) - 1 - int(broken[-1]) if len(broken) else len(tail)
    ends = (token_ids[:last] == token_ids[last]).nonzero().squeeze(1)
    if longest < 1:
        ends = ends[:0]
    lengths = torch.ones_like(ends)
    alive = torch.arange(len(ends))
    for length in range(1, longest):
        alive = alive[ends[alive] >= length]
        alive = alive[token_ids[ends[alive] - length] == token_ids[last - length]]
        if not len(alive):
            break
        lengths[alive] += 1
    return ends, lengths


# How a job of ours chooses each token: around the library's sampler, never instead of it.
#
# `TokenSampler` takes the place of a job's `receive_logits`, which the library calls once for every token that an
# answer gets, also for drafted ones, in order. There it corrects the library:
# * its penalties and masks write into the logits it would return: log-probabilities are read before;
# * it withholds tokens while their text has a stray "\ufffd": tokens are read here, and that text is emptied;
# * logits that are not finite crash its greedy path: they end the request instead;
# * tiny temperatures underflow to no probabilities at all: their limit, the most likely token, is taken then;
# * its XTC compares neighbours in memory: here an excluded token is drawn again, which is the same distribution.

Sampled = tuple[Tensor, Tensor, Tensor, Tensor, bool]
"""Return value of the library's `receive_logits`: token [1, 1], top tokens and their probabilities [1, 1, k] or meta
tensors, the token's probability [1, 1], and whether a filter ended the answer."""


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """One token of an answer."""

    token_id: int
    logprob: TokenLogprob | None


class TokenSampler:
    """The choice of the tokens of one job, which are stored until `take`.

    job: the library's; its random generator is replaced by `draws`.  tokens: how many the answer has already.
    mask: of the tokens that are allowed, None for all.
    failed: True if there is nothing to choose from.  whole: True if the mask allows nothing more. Tokens after either
    are dropped.
    """

    def __init__(
        self,
        job: Any,
        params: SamplingParams,
        bias: TokenBias,
        draws: RandomDraws,
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
        self._chosen: list[ChosenToken] = []
        self._xtc = uses_xtc(params)
        self._may_underflow = params.temperature_last or params.max_temp > 0
        self.failed = self.whole = False
        job.rng = draws
        job.receive_logits = self

    @property
    def why_failed(self) -> str:
        """The reason why there is nothing to choose from."""
        if self._mask is not None and self._mask.error:
            return f"its grammar allows no further token: {self._mask.error}"
        return "the model produced no finite probabilities"

    def take(self) -> list[ChosenToken]:
        """Return the tokens since the last call."""
        chosen, self._chosen = self._chosen, []
        return chosen

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
                self.whole = self._mask.is_complete
            self._chosen.append(ChosenToken(token_id, logprob_of(own, token_id, self._params.logprobs)))
        self._tokens += 1
        return sampled

    def _sample(self, logits: Tensor) -> Sampled:
        """Draw until the token is one that XTC does not exclude."""
        settings = self._job.gen_settings
        settings.token_bias = self._next_bias(logits)
        excludes = self._draws.move_to(self._tokens) < self._params.xtc_probability and self._xtc
        pristine = logits.clone() if excludes or self._may_underflow else logits
        surprise = settings.mirostat_mu
        threshold, ends = self._params.xtc_threshold, self._bias.end_token_ids
        while True:
            sampled = self._receive(logits)
            if not math.isfinite(sampled[3].item()):
                return self._most_likely(logits.copy_(pristine))
            if not excludes or sampled[0].item() not in excluded(sampled, threshold, ends):
                return sampled
            logits.copy_(pristine)
            settings.mirostat_mu = surprise

    def _next_bias(self, logits: Tensor) -> Tensor | None:
        """Return the bias of the next token; sets `failed` where it leaves none."""
        width = logits.shape[-1]
        bias = self._bias.next(self._job.sequences[0].sequence_ids.torch()[0], width)
        if self._mask is None:
            return bias
        bias = masked_bias(self._mask, bias, width)
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


def excluded(sampled: Sampled, threshold: float, ends: Sequence[int]) -> set[int]:
    """Return the ids that XTC ("exclude top choices", p-e-w 2024) excludes.

    Those are the tokens at least as likely as `threshold`, but for the least likely; `ends` take no part, so that an
    answer can end. The library's list of top tokens is sorted, best first.
    """
    likely = sampled[1][0, 0][sampled[2][0, 0] >= threshold]
    return set([token_id for token_id in likely.tolist() if token_id not in ends][:-1])


def logprob_of(logits: Tensor, token_id: int, top: int | None) -> TokenLogprob | None:
    """Return the token's log-probability under float32 logits [vocab], with the `top` most likely; None for None."""
    if top is None:
        return None
    logprobs = torch.log_softmax(logits, dim=-1)
    best = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprob(
        token_id=token_id,
        logprob=logprobs[token_id].item(),
        top=tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    )
