"""What Ollama's endpoints take."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from console.api.dialects.ollama.options import Options, read_options
from console.api.requests.body import Body
from console.api.requests.parameters import NO_THINKING, NOT_CUT, TEXT_ONLY, Refusal
from console.api.requests.schemas import (
    TEXT_OR_NULL,
    TOKEN_IDS,
    JsonSchema,
    ShapedAs,
    conversation_schema,
    message_schema,
)
from console.api.requests.served_model import ServedModel
from console.api.tools import ToolUse, tool_use
from console.api.tools.openai import MAX_TOOLS, ToolField, read_tools
from engine.config import MAX_LOGPROBS
from engine.errors import InvalidRequest

_NO_PICTURES = Refusal("this server makes no pictures", (0,))

REFUSED: Mapping[str, Refusal] = {
    "height": _NO_PICTURES,
    "images": Refusal(TEXT_ONLY, ([],)),
    "shift": Refusal("an answer ends with the context", (False,)),
    "steps": _NO_PICTURES,
    "suffix": Refusal("text can be continued, not filled in", ("",)),
    "template": Refusal("the model's own chat template is used; raw takes a prompt that is made already", ("",)),
    "truncate": Refusal(NOT_CUT, (False,)),
    "width": _NO_PICTURES,
}

MESSAGE_REFUSED: Mapping[str, Refusal] = {
    "images": Refusal(TEXT_ONLY, ([],)),
    "thinking": Refusal(NO_THINKING, ("",)),
}

LATEST = ":latest"
"""The tag that a name without one has."""

_DURATION = re.compile(r"-?(\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")

_LONGEST_DURATION = 64
_KEEP_ALIVE = WithJsonSchema(
    {
        "anyOf": [
            {"type": "number", "not": {"const": 0}},
            {
                "type": "string",
                "pattern": "^-?(?=[^1-9]*[1-9])(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|µs|ms|s|m|h))+$",
                "maxLength": _LONGEST_DURATION,
            },
            {"type": "null"},
        ]
    }
)


class OllamaBody(Body):
    """What all requests to a model may have. options: see `Options`.

    keep_alive: how long the model is to stay in memory. That is the operator's to say, so it changes nothing; 0, which
    asks to unload the model, is refused.
    """

    refused = REFUSED

    model: str | None = None
    options: Annotated[dict[str, Any] | None, ShapedAs(Options)] = None
    keep_alive: Annotated[object, _KEEP_ALIVE] = None

    @property
    def model_name(self) -> str | None:
        """The model's name as it is known here."""
        return self.model and self.model.removesuffix(LATEST)

    def as_named(self, model: ServedModel) -> ServedModel:
        """The model under the name that the client has for it, tag and all, which answers repeat."""
        return replace(model, name=self.model or model.name)

    def check_keep_alive(self) -> None:
        """Raise InvalidRequest for one that is none, or that asks to unload the model."""
        if self.keep_alive is not None and not _seconds(self.keep_alive):
            raise InvalidRequest(
                "keep_alive 0 would unload the model, which the operator does: POST /admin/unload", param="keep_alive"
            )


class AnswerBody(OllamaBody):
    """What /api/generate and /api/chat share. stream: answers are streamed unless it is false.

    format: "json", or a JSON schema.
    think: false keeps a model that can think from it, where its template knows how; true is refused.
    """

    stream: bool = True
    format: Annotated[dict[str, Any] | str, WithJsonSchema({"anyOf": [{"type": "object"}, {"enum": ["json", ""]}]})] = (
        ""
    )
    think: Annotated[bool | str | None, WithJsonSchema({"enum": [False, "", None]})] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    def read(self) -> Options:
        """Its options; raises InvalidRequest for what is wrong with them or any other field."""
        self.check_keep_alive()
        if self.think:
            raise InvalidRequest(
                "think is not supported: answers have no thinking apart from their text", param="think"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return read_options(self.options, model=self.model_name, stream=self.stream, answer_format=self.format)

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token, None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def variables(self) -> dict[str, object]:
        """For the chat template."""
        return {} if self.think is None else {"enable_thinking": bool(self.think)}


class GenerateBody(AnswerBody):
    """What /api/generate takes. raw: the prompt is taken as it is, without a chat template.

    context: what an earlier answer gave; the prompt follows after it.
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
        tool_calls={"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
    ),
    message_schema("tool", required=(), content=TEXT_OR_NULL, tool_name=TEXT_OR_NULL, tool_call_id=TEXT_OR_NULL),
    least=0,
)
"""Likewise, as Ollama has it."""


class ChatBody(AnswerBody):
    """What /api/chat takes."""

    refused_within: ClassVar[Mapping[str, Mapping[str, Refusal]]] = {"messages[].": MESSAGE_REFUSED}

    max_entries: ClassVar[Mapping[str, int]] = {"tools": MAX_TOOLS}

    messages: Annotated[list[Any], Field(default_factory=list), _MESSAGES]
    tools: list[ToolField] | None = None

    def tool_use(self, model: ServedModel) -> ToolUse:
        """The tools that the model is told of; raises InvalidRequest. It may take a while where there are some."""
        return tool_use(model.tokenizer, read_tools(self.tools))


def _seconds(keep_alive: object) -> float:
    """A number of seconds or a duration as Go writes it ("1h30m"); raises InvalidRequest where it is neither."""
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        return keep_alive
    text = keep_alive if isinstance(keep_alive, str) else ""
    if text.lstrip("-") == "0":
        return 0.0
    parts = list(_DURATION.finditer(text.removeprefix("-"))) if len(text) <= _LONGEST_DURATION else []
    if not parts or "".join(part[0] for part in parts) != text.removeprefix("-"):
        raise InvalidRequest(
            "keep_alive should be a number of seconds or a duration, as 5m or 1h30m", param="keep_alive"
        )
    return math.fsum(float(part[1]) for part in parts)
