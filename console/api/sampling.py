"""The sampling fields that dialects share, and what the engine is told."""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

from pydantic import Field

from console.api.body import Body
from console.api.served import ServedModel
from engine.config import SamplingParams, shown
from engine.errors import InvalidRequest

T = TypeVar("T")

TOP_K_OFF = -1
MAX_N = 128
_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")


class SamplingFields(Body):
    """OpenAI's sampling fields and those that vLLM's clients add. None takes the model's default, else the neutral one.

    model: None or "" is the loaded one.  best_of: n, if anything.  top_k: 0 and -1 are off.  stop: a string or several.
    logit_bias: keyed by token ids as text, as JSON wants it.
    """

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    best_of: int | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: Annotated[int | None, Field(ge=TOP_K_OFF)] = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], Field(default_factory=dict)]
    seed: int | None = None
    min_tokens: int = 0
    stop: object = ()
    stop_token_ids: Annotated[list[int], Field(default_factory=list)]
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


def sampling_params(
    fields: SamplingFields, model: ServedModel, *, max_tokens: int | None, logprobs: int | None = None
) -> SamplingParams:
    """What the engine is told, with the model's recommendations for what the client left open.

    Raises InvalidRequest naming the field.
    """
    if fields.best_of is not None and fields.best_of != fields.n:
        asked = shown(fields.best_of)
        raise InvalidRequest(f"best_of is {asked}, not n, {fields.n}: answers are not ranked", param="best_of")
    model.check_token_ids(fields.stop_token_ids, "stop_token_ids")
    defaults = model.tokenizer.generation_defaults
    return SamplingParams(
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_k=max(0, _first(fields.top_k, defaults.top_k, 0)),
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        typical_p=_first(fields.typical_p, defaults.typical_p, 1.0),
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
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
