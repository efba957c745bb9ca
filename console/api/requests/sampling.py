"""The sampling fields that dialects share, and what the engine is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, TypeVar

import msgspec
from pydantic import Field, WithJsonSchema
from pydantic_core import from_json

from console.api.requests.body import Body
from console.api.requests.parameters import SAMPLING_CLAMPED
from console.api.requests.response_format import FormatFields
from console.api.requests.sampler_order import apply_sampler_order
from console.api.requests.schemas import BANNED_STRINGS, BIASES, SAMPLERS, STOP_STRINGS, STOPS, TOKEN_IDS
from console.api.requests.served_model import ServedModel
from engine.config import MAX_GRAMMAR_BYTES, RANGES, SamplingParams, format_number
from engine.errors import InvalidRequest

# Biases of single tokens, as clients name them: by id, or as what must not come.

MAX_TOKENS_NAMED = 8192
"""In a field of a request: more than there are of digits, or with a line break. All that such a request passes looks
through them, in 8 ms altogether."""

BANNED = -100.0
"""The bias of a token that must not come."""

_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")


def read_logit_bias(by_text: Mapping[str, float], model: ServedModel) -> dict[int, float]:
    """`logit_bias` by token id. Only its usual spelling is an id: with others, one token could have two biases.

    Raises InvalidRequest.
    """
    if not all(_TOKEN_ID.fullmatch(key) for key in by_text):
        raise InvalidRequest("logit_bias should have token ids as its keys", param="logit_bias")
    by_id = {int(key): bias for key, bias in by_text.items()}
    model.check_token_ids(list(by_id), "logit_bias")
    return by_id


def read_token_bans(custom: object, model: ServedModel, *, end_tokens: bool) -> dict[int, float]:
    """Biases of the tokens that must not come: those of `custom_token_bans`, and the end tokens where it says so.

    Raises InvalidRequest.
    """
    ids = [*(model.tokenizer.eos_token_ids if end_tokens else ()), *_banned_ids(custom)]
    model.check_token_ids(ids, "custom_token_bans")
    return dict.fromkeys(ids, BANNED)


def _banned_ids(value: object) -> list[int]:
    tokens = value.count(",") + 1 if isinstance(value, str) else len(value) if isinstance(value, list) else 0
    if tokens > MAX_TOKENS_NAMED:
        raise InvalidRequest(
            f"custom_token_bans has {tokens} tokens; it may have {MAX_TOKENS_NAMED}", param="custom_token_bans"
        )
    items = [text.strip() for text in value.split(",") if text.strip()] if isinstance(value, str) else value or []
    if not isinstance(items, list) or not all(_TOKEN_ID.fullmatch(str(item)) for item in items):
        raise InvalidRequest(
            "custom_token_bans should be token ids: an array, or text with commas", param="custom_token_bans"
        )
    return [int(item) for item in items]


# DRY's sequence breakers as clients send them, and the tokens that they stand for.

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS = 256
MAX_BREAKER_CHARACTERS = 200
_LONGEST_TEXT = 8 * MAX_BREAKERS * MAX_BREAKER_CHARACTERS
"""Characters of breakers as JSON, which may take six for one."""


def breaker_ids(value: object, model: ServedModel) -> tuple[int, ...]:
    """The token of each breaker: the last one of the string after a letter, so that it is the one met within a text.

    value: an array of strings, or one as JSON text, with or without its brackets (as text-generation-webui's clients
    send it); None is DEFAULT_BREAKERS. Raises InvalidRequest.
    """
    strings = list(DEFAULT_BREAKERS) if value is None else _strings(value)
    encoded = model.tokenizer.encode_all([f"a{string}" for string in strings], add_special_tokens=False)
    return tuple(dict.fromkeys(ids[-1] for ids in encoded if ids))


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        value = _from_json(value.strip())
    if not isinstance(value, list) or not all(isinstance(string, str) and string for string in value):
        raise _misshapen()
    if len(value) > MAX_BREAKERS:
        raise InvalidRequest(
            f"dry_sequence_breakers holds {len(value)} strings; it takes up to {MAX_BREAKERS}",
            param="dry_sequence_breakers",
        )
    if max(map(len, value), default=0) > MAX_BREAKER_CHARACTERS:
        raise InvalidRequest(
            f"dry_sequence_breakers holds a string of more than {MAX_BREAKER_CHARACTERS} characters",
            param="dry_sequence_breakers",
        )
    return value


def _from_json(text: str) -> object:
    if len(text) > _LONGEST_TEXT:
        raise InvalidRequest(
            f"dry_sequence_breakers has {len(text)} characters; it may have {_LONGEST_TEXT}",
            param="dry_sequence_breakers",
        )
    try:
        return from_json(text if text.startswith("[") else f"[{text}]", allow_inf_nan=False)
    except ValueError:
        raise _misshapen() from None


def _misshapen() -> InvalidRequest:
    return InvalidRequest(
        "dry_sequence_breakers should be an array of strings, none of them empty, or such an array as JSON text",
        param="dry_sequence_breakers",
    )


T = TypeVar("T")
B = TypeVar("B", bound=Body)

TOP_K_OFF = -1
MAX_N = 128
MAX_PRIORITY = 10**6
NO_SEED = -1
MAX_CACHE_SALT = 256
"""Characters: room for a digest of 1,024 bits, and little to keep for each of a queue of requests."""
_ALIASES: Mapping[str, str] = {
    "dry_penalty_last_n": "dry_range",
    "dynatemp_exponent": "temp_exponent",
    "dynatemp_high": "max_temp",
    "dynatemp_low": "min_temp",
    "dynatemp_max": "max_temp",
    "dynatemp_min": "min_temp",
    "guidance_scale": "cfg_scale",
    "min_length": "min_tokens",
    "mirostat": "mirostat_mode",
    "penalty_range": "repetition_range",
    "rep_pen": "repetition_penalty",
    "rep_pen_range": "repetition_range",
    "repeat_last_n": "repetition_range",
    "repeat_penalty": "repetition_penalty",
    "repetition_penalty_range": "repetition_range",
    "stop_sequence": "stopping_strings",
    "tfs_z": "tfs",
    "typical": "typical_p",
}
"""What TabbyAPI, text-generation-webui, KoboldCpp and llama.cpp call our fields."""


class ModelFields(Body):
    """What every request may say of the model, and of its turn.

    model: None or "" is the first one; an adapter's name is its model with it.  lora: an adapter of the model.
    priority: as vLLM has it, lower goes first.
    """

    model: str | None = None
    lora: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0


class SamplingFields(ModelFields, FormatFields):
    """OpenAI's sampling fields and those that vLLM's clients add. None takes the model's default, else the neutral one.

    best_of: how many answers are made, of which n are given.  top_k: 0 and -1 are off.
    stop: a string or several.  logit_bias: keyed by token ids as text, as JSON wants it.
    repetition_range, dry_range: 0 and -1 are everything.
    dynamic_temperature: False turns it off whatever its range.
    dry_sequence_breakers: strings over which no repeat reaches, an array or its JSON as text.
    negative_prompt: text; each dialect says how it becomes a prompt.  bad_words: more banned_strings.
    stopping_strings: more of stop.  seed, sampler_seed: one seed under two names; -1 is none, as vLLM has it.
    dynatemp_range: how far a dynamic temperature lies around `temperature`, where no bounds are given.
    ban_eos_token: whether end tokens must not come.  custom_token_bans: ids of others, an array or text with commas.
    sampler_order, sampler_priority: the order of samplers, where it comes to the one here (docs/sampling.md).
    cache_salt: the prefix cache is shared with requests that send the same one alone; make it hard to guess.
    rep_pen_slope: only 0 and 1, which are off, where there is a penalty for it to bend.
    """

    aliases = _ALIASES
    clamped = SAMPLING_CLAMPED
    ranges = RANGES
    max_entries: ClassVar[Mapping[str, int]] = {"logit_bias": MAX_TOKENS_NAMED, "stop_token_ids": MAX_TOKENS_NAMED}

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    best_of: Annotated[int | None, Field(ge=1, le=MAX_N)] = None
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
    dynatemp_range: Annotated[float, Field(ge=0)] = 0.0
    temp_exponent: float = 1.0
    smoothing_factor: float = 0.0
    temperature_last: bool = False
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_mode: Annotated[int, WithJsonSchema({"enum": [0, 2]})] = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float | None = None
    repetition_range: Annotated[int, Field(ge=-1)] = 0
    repetition_decay: int = 0
    rep_pen_slope: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: Annotated[int, Field(ge=-1)] = 0
    dry_sequence_breakers: object = None
    cfg_scale: float = 1.0
    negative_prompt: str = ""
    banned_strings: Annotated[list[str], Field(default_factory=list), BANNED_STRINGS]
    bad_words: Annotated[list[str], Field(default_factory=list), BANNED_STRINGS]
    logit_bias: Annotated[dict[str, float], Field(default_factory=dict), BIASES]
    ban_eos_token: bool = False
    custom_token_bans: object = None
    sampler_order: Annotated[object, SAMPLERS] = None
    sampler_priority: Annotated[object, SAMPLERS] = None
    seed: int | None = None
    sampler_seed: int | None = None
    min_tokens: int = 0
    stop: Annotated[object, STOPS] = ()
    stopping_strings: Annotated[list[str], Field(default_factory=list), STOP_STRINGS]
    stop_token_ids: Annotated[list[int], Field(default_factory=list), TOKEN_IDS]
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT)] = ""

    @property
    def answers_each(self) -> int:
        """How many answers are made to each prompt."""
        return self.n if self.best_of is None else self.best_of


def limited(body: B, field: str, most: int | None) -> B:
    """The body, its answer no longer than the `most` tokens that any may have where the client does not say how long.

    field: what the dialect, which has a default for it, calls that.
    """
    if most is None or field in body.model_fields_set:
        return body
    return body.model_copy(update={field: min(getattr(body, field), most)})


def sampling_params(
    fields: SamplingFields,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    negative_prompt_ids: Sequence[int] = (),
    fewest_tokens: int = 1,
    ranks: bool = False,
) -> SamplingParams:
    """What the engine is told, with the model's recommendations for what the client left open.

    negative_prompt_ids: what the dialect makes of negative_prompt where cfg_scale asks for it.
    fewest_tokens: 0 where the dialect has a use for a prompt without an answer.  ranks: whether it gives the n best of
    best_of answers.
    Raises InvalidRequest naming the field.
    """
    _check_best_of(fields, ranks)
    if max_tokens is not None and max_tokens < fewest_tokens:
        raise InvalidRequest(
            f"max_tokens is {format_number(max_tokens)}; it must be at least {fewest_tokens}", param="max_tokens"
        )
    model.check_token_ids(fields.stop_token_ids, "stop_token_ids")
    params = msgspec.structs.replace(
        _draw(fields, model),
        negative_prompt_ids=tuple(negative_prompt_ids),
        banned_strings=tuple(dict.fromkeys([*fields.banned_strings, *fields.bad_words])),
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        stop=tuple(dict.fromkeys([*_stops(fields.stop), *fields.stopping_strings])),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        logprobs=0 if logprobs is None and fields.answers_each > fields.n else logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=fields.format(MAX_GRAMMAR_BYTES),
    ).validate()
    return _as_ordered(params, fields)


def _draw(fields: SamplingFields, model: ServedModel) -> SamplingParams:
    """How each next token is chosen."""
    defaults = model.tokenizer.generation_defaults
    temperature = _first(fields.temperature, defaults.temperature, 1.0)
    min_temp, max_temp = _temperature_range(fields, temperature)
    return SamplingParams(
        temperature=temperature,
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
        logit_bias=read_logit_bias(fields.logit_bias, model)
        | read_token_bans(fields.custom_token_bans, model, end_tokens=fields.ban_eos_token),
        seed=_seed(fields),
    )


def _check_best_of(fields: SamplingFields, ranks: bool) -> None:
    """Raise InvalidRequest where answers cannot be ranked as best_of asks."""
    made, given = fields.answers_each, fields.n
    if made == given:
        return
    if not ranks:
        why = "answers are not ranked here; /v1/completions ranks them"
    elif made < given:
        why = "no more answers can be given than are made"
    elif fields.stream:
        why = "which answers are the best is known at the end, so they cannot be streamed"
    else:
        return
    raise InvalidRequest(f"best_of is {made}, not n, {given}: {why}", param="best_of")


def _temperature_range(fields: SamplingFields, middle: float) -> tuple[float, float]:
    """min_temp and max_temp. Clients send a range of one temperature where dynamic temperature is off.

    middle: what dynatemp_range lies around.
    """
    if fields.dynatemp_range and fields.dynamic_temperature is not False and fields.min_temp == fields.max_temp:
        return max(0.0, middle - fields.dynatemp_range), middle + fields.dynatemp_range
    off = fields.dynamic_temperature is False or fields.min_temp == fields.max_temp
    if off and fields.dynamic_temperature:
        raise InvalidRequest("dynamic_temperature needs a max_temp of more than min_temp", param="dynamic_temperature")
    return (0.0, 0.0) if off else (fields.min_temp, fields.max_temp)


def _as_ordered(params: SamplingParams, fields: SamplingFields) -> SamplingParams:
    """The params with what an order of samplers changes; raises InvalidRequest for what cannot be had."""
    if params.repetition_penalty != 1 and fields.rep_pen_slope not in (0, 1):
        raise InvalidRequest(
            "rep_pen_slope is not supported: penalties weigh the same over the whole of their range",
            param="rep_pen_slope",
        )
    for param in ("sampler_order", "sampler_priority"):
        if order := getattr(fields, param):
            params = apply_sampler_order(params, order, param)
    return params


def _seed(fields: SamplingFields) -> int | None:
    """The one that is given under either name."""
    given = {seed for seed in (fields.seed, fields.sampler_seed) if seed is not None and seed != NO_SEED}
    if len(given) > 1:
        raise InvalidRequest("sampler_seed and seed differ; send one of them", param="sampler_seed")
    return next(iter(given), None)


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
