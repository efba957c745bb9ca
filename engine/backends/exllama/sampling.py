"""From SamplingParams to the library's sampler settings, every field said. Pure.

What the library applies to the prompt too, or in a way of its own, is not asked of it: frequency and presence
penalties, DRY, logit_bias and masks go in as one bias per token (`bias.py`), XTC is drawn around it (`jobs.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from engine.config import SamplingParams
from engine.errors import InvalidRequest

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy in the library, and so they are here in every combination."""

XTC_LEAST_THRESHOLD = 0.01
"""Looking for all tokens above a lower threshold would mean sorting the vocabulary for each token."""

_JUST_ABOVE_ZERO = 1e-30
_JUST_BELOW_ONE = 1.0 - 2.0**-24  # the float32 before 1


def is_greedy(params: SamplingParams) -> bool:
    """Whether the answer takes the most likely token each time."""
    return params.temperature < GREEDY_BELOW


def uses_xtc(params: SamplingParams) -> bool:
    """Whether top choices may be left out; above a threshold of a half there never are two to choose from."""
    return params.xtc_probability > 0 and params.xtc_threshold <= 0.5 and not is_greedy(params)


def refuse_unsupported(params: SamplingParams) -> None:
    """Raise InvalidRequest naming the first parameter whose value this sampler has no meaning for."""
    if params.mirostat not in (0, 2):
        raise InvalidRequest(f"mirostat is {params.mirostat}; it must be 0 (off) or 2", param="mirostat")
    if params.max_temp and params.max_temp <= params.min_temp:
        raise InvalidRequest(
            f"max_temp is {params.max_temp:g}; it must be more than min_temp, {params.min_temp:g}", param="max_temp"
        )
    if uses_xtc(params) and params.xtc_threshold < XTC_LEAST_THRESHOLD:
        raise InvalidRequest(
            f"xtc_threshold is {params.xtc_threshold:g}; this backend takes {XTC_LEAST_THRESHOLD:g} or more",
            param="xtc_threshold",
        )


def settings_of(params: SamplingParams, vocab_size: int) -> dict[str, Any]:
    """Arguments of the library's Settings for one job; their state makes them good for that job alone."""
    settings = _neutral() | _everywhere(params)
    if is_greedy(params):
        return settings | {"top_k": 1}
    return settings | _drawn(params, vocab_size)


def _neutral() -> dict[str, Any]:
    """Every field, changing nothing: the library's defaults do change things."""
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
    """What shapes the logits themselves, greedy or not."""
    return {
        "token_repetition_penalty": params.repetition_penalty,
        "token_repetition_range": params.repetition_range or -1,
        "token_repetition_decay": params.repetition_decay,
        "cfg_scale": None if params.cfg_scale == 1.0 else params.cfg_scale,
    }


def _drawn(params: SamplingParams, vocab_size: int) -> dict[str, Any]:
    """What shapes the choice among them. 0 and 1 are both "off" to the library's filters, so that a bound that is
    tiny in float32 is kept above 0, and min_p, which means most at 1, below it."""
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
