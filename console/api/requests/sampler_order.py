"""The order in which samplers apply, as clients of KoboldCpp and text-generation-webui send it.

Ours is fixed (docs/sampling.md) but for the temperature, which may come before the filters or after them. So an order
is honoured where it comes to that for the samplers that a request uses, and refused where it does not.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from engine.config import PARAMETERS, SamplingParams
from engine.errors import InvalidRequest
from engine.samplers import Stage, samplers

_KOBOLD = ("top_k", "top_a", "top_p", "tfs", "typical_p", "temperature", "repetition_penalty")
"""KoboldCpp's numbers 0 to 6."""

MAX_SAMPLERS = 64
"""In an order: more than clients have, under all their names."""

_MAX_TEXT = 64 * MAX_SAMPLERS
"""Characters of an order that are looked at: more than the longest names take."""

_ALIASES = {
    **{alias: name for sampler in samplers() for name in sampler.names for alias in PARAMETERS[name].aliases},
    "typ_p": "typical_p",
    "penalties": "repetition_penalty",
}
SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
"""llama.cpp's letters that stand for samplers."""

_SWITCHES = {
    "dry": "dry_multiplier",
    "dynamic_temperature": "max_temp",
    "quadratic_sampling": "smoothing_factor",
    "xtc": "xtc_probability",
}
"""Parameters of samplers that have another name in an order."""

_MOVED = ("temperature", "dynamic_temperature", "quadratic_sampling")
"""Samplers that text-generation-webui puts last where temperature_last is set."""

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "dry")
_LLAMACPP_PENALTIES = {"repetition_penalty": ("repetition_penalty", "frequency_penalty", "presence_penalty")}
"""llama.cpp's "penalties", which are three."""

_NEVER = ("top_n_sigma", "epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty", "no_repeat_ngram", "adaptive_p")
"""Samplers that do not exist here; a request that uses one is refused for that."""


def _on(stage: Stage) -> list[str]:
    """Return names of the samplers of engine/samplers/ on those values, as an order has them."""
    names = {parameter: name for name, parameter in _SWITCHES.items()}
    return [names.get(sampler.names[0], sampler.names[0]) for sampler in samplers() if sampler.on == stage]


_FILTERS = ("top_k", "top_p", "top_a", "min_p", *_on("probabilities"), "mirostat")
_BEFORE_TEMPERATURE = (*_on("logits"), *_on("distances"))

_RANKS = {
    **dict.fromkeys(_PENALTIES, 0),
    **{name: 1 + i for i, name in enumerate((*_BEFORE_TEMPERATURE, *_FILTERS, "dynamic_temperature", "xtc"))},
}
"""Position of each in the order here. The temperature has none of its own."""


def apply_sampler_order(params: SamplingParams, value: object, param: str) -> SamplingParams:
    """Return the params with their temperature where the order `value` puts it: KoboldCpp's numbers, or names.

    Raises InvalidRequest naming `param` where the samplers that are used cannot be applied in that order.
    """
    names = _names(value, param)
    if params.temperature_last:
        names = [*(name for name in names if name not in _MOVED), *(name for name in names if name in _MOVED)]
    if params.temperature == 0:
        return params
    used = [name for name in names if _is_used(name, params)]
    placed = [name for name in used if name != "temperature"]
    for earlier, later in pairwise(placed):
        if _RANKS[earlier] > _RANKS[later]:
            raise _impossible(param, earlier, later)
    if "temperature" not in used:
        return params
    at = used.index("temperature")
    before = [name for name in used[:at] if name in _FILTERS]
    after = [name for name in used[at:] if name in _FILTERS or name in _PENALTIES]
    if (before and after) or any(name in _PENALTIES for name in after):
        raise _impossible(param, "temperature", after[0])
    return msgspec.structs.replace(params, temperature_last=bool(before)) if before or after else params


def apply_samplers(params: SamplingParams, value: object, param: str) -> SamplingParams:
    """Return the params with llama.cpp's list of samplers applied: names, or a text of their letters.

    Raises InvalidRequest naming `param` where the order is impossible, or the list leaves out a sampler that is used.
    """
    items = [SAMPLER_LETTERS.get(letter, letter) for letter in value[:_MAX_TEXT]] if isinstance(value, str) else value
    names = [penalty for name in _names(items, param) for penalty in _LLAMACPP_PENALTIES.get(name, (name,))]
    ordered = apply_sampler_order(params, names, param)
    listed = {*names, *(_MOVED if "temperature" in names else ())}
    missing = [name for name in ("temperature", *_RANKS) if name not in listed and _is_used(name, params)]
    if missing and params.temperature != 0:
        raise InvalidRequest(
            f"{param} leaves out {missing[0]}, which this request uses; set it to its neutral value, or list it",
            param=param,
        )
    return ordered


def dynamic_temperature_only(params: SamplingParams) -> SamplingParams:
    """Return the params with a dynamic temperature alone, as some clients mean it; here both apply."""
    if params.max_temp > 0 and params.temperature != 0:
        return msgspec.structs.replace(params, temperature=1.0)
    return params


def _names(value: object, param: str) -> list[str]:
    """Return the samplers in the client's order."""
    items = value[:_MAX_TEXT].replace(",", "\n").split() if isinstance(value, str) else value
    if not isinstance(items, list):
        raise InvalidRequest(f"{param} should be an array of samplers", param=param)
    if len(items) > MAX_SAMPLERS:
        raise InvalidRequest(f"{param} has more than {MAX_SAMPLERS} samplers", param=param)
    return [_name(item, param) for item in items]


def _name(item: object, param: str) -> str:
    if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < len(_KOBOLD):
        return _KOBOLD[item]
    name = _ALIASES.get(item, item) if isinstance(item, str) else ""
    if name != "temperature" and name not in _RANKS and name not in _NEVER:
        raise InvalidRequest(f"{param} holds {str(item)[:40]!r}, which is not a sampler", param=param)
    return name


def _is_used(name: str, params: SamplingParams) -> bool:
    if name not in _RANKS and name != "temperature":
        return False
    row = PARAMETERS[_SWITCHES.get(name, name)]
    return bool(getattr(params, row.name) != row.neutral)


def _impossible(param: str, earlier: str, later: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} puts {earlier} before {later}; here penalties come first, then the filters in the order "
        f"{', '.join(_FILTERS)}, and the temperature before or after all of those",
        param=param,
    )
