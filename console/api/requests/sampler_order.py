"""The order in which samplers apply, as clients of KoboldCpp and text-generation-webui send it.

Ours is fixed (docs/sampling.md) but for the temperature, which may come before the filters or after them. So an order
is honoured where it comes to that for the samplers that a request uses, and refused where it does not.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from engine.config import SamplingParams
from engine.errors import InvalidRequest

_KOBOLD = ("top_k", "top_a", "top_p", "tfs", "typical_p", "temperature", "repetition_penalty")
"""What KoboldCpp means by 0 to 6."""

MAX_SAMPLERS = 64
"""In an order: more than clients know, under all their names."""

_LONGEST_TEXT = 64 * MAX_SAMPLERS
"""Characters of an order that are looked at: more than the longest names take."""

_ALIASES = {"tfs_z": "tfs", "typ_p": "typical_p", "typical": "typical_p", "penalties": "repetition_penalty"}
_MOVED = ("temperature", "dynamic_temperature", "quadratic_sampling")
"""What text-generation-webui puts last where temperature_last is set."""

_FILTERS = ("top_k", "top_p", "top_a", "min_p", "tfs", "typical_p", "mirostat")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "dry")
_NEVER = ("top_n_sigma", "epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty", "no_repeat_ngram", "adaptive_p")
"""Samplers that are not there; a request that uses one is refused for that."""

_RANKS = {
    **dict.fromkeys(_PENALTIES, 0),
    "quadratic_sampling": 1,
    **{name: 2 + i for i, name in enumerate(_FILTERS)},
    "dynamic_temperature": 2 + len(_FILTERS),
    "xtc": 3 + len(_FILTERS),
}
"""Where each comes here. The temperature has no place of its own."""


def apply_sampler_order(params: SamplingParams, value: object, param: str) -> SamplingParams:
    """The params with their temperature where the order `value` puts it: numbers as KoboldCpp has them, or names.

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


def dynamic_temperature_only(params: SamplingParams) -> SamplingParams:
    """The params with a dynamic temperature in place of the fixed one, as some clients mean it; both apply here."""
    if params.max_temp > 0 and params.temperature != 0:
        return msgspec.structs.replace(params, temperature=1.0)
    return params


def _names(value: object, param: str) -> list[str]:
    """The samplers in the order that the client wants."""
    items = value[:_LONGEST_TEXT].replace(",", "\n").split() if isinstance(value, str) else value
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
        raise InvalidRequest(f"{param} holds {str(item)[:40]!r}, which is no sampler that there is", param=param)
    return name


def _is_used(name: str, params: SamplingParams) -> bool:
    match name:
        case "dry":
            return params.dry_multiplier > 0
        case "quadratic_sampling":
            return params.smoothing_factor > 0
        case "dynamic_temperature":
            return params.max_temp > 0
        case "xtc":
            return params.xtc_probability > 0
        case "frequency_penalty" | "presence_penalty" | "top_k" | "top_a" | "min_p" | "mirostat":
            return bool(getattr(params, name))
        case _ if name in _NEVER:
            return False
        case _:
            return bool(getattr(params, name) != 1)


def _impossible(param: str, earlier: str, later: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} puts {earlier} before {later}; here penalties come first, then the filters in the order "
        f"{', '.join(_FILTERS)}, and the temperature before or after all of those",
        param=param,
    )
