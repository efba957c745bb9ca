"""The sampling fields that dialects share, and the engine's parameters that are made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import Field, WithJsonSchema, create_model
from pydantic_core import from_json

from console.api.requests.body import Body, as_integers
from console.api.requests.parameters import SAMPLING_CLAMPED
from console.api.requests.sampler_order import apply_sampler_order
from console.api.requests.schemas import BANNED_STRINGS, BIASES, SAMPLERS, STOP_STRINGS, STOPS, TOKEN_IDS
from console.api.requests.served_model import ServedModel
from console.api.requests.structured_output import FormatFields
from engine.config import MAX_GRAMMAR_BYTES, PARAMETERS, RANGES, SamplingParams, format_number
from engine.errors import InvalidRequest
from engine.text.tokenizer_config import GenerationDefaults

# Biases of single tokens, by id or as bans.

MAX_TOKENS_NAMED = 8192
"""Tokens in a field of a request: more than there are of digits, or with a line break. Checking them takes 8 ms."""

BANNED = -100.0
"""The bias of a banned token."""

_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")


def read_logit_bias(by_text: Mapping[str, float], model: ServedModel) -> dict[int, float]:
    """Return `logit_bias` by token id. Only its usual spelling is an id: with others, one token could have two biases.

    Raises InvalidRequest.
    """
    if not all(_TOKEN_ID.fullmatch(key) for key in by_text):
        raise InvalidRequest("logit_bias should have token ids as its keys", param="logit_bias")
    by_id = {int(key): bias for key, bias in by_text.items()}
    model.check_token_ids(list(by_id), "logit_bias")
    return by_id


def read_token_bans(custom: object, model: ServedModel, *, end_tokens: bool) -> dict[int, float]:
    """Return the biases of banned tokens: those of `custom_token_bans`, and with `end_tokens` the model's end tokens.

    Raises InvalidRequest.
    """
    ids = [*(model.tokenizer.eos_token_ids if end_tokens else ()), *_banned_ids(custom)]
    model.check_token_ids(ids, "custom_token_bans")
    return dict.fromkeys(ids, BANNED)


def _banned_ids(value: object) -> list[int]:
    tokens = value.count(",") + 1 if isinstance(value, str) else len(value) if isinstance(value, list) else 0
    if tokens > MAX_TOKENS_NAMED:
        raise InvalidRequest(
            f"custom_token_bans has {tokens} tokens; the max is {MAX_TOKENS_NAMED}", param="custom_token_bans"
        )
    items = [text.strip() for text in value.split(",") if text.strip()] if isinstance(value, str) else value or []
    items = as_integers(items)
    if not isinstance(items, list) or not all(_TOKEN_ID.fullmatch(str(item)) for item in items):
        raise InvalidRequest(
            "custom_token_bans should be token ids: an array, or text with commas", param="custom_token_bans"
        )
    return [int(item) for item in items]


# DRY's sequence breakers as clients send them, and their tokens.

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS = 256
MAX_BREAKER_CHARACTERS = 200
_MAX_TEXT = 8 * MAX_BREAKERS * MAX_BREAKER_CHARACTERS
"""Characters of breakers as JSON, which may take six for one."""


def breaker_ids(value: object, model: ServedModel) -> tuple[int, ...]:
    """Return the token of each breaker: the last one of the string after a letter, as it is within a text.

    value: an array of strings, or one as JSON text, with or without its brackets (as text-generation-webui's clients
    send it); None is DEFAULT_BREAKERS. Raises InvalidRequest.
    """
    strings = list(DEFAULT_BREAKERS) if value is None else _read_breakers(value)
    encoded = model.tokenizer.encode_all([f"a{string}" for string in strings], add_special_tokens=False)
    return tuple(dict.fromkeys(ids[-1] for ids in encoded if ids))


def _read_breakers(value: object) -> list[str]:
    if isinstance(value, str):
        value = _from_json(value.strip())
    if not isinstance(value, list) or not all(isinstance(string, str) and string for string in value):
        raise _wrong_breakers()
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
    if len(text) > _MAX_TEXT:
        raise InvalidRequest(
            f"dry_sequence_breakers has {len(text)} characters; the max is {_MAX_TEXT}",
            param="dry_sequence_breakers",
        )
    try:
        return from_json(text if text.startswith("[") else f"[{text}]", allow_inf_nan=False)
    except ValueError:
        raise _wrong_breakers() from None


def _wrong_breakers() -> InvalidRequest:
    return InvalidRequest(
        "dry_sequence_breakers should be an array of strings, none of them empty, or such an array as JSON text",
        param="dry_sequence_breakers",
    )


B = TypeVar("B", bound=Body)

MAX_N = 128
MAX_PRIORITY = 10**6
NO_SEED = -1
MAX_CACHE_SALT = 256
"""Characters: room for a digest of 1,024 bits, and little to keep for each of a queue of requests."""
_ROWS = tuple(row for row in PARAMETERS.values() if isinstance(row.neutral, int | float))
"""Numbers and switches, each a field of requests; lists and texts are read in ways of their own."""

_ALIASES: Mapping[str, str] = {
    **{alias: row.http_name for row in _ROWS for alias in row.aliases},
    "stop_sequence": "stopping_strings",
}
"""Names of the fields in TabbyAPI, text-generation-webui, KoboldCpp and llama.cpp."""

_RECOMMENDED = frozenset(GenerationDefaults.__struct_fields__)


class ModelFields(Body):
    """Fields of every request about the model, and its turn.

    model: name of a model, or of an adapter; None or "" is the first model.  lora: name of an adapter of the model.
    priority: lower values go first, as in vLLM.
    """

    model: str | None = None
    lora: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0


def _row_fields() -> dict[str, Any]:
    """Type and default of each row as a field; None is the model's recommendation where its makers may give one."""
    fields: dict[str, Any] = {}
    for row in _ROWS:
        kind: Any = type(row.neutral)
        default = row.neutral
        if row.name in _RECOMMENDED:
            kind, default = kind | None, None
        if row.sent_low is not None:
            kind = Annotated[kind, Field(ge=row.sent_low)]
        fields[row.http_name] = (kind, default)
    return fields


if TYPE_CHECKING:

    class RowFields(ModelFields):
        """A field for each row; here those that are read by name."""

        temperature: float | None
        min_temp: float
        max_temp: float
        repetition_penalty: float | None
        repetition_range: int
        cfg_scale: float
        ignore_eos: bool

else:
    RowFields = create_model("RowFields", __base__=ModelFields, __module__=__name__, **_row_fields())


class SamplingFields(RowFields, FormatFields):
    """OpenAI's sampling fields and those that vLLM's clients add. None takes the model's default, else the neutral one.

    best_of: number of answers to generate; the best n are returned.
    stop: a string, or an array of strings.  logit_bias: bias by token id (a string, as JSON requires).
    dynamic_temperature: false turns it off, whatever its range.
    dry_sequence_breakers: strings that end a repeat, [] for none; an array, or its JSON as text.
    negative_prompt: text; see each dialect for how it becomes a prompt.  bad_words: added to banned_strings.
    stopping_strings: added to stop.  seed, sampler_seed: random seed; -1 is none.
    dynatemp_range: range of a dynamic temperature around `temperature`, if no bounds are given.
    ban_eos_token: ban end tokens.  custom_token_bans: ids of banned tokens, an array or text with commas.
    sampler_order, sampler_priority: order of samplers; accepted if equivalent to the order in docs/sampling.md.
    cache_salt: share the prefix cache only with requests of the same salt; choose one that is hard to guess.
    rep_pen_slope: only 0 and 1 (off) if a repetition penalty is set.
    why: add the latency by cause, in milliseconds, to the answer or the last event.
    """

    aliases = _ALIASES
    clamped = SAMPLING_CLAMPED
    ranges = RANGES
    keeps_empty = frozenset({"dry_sequence_breakers"})
    max_entries: ClassVar[Mapping[str, int]] = {"logit_bias": MAX_TOKENS_NAMED, "stop_token_ids": MAX_TOKENS_NAMED}

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    best_of: Annotated[int | None, Field(ge=1, le=MAX_N)] = None
    stream: bool = False
    dynamic_temperature: bool | None = None
    dynatemp_range: Annotated[float, Field(ge=0)] = 0.0
    mirostat_mode: Annotated[int, WithJsonSchema({"enum": [0, 2]})] = 0
    rep_pen_slope: float = 1.0
    dry_sequence_breakers: object = None
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
    stop: Annotated[object, STOPS] = ()
    stopping_strings: Annotated[list[str], Field(default_factory=list), STOP_STRINGS]
    stop_token_ids: Annotated[list[int], Field(default_factory=list), TOKEN_IDS]
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT)] = ""
    why: bool = False

    @classmethod
    def _docs(cls) -> list[str]:
        return [*super()._docs(), "\n".join(f"{row.http_name}: {row.meaning}." for row in _ROWS)]

    @property
    def reports_prompt(self) -> bool:
        """True if the stream reports how far the prompt is computed."""
        return False

    @property
    def answers_each(self) -> int:
        """Number of answers that are generated for each prompt."""
        return self.n if self.best_of is None else self.best_of


def limit_length(body: B, field: str, most: int | None) -> B:
    """Return the body with its default length limited to `most` tokens; a length that the client gave stays.

    field: the dialect's name of the length.
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
    """Return the engine's parameters, with the model's recommendations for what the client left open.

    negative_prompt_ids: what the dialect makes of negative_prompt where cfg_scale asks for it.
    fewest_tokens: 0 where the dialect has a use for a prompt without an answer.  ranks: True if it gives the n best
    of best_of answers.
    Raises InvalidRequest naming the field.
    """
    _check_best_of(fields, ranks)
    if max_tokens is not None and max_tokens < fewest_tokens:
        raise InvalidRequest(
            f"max_tokens is {format_number(max_tokens)}; it must be at least {fewest_tokens}", param="max_tokens"
        )
    model.check_token_ids(fields.stop_token_ids, "stop_token_ids")
    values = _row_values(fields, model.generation_defaults)
    min_temp, max_temp = _temperature_range(fields, values["temperature"])
    values |= {
        "min_temp": min_temp,
        "max_temp": max_temp,
        "dry_breaker_ids": breaker_ids(fields.dry_sequence_breakers, model) if values["dry_multiplier"] else (),
        "logit_bias": read_logit_bias(fields.logit_bias, model)
        | read_token_bans(fields.custom_token_bans, model, end_tokens=fields.ban_eos_token),
        "seed": _read_seed(fields),
        "negative_prompt_ids": tuple(negative_prompt_ids),
        "banned_strings": tuple(dict.fromkeys([*fields.banned_strings, *fields.bad_words])),
        "max_tokens": max_tokens,
        "stop": tuple(dict.fromkeys([*_read_stops(fields.stop), *fields.stopping_strings])),
        "stop_token_ids": tuple(fields.stop_token_ids),
        "logprobs": 0 if logprobs is None and fields.answers_each > fields.n else logprobs,
        "prompt_logprobs": prompt_logprobs,
        "grammar": fields.format(MAX_GRAMMAR_BYTES),
    }
    return _apply_order(SamplingParams(**values).validate(), fields)


def _row_values(fields: SamplingFields, recommended: GenerationDefaults) -> dict[str, Any]:
    """Return the parameters that have a row, by the engine's names; one left open is as the model recommends."""
    values: dict[str, Any] = {}
    for row in _ROWS:
        value = getattr(fields, row.http_name)
        if value is None:
            value = getattr(recommended, row.name, None)
        if value is None:
            value = row.neutral
        values[row.name] = value if row.sent_low is None else max(row.low, value)
    return values


def _check_best_of(fields: SamplingFields, ranks: bool) -> None:
    """Raise InvalidRequest where answers cannot be ranked as best_of asks."""
    made, given = fields.answers_each, fields.n
    if made == given:
        return
    if not ranks:
        why = "answers are ranked only by /v1/completions"
    elif made < given:
        why = "it must be at least n"
    elif fields.stream:
        why = "the best answers cannot be streamed"
    else:
        return
    raise InvalidRequest(f"best_of is {made}, not n, {given}: {why}", param="best_of")


def _temperature_range(fields: SamplingFields, middle: float) -> tuple[float, float]:
    """Return min_temp and max_temp. Clients send a range of one temperature where dynamic temperature is off.

    middle: the temperature in the middle of dynatemp_range.
    """
    if fields.dynatemp_range and fields.dynamic_temperature is not False and fields.min_temp == fields.max_temp:
        return max(0.0, middle - fields.dynatemp_range), middle + fields.dynatemp_range
    off = fields.dynamic_temperature is False or fields.min_temp == fields.max_temp
    if off and fields.dynamic_temperature:
        raise InvalidRequest("dynamic_temperature needs a max_temp of more than min_temp", param="dynamic_temperature")
    return (0.0, 0.0) if off else (fields.min_temp, fields.max_temp)


def _apply_order(params: SamplingParams, fields: SamplingFields) -> SamplingParams:
    """Return the params in the client's order of samplers; raises InvalidRequest where that is impossible."""
    if params.repetition_penalty != 1 and fields.rep_pen_slope not in (0, 1):
        raise InvalidRequest(
            "rep_pen_slope is not supported: penalties are constant over their range",
            param="rep_pen_slope",
        )
    for param in ("sampler_order", "sampler_priority"):
        if order := getattr(fields, param):
            params = apply_sampler_order(params, order, param)
    return params


def _read_seed(fields: SamplingFields) -> int | None:
    """Return the seed, which has two names."""
    given = {seed for seed in (fields.seed, fields.sampler_seed) if seed is not None and seed != NO_SEED}
    if len(given) > 1:
        raise InvalidRequest("sampler_seed and seed differ; send one of them", param="sampler_seed")
    return next(iter(given), None)


def _read_stops(stop: object) -> tuple[str, ...]:
    """Return one string or several as a tuple."""
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequest("stop should be a string or an array of strings", param="stop")
    return tuple(stops)
