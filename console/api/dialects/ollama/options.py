"""Ollama's options: its names, neutral values and defaults, as the sampling fields that dialects share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import Field

from console.api.requests.parameters import CONTEXT_LENGTH, NO_DEFAULT_LENGTH, SAMPLING_CLAMPED, Refusal
from console.api.requests.response_format import Named
from console.api.requests.sampling import SamplingFields, sampling_params
from console.api.requests.served_model import ServedModel
from console.api.requests.structured_output import json_grammar, json_object_grammar
from engine.config import SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
"""Ollama's, where neither the client nor the model's makers set one."""

_OWN = ("num_predict", "num_ctx", "repeat_last_n")
"""Options that mean something else than other dialects' fields of that name."""

_NO_RANGE = 0


_REFUSED: Mapping[str, Refusal] = {
    "embedding_only": Refusal("the model is loaded whole", (False,)),
    "penalize_newline": Refusal("line breaks are penalised as all tokens are", (True,)),
    "rope_frequency_base": Refusal("how positions are scaled is set where the model is loaded", (0,)),
    "rope_frequency_scale": Refusal("how positions are scaled is set where the model is loaded", (0,)),
    "vocab_only": Refusal("the model is loaded whole", (False,)),
}

_INERT = frozenset(
    {
        "f16_kv",  # how the model is loaded is the operator's choice, and so are the others here
        "logits_all",
        "low_vram",
        "main_gpu",
        "num_batch",
        "num_gpu",
        "num_keep",  # the context is never shifted, so all of it is kept
        "num_thread",
        "numa",
        "use_mlock",
        "use_mmap",
    }
)

_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "num_ctx": CONTEXT_LENGTH,
    "num_predict": NO_DEFAULT_LENGTH,
}


class Options(SamplingFields):
    """Fields of `options`; samplers that Ollama lacks may be set there too, by their own names.

    answer_format: the body's `format`: "json", a JSON schema, or "" for any text.
    num_predict: -1 and -2 are up to the context's end.  num_ctx: tokens of prompt and answer together, up to the loaded
    context.  repeat_last_n: tokens that the penalties look at; 0 turns them off, -1 is all.
    """

    refused = _REFUSED
    inert = _INERT
    clamped = _CLAMPED
    internal = frozenset({"answer_format", "model", "lora", "priority", "n", "best_of", "stream"})
    aliases: ClassVar[Mapping[str, str]] = {
        **{name: field for name, field in SamplingFields.aliases.items() if name not in _OWN},
        "repeat_penalty": "repetition_penalty",
        "tfs_z": "tfs",
    }

    n: Literal[1] = 1
    answer_format: dict[str, Any] | str = ""
    num_predict: Annotated[int, Field(ge=-2)] = -1
    num_ctx: Annotated[int | None, Field(ge=1)] = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**31)] = 64

    @property
    def asks_for_format(self) -> bool:
        """True if the answer has a format."""
        return bool(self.answer_format) or super().asks_for_format

    def _named(self, max_bytes: int) -> Iterator[Named]:
        yield from super()._named(max_bytes)
        match self.answer_format:
            case "":
                return
            case "json":
                yield "format", partial(json_object_grammar, "format")
            case str():
                raise InvalidRequest('format should be "json" or a JSON schema', param="format")
            case schema:
                yield "format", partial(json_grammar, schema, "format", max_bytes=max_bytes)


def read_options(options: Mapping[str, Any] | None, **body_fields: object) -> Options:
    """Return the options with fields of the body itself, by our names; raises InvalidRequest naming the field."""
    fields = dict(options or {})
    for name in sorted(Options.internal & fields.keys()):
        raise InvalidRequest(f"{name} is not an option", param=f"options.{name}")
    return Options.of({**fields, **body_fields})


def options_params(
    options: Options, model: ServedModel, prompt_tokens: int, *, logprobs: int | None = None
) -> SamplingParams:
    """Return the engine's parameters for a prompt. Raises InvalidRequest."""
    recommended = model.tokenizer.generation_defaults
    missing = {
        name: default
        for name, default in _DEFAULTS.items()
        if getattr(options, name) is None and getattr(recommended, name) is None
    }
    fields = options.model_copy(update=missing)
    params = sampling_params(fields, model, max_tokens=_room(options, model, prompt_tokens), logprobs=logprobs)
    if options.repeat_last_n == _NO_RANGE:
        return replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    return params if options.repetition_range else replace(params, repetition_range=max(0, options.repeat_last_n))


def _room(options: Options, model: ServedModel, prompt_tokens: int) -> int | None:
    """Return the max tokens of the answer, None for as many as fit."""
    limit = options.num_predict if options.num_predict > 0 else None
    if options.num_ctx is None or options.num_ctx >= model.loaded.max_model_len:
        return limit
    if prompt_tokens >= options.num_ctx:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens; num_ctx leaves room for {options.num_ctx - 1} and the first token "
            "of the answer, and prompts are not truncated",
            param="num_ctx",
            prompt_tokens=prompt_tokens,
            limit=options.num_ctx - 1,
            max_model_len=options.num_ctx,
        )
    room = options.num_ctx - prompt_tokens
    return room if limit is None else min(limit, room)
