"""Bodies of Ollama's endpoints."""

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
"""The tag of a name without one."""

_DURATION = re.compile(r"-?(\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")

_MAX_DURATION_LENGTH = 64
_KEEP_ALIVE = WithJsonSchema(
    {
        "anyOf": [
            {"type": "number", "not": {"const": 0}},
            {
                "type": "string",
                "pattern": "^-?(?=[^1-9]*[1-9])(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|µs|ms|s|m|h))+$",
                "maxLength": _MAX_DURATION_LENGTH,
            },
            {"type": "null"},
        ]
    }
)


class OllamaBody(Body):
    """Fields of all requests to a model. options: see `Options`.

    keep_alive: how long to keep the model in memory, which the operator decides here, so it changes nothing; 0, which
    unloads the model, is refused.
    """

    refused = REFUSED

    model: str | None = None
    options: Annotated[dict[str, Any] | None, ShapedAs(Options)] = None
    keep_alive: Annotated[object, _KEEP_ALIVE] = None

    @property
    def model_name(self) -> str | None:
        """The model's name on this server."""
        return self.model and self.model.removesuffix(LATEST)

    def as_named(self, model: ServedModel) -> ServedModel:
        """Return the model under the client's name of it, tag included, which answers repeat."""
        return replace(model, name=self.model or model.name)

    def check_keep_alive(self) -> None:
        """Raise InvalidRequest where it is no duration, or 0."""
        if self.keep_alive is not None and not _seconds(self.keep_alive):
            raise InvalidRequest(
                "keep_alive 0 would unload the model, which the operator does: POST /admin/unload", param="keep_alive"
            )


class AnswerBody(OllamaBody):
    """Fields of /api/generate and /api/chat. stream: answers are streamed unless it is false.

    format: "json", or a JSON schema.
    think: false turns thinking off, where the model's template can; true is refused.
    """

    stream: bool = True
    format: Annotated[dict[str, Any] | str, WithJsonSchema({"anyOf": [{"type": "object"}, {"enum": ["json", ""]}]})] = (
        ""
    )
    think: Annotated[bool | str | None, WithJsonSchema({"enum": [False, "", None]})] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    def read(self) -> Options:
        """Return the options; raises InvalidRequest for these and for other fields that are wrong."""
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
    """A generation request. raw: use the prompt as it is, without a chat template.

    context: that of an earlier answer, which the prompt continues.
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
    return math.fsum(float(part[1]) for part in parts)
