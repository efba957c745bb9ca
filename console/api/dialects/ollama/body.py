"""Bodies of Ollama's endpoints, and their options: its names and defaults for the fields that dialects share."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from aiohttp import web
from msgspec.structs import replace
from pydantic import Field, WithJsonSchema

from console.api.http.auth import may_load
from console.api.requests.body import Body
from console.api.requests.parameters import (
    CONTEXT_LENGTH,
    NO_DEFAULT_LENGTH,
    NOT_CUT,
    SAMPLING_CLAMPED,
    TEXT_ONLY,
    Refusal,
)
from console.api.requests.sampling import SamplingFields, sampling_params
from console.api.requests.schemas import (
    TEXT_OR_NULL,
    TOKEN_IDS,
    JsonSchema,
    ShapedAs,
    conversation_schema,
    message_schema,
)
from console.api.requests.served_model import ServedModel
from console.api.requests.structured_output import RequestedFormat, json_grammar, json_object_grammar
from console.api.requests.thinking import ThinkingOptions
from console.api.tools import ToolUse, tool_use
from console.api.tools.openai import MAX_TOOLS, ToolField, read_tools
from engine.config import MAX_LOGPROBS, SamplingParams
from engine.engine import Engine
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.text.thinking import format_of

if TYPE_CHECKING:
    from console.api.context import ApiContext

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
"""Ollama's, where neither the client nor the model's makers set one."""

_OWN = ("num_predict", "num_ctx", "repeat_last_n")
"""Options that mean something else than other dialects' fields of that name."""

_NO_RANGE = 0


_OPTIONS_REFUSED: Mapping[str, Refusal] = {
    "embedding_only": Refusal("the model is always loaded completely", (False,)),
    "penalize_newline": Refusal("line breaks are penalised like other tokens", (True,)),
    "rope_frequency_base": Refusal("RoPE scaling is set at load", (0,)),
    "rope_frequency_scale": Refusal("RoPE scaling is set at load", (0,)),
    "vocab_only": Refusal("the model is always loaded completely", (False,)),
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
    """Fields of `options`; samplers that Ollama lacks can be set by their own names.

    answer_format: the body's `format`: "json", a JSON schema, or "" for any text.
    num_predict: -1 and -2 mean up to the end of the context.  num_ctx: tokens of prompt and answer,
    up to the loaded context.  repeat_last_n: last tokens that the penalties use; 0 turns them off, -1 is all.
    """

    refused = _OPTIONS_REFUSED
    inert = _INERT
    clamped = _CLAMPED
    keeps_empty = SamplingFields.keeps_empty | {"answer_format"}
    internal = frozenset({"answer_format", "model", "lora", "priority", "n", "best_of", "stream", "why"})
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

    def _requested_formats(self, max_bytes: int) -> Iterator[RequestedFormat]:
        yield from super()._requested_formats(max_bytes)
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
    return Options.from_document({**fields, **body_fields})


def options_params(
    options: Options, model: ServedModel, prompt_tokens: int, *, logprobs: int | None = None
) -> SamplingParams:
    """Return the engine's parameters for a prompt. Raises InvalidRequest."""
    recommended = model.generation_defaults
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


_NO_PICTURES = Refusal("images are not supported", (0,))

REFUSED: Mapping[str, Refusal] = {
    "height": _NO_PICTURES,
    "images": Refusal(TEXT_ONLY),
    "shift": Refusal("an answer always ends at the context limit", (False,)),
    "steps": _NO_PICTURES,
    "suffix": Refusal("infilling is not supported"),
    "template": Refusal("the model's own chat template is used; raw takes a rendered prompt"),
    "truncate": Refusal(NOT_CUT, (False,)),
    "width": _NO_PICTURES,
}

MESSAGE_REFUSED: Mapping[str, Refusal] = {
    "images": Refusal(TEXT_ONLY),
}

LATEST = ":latest"
"""The tag of a name without one."""

_DURATION = re.compile(r"-?(\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_DURATION_LENGTH = 64
_KEEP_ALIVE = WithJsonSchema(
    {
        "anyOf": [
            {"type": "number"},
            {
                "type": "string",
                "pattern": "^-?(0|(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|µs|ms|s|m|h))+)$",
                "maxLength": _MAX_DURATION_LENGTH,
            },
            {"type": "null"},
        ]
    }
)


class OllamaBody(Body):
    """Fields of all requests to a model. options: see `Options`.

    keep_alive: how long a model that was loaded by a request stays after it, in seconds or as a duration; 0: no longer,
    below 0: for ever. Models that an operator has loaded stay as the operator says.
    """

    refused = REFUSED

    model: str | None = None
    options: Annotated[dict[str, Any] | None, ShapedAs(Options)] = None
    keep_alive: Annotated[object, _KEEP_ALIVE] = None

    @property
    def model_name(self) -> str | None:
        """The model's name on this server."""
        return self.model and self.model.removesuffix(LATEST)

    def with_client_name(self, model: ServedModel) -> ServedModel:
        """Return the model under the client's name of it, tag included, which answers repeat."""
        return dataclasses.replace(model, name=self.model or model.name)

    def keep_loaded(self, request: web.Request, engine: Engine, model: ServedModel, *, stops: bool = False) -> None:
        """Have a model that a request has loaded stay as keep_alive says, where the client may load models; any other
        stays as the operator says.

        stops: the request asks for nothing else. Raises InvalidRequest where 0 then unloads nothing.
        """
        client_may = may_load(request)
        applied = client_may and engine.keep_alive(model.key, self.keep_alive_s)
        if stops and not applied and self.keep_alive_s == 0:
            raise InvalidRequest(
                "keep_alive 0 would unload a model that an operator loaded; POST /admin/unload does so"
                if client_may
                else "keep_alive 0 would unload a model, which needs a key with the scope load",
                param="keep_alive",
            )

    async def unloads(self, request: web.Request, context: ApiContext) -> bool:
        """Return whether a request without a prompt asks for nothing more than that its model leaves memory, which it
        has. Raises ModelNotFound."""
        name = self.model_name
        if not name or self.keep_alive_s != 0 or name in context.unnamed_models or context.engine.answers_now(name):
            return False
        return (await context.models_for(request).find(name)).state in ("unloaded", "idle")

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds of keep_alive; None where it is not given. Raises InvalidRequest where it is no duration."""
        return None if self.keep_alive is None else _seconds(self.keep_alive)


class AnswerBody(OllamaBody):
    """Fields of /api/generate and /api/chat. stream: answers are streamed unless it is false.

    format: "json", or a JSON schema.
    think: true or false switches thinking on or off; low, medium or high is how hard to think. For models without
    efforts of their own, low and medium are budgets of 1,024 and 4,096 tokens. null leaves it to the model.
    why: add the latency by cause, in milliseconds, to the answer or the last event.
    """

    keeps_empty = frozenset({"format"})

    stream: bool = True
    why: bool = False
    format: Annotated[dict[str, Any] | str, WithJsonSchema({"anyOf": [{"type": "object"}, {"enum": ["json", ""]}]})] = (
        ""
    )
    think: Literal[True, False, "low", "medium", "high"] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    def read(self) -> Options:
        """Return the options; raises InvalidRequest for these and for other fields that are wrong."""
        _ = self.keep_alive_s
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        body = {"model": self.model_name, "stream": self.stream, "answer_format": self.format, "why": self.why}
        return read_options(self.options, **body)

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token, None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def thinking(self, model: ServedModel) -> ThinkingOptions:
        """Return what is asked of the thinking; raises InvalidRequest for a model that does not think."""
        if self.think and format_of(model.tokenizer, model.thinking) is None:
            raise InvalidRequest(f'"{model.name}" does not support thinking', param="think")
        return ThinkingOptions(effort=self.think) if isinstance(self.think, str) else ThinkingOptions(self.think)


class GenerateBody(AnswerBody):
    """A generation request. raw: use the prompt as it is, without a chat template.

    context: context of an earlier answer, which the prompt continues.
    """

    prompt: str = ""
    system: str = ""
    raw: bool = False
    context: Annotated[list[int], Field(default_factory=list), TOKEN_IDS]


_CALL: JsonSchema = {
    "type": "object",
    "properties": {
        "id": TEXT_OR_NULL,
        "function": {
            "type": "object",
            "properties": {"name": TEXT_OR_NULL, "arguments": {"type": "object"}},
            "required": ["arguments"],
        },
    },
    "required": ["function"],
}
_MESSAGES = conversation_schema(
    message_schema("system", "user", required=(), content=TEXT_OR_NULL),
    message_schema(
        "assistant",
        required=(),
        content=TEXT_OR_NULL,
        thinking=TEXT_OR_NULL,
        tool_calls={"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
    ),
    message_schema("tool", required=(), content=TEXT_OR_NULL, tool_name=TEXT_OR_NULL, tool_call_id=TEXT_OR_NULL),
    least=0,
)
"""A conversation as Ollama has it."""


class ChatBody(AnswerBody):
    """A chat request."""

    refused_within: ClassVar[Mapping[str, Mapping[str, Refusal]]] = {"messages[].": MESSAGE_REFUSED}

    max_entries: ClassVar[Mapping[str, int]] = {"tools": MAX_TOOLS}

    messages: Annotated[list[Any], Field(default_factory=list), _MESSAGES]
    tools: list[ToolField] | None = None

    def tool_use(self, model: ServedModel) -> ToolUse:
        """Return the tools for the prompt; raises InvalidRequest. Compiling their grammars may take a while."""
        return tool_use(model.tokenizer, read_tools(self.tools))


def _seconds(keep_alive: object) -> float:
    """Return seconds of a number, or of a duration as Go writes it ("1h30m"). Raises InvalidRequest."""
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        return keep_alive
    text = keep_alive if isinstance(keep_alive, str) else ""
    if text.lstrip("-") == "0":
        return 0.0
    parts = list(_DURATION.finditer(text.removeprefix("-"))) if len(text) <= _MAX_DURATION_LENGTH else []
    if not parts or "".join(part[0] for part in parts) != text.removeprefix("-"):
        raise InvalidRequest(
            "keep_alive should be a number of seconds or a duration, as 5m or 1h30m", param="keep_alive"
        )
    return math.fsum(float(part[1]) * _UNITS[part[3]] for part in parts) * (-1 if text.startswith("-") else 1)
