"""Bodies that clients of llama.cpp's server send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, Field, WithJsonSchema

from console.api.requests.body import as_integer
from console.api.requests.chat_body import OPENAI_INERT
from console.api.requests.parameters import (
    LLAMACPP_INERT,
    LLAMACPP_REFUSED,
    NO_DEFAULT_LENGTH,
    SAMPLING_CLAMPED,
    SAMPLING_REFUSED,
    TEXT_ONLY,
    Refusal,
)
from console.api.requests.prompts import Prompt, negative_prompt_ids, read_prompts
from console.api.requests.sampler_order import SAMPLER_LETTERS, apply_sampler_order, dynamic_temperature_only
from console.api.requests.sampling import BANNED, MAX_TOKENS_NAMED, ModelFields, SamplingFields, sampling_params
from console.api.requests.schemas import TEXTS_TO_EMBED, JsonSchema, one_given
from console.api.requests.served_model import ServedModel
from engine.config import MAX_LOGPROBS, SamplingParams, format_number
from engine.errors import InvalidRequest

_LONG_ID = 10
"""Digits that no token id has."""

RANDOM_SEED = 2**32 - 1
"""llama.cpp's unsigned -1."""

_SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
"""The fields that turn each sampler off."""

_SAMPLER_NAMES = {"typical_p": "typ_p", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "typ-p": "typ_p"}
_TOKEN: JsonSchema = {"type": "integer", "minimum": 0}
_TEXT: JsonSchema = {
    "type": "object",
    "properties": {"prompt_string": {"type": "string"}, "multimodal_data": {"type": "array", "maxItems": 0}},
    "required": ["prompt_string"],
    "additionalProperties": False,
}
_ONE: list[JsonSchema] = [
    {"type": "string"},
    _TEXT,
    {"type": "array", "items": {"anyOf": [_TOKEN, {"type": "string"}]}, "contains": _TOKEN, "minItems": 1},
]
_PROMPT = WithJsonSchema({"anyOf": [*_ONE, {"type": "array", "items": {"anyOf": _ONE}, "minItems": 1}]})
_BIAS: JsonSchema = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
_BIASES = WithJsonSchema(
    {
        "anyOf": [
            {
                "type": "array",
                "items": {
                    "type": "array",
                    "prefixItems": [{"anyOf": [_TOKEN, {"type": "string"}]}, _BIAS],
                    "minItems": 2,
                    "maxItems": 2,
                },
            },
            {"type": "object", "additionalProperties": _BIAS},
            {"type": "null"},
        ]
    }
)
_ORDER = WithJsonSchema(
    {
        "anyOf": [
            {"type": "array", "items": {"enum": [*_SAMPLERS, "top_n_sigma"]}, "uniqueItems": True},
            {"type": "string"},
            {"type": "null"},
        ]
    }
)

_ALIASES = {
    **SamplingFields.aliases,
    "grammar": "grammar_string",
    "logprobs": "n_probs",
    "max_completion_tokens": "n_predict",
    "max_new_tokens": "n_predict",
    "max_tokens": "n_predict",
    "n_cmpl": "n",
    "num_predict": "n_predict",
}

_REFUSED: Mapping[str, Refusal] = {
    **SAMPLING_REFUSED,
    **LLAMACPP_REFUSED,
    "add_bos_token": Refusal("prompts are tokenized with the model's own special tokens", (True,)),
    "image_data": Refusal(TEXT_ONLY),
}

_INERT = OPENAI_INERT | LLAMACPP_INERT

_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "n_predict": NO_DEFAULT_LENGTH,
    "temperature": "less than 0 means 0",
}


class LlamaBody(SamplingFields):
    """A completion request, with llama.cpp's defaults. prompt: a text, token ids, or an array with both; or several.

    n_predict: -1 is up to the context's end; 0 computes the prompt alone.  n: number of answers to each prompt.
    temperature: applied after the filters, unless `samplers` has it before them.
    repeat_last_n, repetition_range: last tokens that the penalties use; 0 turns them off, -1 is all.
    dry_range: last tokens that DRY uses; 0 turns it off, -1 is all.
    json_schema: {} is any JSON.  grammar_string: GBNF or Lark.
    logit_bias: pairs of a token id, or a text whose tokens are meant, and a bias, false to ban it; or an object.
    samplers: samplers to use, in their order; accepted if equivalent to one of docs/sampling.md.
    ignore_eos: ban the end tokens.  n_probs: alternatives per token in completion_probabilities.
    return_tokens: add the ids of the answer.  timings_per_token: add timings to every event.
    return_progress: report in a stream how far the prompt is computed.
    response_fields: fields of the last or only answer to return; "a/b" is field b of a, under that name.
    """

    refused = _REFUSED
    inert = _INERT
    clamped = _CLAMPED
    aliases = _ALIASES
    keeps_empty = SamplingFields.keeps_empty | {"json_schema", "samplers"}

    prompt: Annotated[object, _PROMPT]
    n_predict: Annotated[int, Field(ge=-1)] = -1
    temperature: Annotated[float | None, AfterValidator(lambda value: value and max(0.0, value))] = 0.8
    temperature_last: bool = True
    top_k: Annotated[int | None, Field(ge=-1)] = 40
    top_p: float | None = 0.95
    min_p: float | None = 0.05
    typical_p: float | None = 1.0
    repetition_penalty: float | None = 1.0
    repetition_range: Annotated[int, Field(ge=-1)] = 64
    dry_range: Annotated[int, Field(ge=-1)] = -1
    logit_bias: Annotated[Any, _BIASES] = None
    samplers: Annotated[object, _ORDER] = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    return_tokens: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    response_fields: Annotated[list[str], Field(default_factory=list, max_length=100)]

    @property
    def reports_prompt(self) -> bool:
        """True if the stream reports how far the prompt is computed."""
        return self.stream and self.return_progress

    @property
    def sampler_names(self) -> list[str] | None:
        """The samplers to use, in their order, None where the client gave none; raises InvalidRequest."""
        names = [*self.samplers] if isinstance(self.samplers, str | list) else []
        if isinstance(self.samplers, str):
            names = [SAMPLER_LETTERS.get(letter, letter) for letter in self.samplers]
        if self.samplers is None:
            return None
        if not names or not all(isinstance(name, str) for name in names):
            raise InvalidRequest("samplers should be an array of names, or a text of their letters", param="samplers")
        names = [_SAMPLER_NAMES.get(name, name) for name in names]
        if len(set(names)) < len(names):
            raise InvalidRequest("samplers has one of them twice; each is applied once", param="samplers")
        return names

    async def params(self, model: ServedModel) -> SamplingParams:
        """Return the engine's parameters; raises InvalidRequest."""
        names, biases = self.sampler_names, await read_biases(self.logit_bias, model)
        params = sampling_params(
            self._sampling_fields(names, biases),
            model,
            max_tokens=None if self.n_predict < 0 else self.n_predict,
            logprobs=self.n_probs or None,
            negative_prompt_ids=await negative_prompt_ids(self, model),
            fewest_tokens=0,
        )
        if names is not None:
            params = apply_sampler_order(msgspec.structs.replace(params, temperature_last=False), names, "samplers")
        return dynamic_temperature_only(params)

    def _sampling_fields(self, samplers: Sequence[str] | None, biases: Mapping[str, float]) -> SamplingFields:
        """Return the fields that dialects share, with those of samplers that are not used turned off."""
        off = set() if samplers is None else _SAMPLERS.keys() - set(samplers)
        off |= {"penalties"} if self.repetition_range == 0 else set()
        off |= {"dry"} if self.dry_range == 0 else set()
        neutral = {field: value for name in off for field, value in _SAMPLERS[name].items()}
        return self.model_copy(
            update={
                **neutral,
                "logit_bias": biases,
                "ban_eos_token": self.ban_eos_token or (self.ignore_eos and not self.asks_for_format),
                "seed": None if self.seed == RANDOM_SEED else self.seed,
            }
        )


def default_settings() -> tuple[LlamaBody, SamplingParams]:
    """Return a request without settings, and the parameters of its answer."""
    body = LlamaBody.from_document({"prompt": ""})
    params = SamplingParams(
        temperature=body.temperature or 0.0,
        top_k=body.top_k or 0,
        top_p=body.top_p or 1.0,
        min_p=body.min_p or 0.0,
        temperature_last=body.temperature_last,
    )
    return body, params


async def read_biases(value: object, model: ServedModel) -> dict[str, float]:
    """Return llama.cpp's `logit_bias` by token id, as text; biases of one token add up. Raises InvalidRequest."""
    pairs = list(value.items()) if isinstance(value, dict) else [] if value is None else value
    if not isinstance(pairs, list):
        raise _wrong_bias()
    read = [_read_bias(pair, of_object=isinstance(value, dict)) for pair in pairs]
    texts = [token for token, _ in read if isinstance(token, str)]
    encoded = iter(await model.encode(texts, add_special_tokens=False))
    biases: defaultdict[int, float] = defaultdict(float)
    for token, bias in read:
        for token_id in dict.fromkeys(next(encoded)) if isinstance(token, str) else (token,):
            biases[token_id] = max(BANNED, min(-BANNED, biases[token_id] + bias))
    if len(biases) > MAX_TOKENS_NAMED:
        raise InvalidRequest(f"logit_bias has {len(biases)} tokens; the max is {MAX_TOKENS_NAMED}", param="logit_bias")
    return {str(token_id): bias for token_id, bias in biases.items()}


def _read_bias(pair: object, *, of_object: bool) -> tuple[int | str, float]:
    """Return a token id, or a text whose tokens are meant, and its bias. of_object: ids are texts, too."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise _wrong_bias()
    token, bias = as_integer(pair[0]), BANNED if pair[1] is False else pair[1]
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise _wrong_bias()
    if not BANNED <= bias <= -BANNED:
        raise InvalidRequest(f"logit_bias has {format_number(bias)}; it must be -100 to 100", param="logit_bias")
    if isinstance(token, str) and of_object and len(token) < _LONG_ID and token.isascii() and token.isdecimal():
        return int(token), bias
    if isinstance(token, bool) or not isinstance(token, int | str):
        raise _wrong_bias()
    return token, bias


def _wrong_bias() -> InvalidRequest:
    return InvalidRequest(
        "logit_bias should be an array of pairs, each a token id or a text and a bias or false", param="logit_bias"
    )


# Prompts: a text, token ids, or both in one array; or an array of such.


def count_prompts(value: object) -> int:
    """Return the number of prompts in `value`. Raises InvalidRequest where it is none."""
    return len(_prompts_of(value))


async def llama_prompts(value: object, model: ServedModel) -> list[Prompt]:
    """Return the prompts. Raises InvalidRequest."""
    return await read_prompts([await _read_prompt(item, model) for item in _prompts_of(value)], model)


def _prompts_of(value: object) -> list[object]:
    if isinstance(value, list) and not any(isinstance(as_integer(item), int) for item in value):
        if not value:
            raise InvalidRequest("prompt is an empty array", param="prompt")
        return value
    return [value]


async def _read_prompt(item: object, model: ServedModel) -> str | list[int]:
    """Return a prompt as a text or as ids; a text that begins it gets the model's special tokens."""
    match item:
        case str(text):
            return text
        case {"prompt_string": str(text), **others} if not others.get("multimodal_data") and len(others) < 2:
            return text
        case list(parts):
            model.check_length(len(parts), "prompt")
            return await _read_parts([*map(as_integer, parts)], model)
        case _:
            raise _wrong_prompt()


async def _read_parts(parts: Sequence[object], model: ServedModel) -> list[int]:
    """Return the ids of an array of ids and texts."""
    first, *_ = parts or [None]
    texts = [part for part in parts if isinstance(part, str)]
    encoded = await model.encode(texts, add_special_tokens=False)
    if isinstance(first, str):
        encoded[:1] = await model.encode([first])
    found = iter(encoded)
    ids: list[int] = []
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise _wrong_prompt()
        ids += next(found) if isinstance(part, str) else [part]
    return ids


def _wrong_prompt() -> InvalidRequest:
    return InvalidRequest("prompt should be text, an array of tokens and texts, or several of these", param="prompt")


# Bodies of the endpoints for tokens and vectors.


class TokenizeBody(ModelFields):
    """A text to tokenize. add_special: with the tokens that the model expects around it.

    parse_special: false refuses a text with control tokens, which are always tokens of their own.
    with_pieces: also return the text of each token.
    """

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class EmbeddingBody(ModelFields):
    """Texts to embed.

    content, input: a text, token ids, or an array of either.  embd_normalize: 2, vectors of length 1.
    """

    prompt_field = "content"
    aliases: ClassVar[Mapping[str, str]] = {"input": "content"}
    keeps_empty = frozenset({"content"})

    content: Annotated[object, TEXTS_TO_EMBED] = None
    rules: ClassVar[Sequence[JsonSchema]] = [one_given("content", "input")]
    embd_normalize: Literal[2] = 2
