"""ToolUse: the tools of one request, for the model that answers it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from console.api.http.connections import NOT_STRICT, TOOL_FORMAT
from console.api.tools.call_grammar import call_grammar, not_enforced
from console.api.tools.calls import Tool, ToolChoice
from console.api.tools.formats import ToolFormat, format_of, has_tools, require_format
from console.api.tools.stream_reader import CallReader
from engine.backends.base import FinishReason
from engine.config import Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer

_MAX_NAMES = 8
"""In a header: proxies refuse long ones."""

AUTO = ToolChoice("auto")

_ONE_CALL = "only supports single tool-calls"
"""Text in Llama's templates."""

_TAG = re.compile(r"<[^<>]+>")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request.

    tools: in its prompt, strict only where that is enforced.  choice: which of them may be called.
    tool_format: how the model writes calls, None where it may not call.  grammar: of the answer, if it needs one.
    ids: control tokens of calls by their texts.  not_strict: names of tools whose `strict` is not enforced.
    described: True if the tools are described in the prompt, as the chat template has none.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO
    tool_format: ToolFormat | None = None
    parallel: bool = True
    grammar: Grammar | None = None
    ids: Mapping[str, int] = field(default_factory=dict)
    not_strict: tuple[str, ...] = ()
    described: bool = False

    @property
    def definitions(self) -> list[dict[str, object]] | None:
        """Definitions for the chat template; None where the model may not call."""
        return [tool.definition() for tool in self.tools] if self.tool_format is not None else None

    @property
    def shown_ids(self) -> tuple[int, ...]:
        """Control tokens of calls, which the text must include."""
        return tuple(self.ids.values())

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, which say where its tools are not used as in the request."""
        headers: dict[str, str] = {}
        if self.tool_format is not None and self.described:
            headers[TOOL_FORMAT] = f"{self.tool_format.name} (default)"
        if self.not_strict:
            more = len(self.not_strict) - _MAX_NAMES
            names = ", ".join(self.not_strict[:_MAX_NAMES])
            headers[NOT_STRICT] = f"{names} and {more} more" if more > 0 else names
        return headers

    async def apply_to(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the grammar and tokens for calls. With another grammar, of text, the answer is calls or
        such a text. Raises InvalidRequest where that grammar is not of JSON."""
        if self.tool_format is None:
            return params
        grammar = self.grammar
        if params.grammar is not None and self.choice.mode != "required":
            grammar = await asyncio.to_thread(
                call_grammar, self.tool_format, self.tools, self.choice, self.parallel, self.ids, params.grammar
            )
        return msgspec.structs.replace(params, grammar=grammar, shown_token_ids=self.shown_ids)

    def reader(self, id_prefix: str = "call_") -> CallReader | None:
        """Return a reader of one answer; None where it cannot have calls. id_prefix: of the calls' ids."""
        if self.tool_format is None:
            return None
        return CallReader(
            self.tool_format,
            [tool for tool in self.tools if self.choice.allows(tool.name)],
            restricted=self.choice.allowed is not None,
            one=not self.parallel,
            required=self.choice.mode == "required",
            hidden=tuple(self.ids),
            id_prefix=id_prefix,
        )


NO_TOOLS = ToolUse()


def tool_use(
    tokenizer: Tokenizer, tools: Sequence[Tool], choice: ToolChoice = AUTO, *, parallel: bool = True
) -> ToolUse:
    """Return the ToolUse of a request. parallel: True if one answer may have several calls; with a named tool, it has
    one.

    Raises InvalidRequest where the model does not support tools or its format is not supported, and for an unknown tool
    in the choice.
    """
    _check_choice(tools, choice)
    if choice.mode == "none" or not any(choice.allows(tool.name) for tool in tools):
        return ToolUse(tuple(tools))
    tool_format = require_format(tokenizer)
    parallel = parallel and not choice.name and not allows_one_call(tokenizer)
    marker_ids = {marker: tokenizer.token_to_id(marker) for marker in control_texts(tool_format)}
    shown = {marker: token_id for marker, token_id in marker_ids.items() if token_id in tokenizer.special_ids}
    ids = {marker: token_id for marker, token_id in shown.items() if token_id is not None}
    not_strict = not_enforced(tool_format, tools, choice, ids)
    tools = [msgspec.structs.replace(tool, strict=tool.strict and tool.name not in not_strict) for tool in tools]
    return ToolUse(
        tools=tuple(tools),
        choice=choice,
        tool_format=tool_format,
        parallel=parallel,
        grammar=call_grammar(tool_format, tools, choice, parallel, ids),
        ids=ids,
        not_strict=not_strict,
        described=not has_tools(tokenizer),
    )


def finish_of(reader: CallReader | None, finish: FinishReason | None) -> FinishReason | Literal["tool_calls"] | None:
    """Return the finish reason in OpenAI's names: `tool_calls` for an answer with complete calls."""
    return "tool_calls" if reader is not None and reader.has_calls and finish == "stop" else finish


def control_texts(tool_format: ToolFormat) -> Iterator[str]:
    """Yield texts of a format that may be control tokens: its markers, and parts of those that are several."""
    for marker in tool_format.shape.markers:
        yield from dict.fromkeys((marker, *_TAG.findall(marker)))


def allows_one_call(tokenizer: Tokenizer) -> bool:
    """Return whether the model's template refuses messages with several calls, as Llama's do, or renders only the
    first."""
    template, tool_format = tokenizer.tool_template, format_of(tokenizer)
    refuses = template is not None and _ONE_CALL in template.source
    return refuses or (tool_format is not None and tool_format.one_per_turn)


def _check_choice(tools: Sequence[Tool], choice: ToolChoice) -> None:
    counts = Counter(tool.name for tool in tools)
    if duplicates := [name for name, count in counts.items() if count > 1]:
        raise InvalidRequest(f"tools has two named {duplicates[0]!r}", param="tools")
    if unknown := sorted((choice.allowed or {choice.name}) - {*counts, ""}):
        raise InvalidRequest(f"tool_choice names {unknown[0]!r}, which is not in tools", param="tool_choice")
    if choice.mode == "required" and not any(map(choice.allows, counts)):
        raise InvalidRequest("tool_choice requires a call, but there is no tool to call", param="tool_choice")
