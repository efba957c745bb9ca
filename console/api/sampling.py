"""The sampling fields that dialects share, and what the engine is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from console.api.body import Body
from console.api.dry import breaker_ids
from console.api.served import ServedModel
from engine.config import SamplingParams, shown
from engine.errors import InvalidRequest

T = TypeVar("T")

TOP_K_OFF = -1
MAX_N = 128
MAX_PRIORITY = 10**6
_ALIASES: Mapping[str, str] = {
    "dry_penalty_last_n": "dry_range",
    "dynatemp_exponent": "temp_exponent",
    "dynatemp_high": "max_temp",
    "dynatemp_low": "min_temp",
    "guidance_scale": "cfg_scale",
    "mirostat": "mirostat_mode",
    "penalty_range": "repetition_range",
    "repetition_penalty_range": "repetition_range",
    "typical": "typical_p",
}
"""What TabbyAPI, text-generation-webui and llama.cpp call our fields."""

_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")


class SamplingFields(Body):
    """OpenAI's sampling fields and those that vLLM's clients add. None takes the model's default, else the neutral one.

    model: None or "" is the first one; an adapter's name is its model with it.  lora: an adapter of the model.
    priority: as vLLM has it, lower goes first.  best_of: n, if anything.  top_k: 0 and -1 are off.
    stop: a string or several.  logit_bias: keyed by token ids as text, as JSON wants it.
    repetition_range, dry_range: 0 and -1 are everything.
    dynamic_temperature: False turns it off whatever its range.  dry_sequence_breakers: see `console.api.dry`.
    negative_prompt: text; each dialect says how it becomes a prompt.  bad_words: more banned_strings.
    """

    aliases = _ALIASES

    model: str | None = None
    lora: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    best_of: int | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: Annotated[int | None, Field(ge=TOP_K_OFF)] = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_a: float = 0.0
    tfs: float = 1.0
    dynamic_temperature: bool | None = None
    min_temp: float = 0.0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    smoothing_factor: float = 0.0
    temperature_last: bool = False
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float | None = None
    repetition_range: Annotated[int, Field(ge=-1)] = 0
    repetition_decay: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: Annotated[int, Field(ge=-1)] = 0
    dry_sequence_breakers: object = None
    cfg_scale: float = 1.0
    negative_prompt: str = ""
    banned_strings: Annotated[list[str], Field(default_factory=list)]
    bad_words: Annotated[list[str], Field(default_factory=list)]
    logit_bias: Annotated[dict[str, float], Field(default_factory=dict)]
    seed: int | None = None
    min_tokens: int = 0
    stop: object = ()
    stop_token_ids: Annotated[list[int], Field(default_factory=list)]
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


def sampling_params(
    fields: SamplingFields,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    negative_prompt_ids: Sequence[int] = (),
) -> SamplingParams:
    """What the engine is told, with the model's recommendations for what the client left open.

    negative_prompt_ids: what the dialect makes of negative_prompt where cfg_scale asks for it.
    Raises InvalidRequest naming the field.
    """
    if fields.best_of is not None and fields.best_of != fields.n:
        asked = shown(fields.best_of)
        raise InvalidRequest(f"best_of is {asked}, not n, {fields.n}: answers are not ranked", param="best_of")
    model.check_token_ids(fields.stop_token_ids, "stop_token_ids")
    defaults = model.tokenizer.generation_defaults
    min_temp, max_temp = _temperature_range(fields)
    return SamplingParams(
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_k=max(0, _first(fields.top_k, defaults.top_k, 0)),
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        typical_p=_first(fields.typical_p, defaults.typical_p, 1.0),
        top_a=fields.top_a,
        tfs=fields.tfs,
        min_temp=min_temp,
        max_temp=max_temp,
        temp_exponent=fields.temp_exponent,
        smoothing_factor=fields.smoothing_factor,
        temperature_last=fields.temperature_last,
        xtc_probability=fields.xtc_probability,
        xtc_threshold=fields.xtc_threshold,
        mirostat=fields.mirostat_mode,
        mirostat_tau=fields.mirostat_tau,
        mirostat_eta=fields.mirostat_eta,
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        repetition_range=max(0, fields.repetition_range),
        repetition_decay=fields.repetition_decay,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        dry_multiplier=fields.dry_multiplier,
        dry_base=fields.dry_base,
        dry_allowed_length=fields.dry_allowed_length,
        dry_range=max(0, fields.dry_range),
        dry_breaker_ids=breaker_ids(fields.dry_sequence_breakers, model) if fields.dry_multiplier else (),
        cfg_scale=fields.cfg_scale,
        negative_prompt_ids=tuple(negative_prompt_ids),
        banned_strings=tuple(dict.fromkeys([*fields.banned_strings, *fields.bad_words])),
        logit_bias=_biases(fields.logit_bias, model),
        seed=fields.seed,
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        stop=_stops(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        logprobs=logprobs,
    ).validate()


def _temperature_range(fields: SamplingFields) -> tuple[float, float]:
    """min_temp and max_temp. Clients send a range of one temperature where dynamic temperature is off."""
    off = fields.dynamic_temperature is False or fields.min_temp == fields.max_temp
    if off and fields.dynamic_temperature:
        raise InvalidRequest("dynamic_temperature needs a max_temp of more than min_temp", param="dynamic_temperature")
    return (0.0, 0.0) if off else (fields.min_temp, fields.max_temp)


def _first(asked: T | None, recommended: T | None, neutral: T) -> T:
    """The first that is given."""
    if asked is not None:
        return asked
    return neutral if recommended is None else recommended


def _stops(stop: object) -> tuple[str, ...]:
    """One string or several as a tuple."""
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequest("stop should be a string or an array of strings", param="stop")
    return tuple(stops)


def _biases(biases: dict[str, float], model: ServedModel) -> dict[int, float]:
    """The same by token id. Only its usual spelling is an id: with others, one token could have two biases."""
    if not all(_TOKEN_ID.fullmatch(key) for key in biases):
        raise InvalidRequest("logit_bias should have token ids as its keys", param="logit_bias")
    by_id = {int(key): bias for key, bias in biases.items()}
    model.check_token_ids(list(by_id), "logit_bias")
    return by_id
