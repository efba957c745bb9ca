"""Which knobs a model on this hardware has, and how far each goes. Pure but for the model's config.json."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import get_args

import msgspec

from console.link.tuning import TuneOrder
from console.tuning.autotune.space import Knob, KnobName, Setting, Space
from engine.backends.base import LoadedModel
from engine.backends.common.model_config import read_model_config
from engine.backends.common.torch_load_settings import apply_settings
from engine.config import ModelSpec
from engine.errors import EngineError, InvalidRequest
from engine.placement.model_facts import read_facts

KNOBS: tuple[KnobName, ...] = get_args(KnobName)
MAX_GPU_WORKERS = 4
_PROMPTS = (1, 2, 4, 8, 16, 32, 64, 128)
_STEP_TOKENS = (64, 128, 256, 512, 1024, 2048)
_GUESSES = (0, 2, 4, 7)
MAX_SHARED_CORES = 2
"""Up to this number, only even shares are worth trying."""
EXLLAMA_HEAD = 32
"""Heads of a multiple of this number of elements can be kept in fewer than 16 bits by exllamav2."""
_WORKER_S, _LOAD_S = 4.0, 10.0
"""What a worker and another load take, where nothing is known of this one."""


def space_of(
    model: LoadedModel, spec: ModelSpec, start: Setting, *, cores: int, load_s: float | None, order: TuneOrder
) -> Space:
    """All that can be tried. cores: that workers on the CPU share.  load_s: what one of its workers took to load.

    Raises InvalidRequest where a knob that was asked for cannot be turned here, or none can.
    """
    on_cpu = not any(device.startswith("cuda") for device in model.devices)
    wanted = [name for name in order.knobs or KNOBS if name not in order.fixed]
    values: dict[KnobName, Iterable[int]] = {
        "workers": range(1, min(cores, MAX_GPU_WORKERS) + 1 if on_cpu else MAX_GPU_WORKERS + 1),
        "max_prompts": _PROMPTS,
        "cache_bits": _cache_bits(model, spec, order.least_cache_bits),
        "draft_tokens": () if spec.draft_model is not None else _GUESSES,
        "step_tokens": _STEP_TOKENS if model.backend == "torch" else (),
        "threads": _threads(cores) if on_cpu and cores > MAX_SHARED_CORES else (),
    }
    if values["threads"] and "threads" in wanted and start.threads == 0:
        start = start.with_value("threads", max(1, cores // start.workers))
    worker_s = load_s or _WORKER_S
    turn_s = {"workers": worker_s, "cache_bits": load_s or _LOAD_S, "draft_tokens": load_s or _LOAD_S}
    knobs = [
        Knob(name=name, values=tuple(found), turn_s=turn_s.get(name, 0.0))
        for name, given in values.items()
        if name in wanted and len(found := _with(given, start.value(name))) > 1
    ]
    turned = {knob.name for knob in knobs}
    for name in wanted if order.knobs else ():
        if name not in turned:
            raise InvalidRequest(f"{name} cannot be tuned here: {_reason(name, model, spec, cores)}", param="knobs")
    if not knobs:
        others = "every other knob" if order.fixed else "every knob"
        raise InvalidRequest(f"nothing to tune: {others} has only one value here", param="knobs")
    return Space(knobs=tuple(knobs), start=start)


def _reason(name: KnobName, model: LoadedModel, spec: ModelSpec, cores: int) -> str:
    """Why a knob that was asked for has no two values."""
    on_cpu = not any(device.startswith("cuda") for device in model.devices)
    if name == "threads":
        return f"{cores} cores are too few to share" if on_cpu else "the model runs on a GPU"
    if name == "draft_tokens":
        return f"{spec.name} already uses a draft model"
    if name == "step_tokens":
        return f"{model.backend} has no step-token limit"
    if name == "cache_bits":
        return "the heads of the model and the min bits leave no choice"
    return "it has only one value"


def _with(values: Iterable[int], now: int) -> list[int]:
    """In order, with the one in use; none where a knob has none of its own."""
    found = set(values)
    return sorted(found | {now}) if found else []


def _threads(cores: int) -> Collection[int]:
    return {cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)}


def _cache_bits(model: LoadedModel, spec: ModelSpec, least: int) -> list[int]:
    """Those that its backend has, and the model's heads can be kept in."""
    choices, takes = ((4, 8, 16), _takes) if model.backend == "torch" else ((4, 6, 8, 16), _exllama_takes)
    return [bits for bits in choices if bits >= least and (bits == 16 or takes(spec, bits))]


def _takes(spec: ModelSpec, bits: int) -> bool:
    wanted = {"cache_bits": bits}
    try:
        apply_settings(read_model_config(spec.path), msgspec.structs.replace(spec, **wanted))
    except EngineError:
        return False
    return True


def _exllama_takes(spec: ModelSpec, bits: int) -> bool:
    try:
        return read_facts(spec).shape.head_dim % EXLLAMA_HEAD == 0
    except EngineError:
        return False
