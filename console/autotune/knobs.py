"""Which knobs a model on this hardware has, and how far each goes. Pure but for the model's config.json."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import get_args

import msgspec

from console.autotune.space import LEAST_CACHE_BITS, Knob, KnobName, Setting, Space
from engine.backends.base import LoadedModel
from engine.backends.torch.model_config import read_model_config
from engine.backends.torch.settings import apply_settings
from engine.config import ModelSpec
from engine.errors import EngineError, InvalidRequest

KNOBS: tuple[KnobName, ...] = get_args(KnobName)
MOST_GPU_WORKERS = 4
_PROMPTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STEP_TOKENS = (64, 128, 256, 512, 1024, 2048)
_GUESSES = (0, 2, 4, 7)
_WORKER_S, _LOAD_S = 4.0, 10.0
"""What a worker and another load take, where nothing is known of this one."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator leaves to be tried. knobs: all that can be turned if empty.

    most_prompts: that a worker takes at a time.  least_cache_bits: of the KV cache.
    """

    knobs: tuple[KnobName, ...] = ()
    most_prompts: int = 128
    least_cache_bits: int = LEAST_CACHE_BITS

    def validate(self) -> Wishes:
        """Itself, or InvalidRequest."""
        for name in self.knobs:
            if name not in KNOBS:
                raise InvalidRequest(f"{name} is no knob; there are {', '.join(KNOBS)}", param="knobs")
        if not 1 <= self.most_prompts <= 4096:
            raise InvalidRequest(f"most prompts is {self.most_prompts}; it must be between 1 and 4096", param="prompts")
        return self


def space_of(
    model: LoadedModel, spec: ModelSpec, start: Setting, *, cores: int, load_s: float | None, wishes: Wishes
) -> Space:
    """All that can be tried. cores: that workers on the CPU share.  load_s: what one of its workers took to load.

    Raises InvalidRequest where nothing is left to be turned.
    """
    on_cpu = not any(device.startswith("cuda") for device in model.devices)
    values: dict[KnobName, Iterable[int]] = {
        "workers": range(1, min(cores, MOST_GPU_WORKERS) + 1 if on_cpu else MOST_GPU_WORKERS + 1),
        "max_prompts": [each for each in _PROMPTS if each <= wishes.most_prompts],
        "cache_bits": _cache_bits(model, spec, wishes.least_cache_bits),
        "draft_tokens": () if spec.draft_model is not None else _GUESSES,
        "step_tokens": _STEP_TOKENS if model.backend == "torch" else (),
        "threads": _threads(cores) if on_cpu and cores > 2 else (),
    }
    if on_cpu and cores > 2 and start.threads == 0:
        start = start.with_value("threads", max(1, cores // start.workers))
    worker_s = load_s or _WORKER_S
    turn_s = {"workers": worker_s, "cache_bits": load_s or _LOAD_S, "draft_tokens": load_s or _LOAD_S}
    knobs = [
        Knob(name=name, values=tuple(found), turn_s=turn_s.get(name, 0.0))
        for name, given in values.items()
        if (not wishes.knobs or name in wishes.knobs) and len(found := _with(given, start.value(name))) > 1
    ]
    if not knobs:
        raise InvalidRequest("there is nothing to be turned: every knob has one value here", param="knobs")
    return Space(knobs=tuple(knobs), start=start)


def _with(values: Iterable[int], now: int) -> list[int]:
    """In order, with the one in use; none where a knob has none of its own."""
    found = set(values)
    return sorted(found | {now}) if found else []


def _threads(cores: int) -> Collection[int]:
    return {cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)}


def _cache_bits(model: LoadedModel, spec: ModelSpec, least: int) -> list[int]:
    """Those that its backend has, and the model's heads can be kept in."""
    if model.backend != "torch":
        return [bits for bits in (4, 6, 8, 16) if bits >= least]
    return [bits for bits in (4, 8, 16) if bits >= least and _takes(spec, bits)]


def _takes(spec: ModelSpec, bits: int) -> bool:
    wanted = {"cache_bits": bits}
    try:
        apply_settings(read_model_config(spec.path), msgspec.structs.replace(spec, **wanted))
    except EngineError:
        return False
    return True
