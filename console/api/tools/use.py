"""ToolUse: what one request asks about tools, for the model that answers it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from console.api.tools.calls import Tool, ToolChoice
from console.api.tools.formats import ToolFormat, known_format
from console.api.tools.grammars import call_grammar
from console.api.tools.reader import CallReader
from engine.backends.base import FinishReason
from engine.config import Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer

AUTO = ToolChoice("auto")

_ONE_CALL = "only supports single tool-calls"
"""What Llama's templates say of themselves."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model is told of and may call.

    written: how it writes calls, None where it is told of no tools.  grammar: what the answer is held to.
    required: that is calls and nothing else.
    shown_ids: control tokens that mark calls, which the text must show; hidden: what they are in the text.
    """

    tools: tuple[Tool, ...] = ()
    written: ToolFormat | None = None
    parallel: bool = True
    required: bool = False
    grammar: Grammar | None = None
    shown_ids: tuple[int, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def definitions(self) -> list[dict[str, object]] | None:
        """What the chat template is told."""
        return [tool.definition() for tool in self.tools] or None

    def applied(self, params: SamplingParams) -> SamplingParams:
        """The same, with what calls ask of the engine. Raises InvalidRequest where a grammar is asked for twice."""
        if self.written is None:
            return params
        if params.grammar is not None:
            raise InvalidRequest(
                f"{params.grammar.param} holds the whole answer to a format, so that it cannot call tools: "
                "send no tools, or tool_choice none",
                param=params.grammar.param,
            )
        return msgspec.structs.replace(params, grammar=self.grammar, shown_token_ids=self.shown_ids)

    def reader(self, id_prefix: str = "call_") -> CallReader | None:
        """What reads one answer; None where it is text and nothing else. id_prefix: of the calls' ids."""
        if self.written is None:
            return None
        return CallReader(
            self.written,
            self.tools,
            one=not self.parallel,
            required=self.required,
            hidden=self.hidden,
            id_prefix=id_prefix,
        )


NO_TOOLS = ToolUse()


def tool_use(
    tokenizer: Tokenizer, tools: Sequence[Tool], choice: ToolChoice = AUTO, *, parallel: bool = True
) -> ToolUse:
    """What a request with these tools comes to. parallel: whether one answer may make several calls; where the choice
    names a tool, it makes one.

    A model that may call none is told of none. Raises InvalidRequest where it knows no tools or writes calls in a way
    that is not known here, and for a choice that there is not.
    """
    _check(tools, choice)
    if not tools or choice.mode == "none":
        return NO_TOOLS
    written = known_format(tokenizer)
    parallel = parallel and not choice.name and not _takes_one_call(tokenizer)
    marks = {marker: tokenizer.token_to_id(marker) for marker in written.shape.markers}
    shown = {mark: token_id for mark, token_id in marks.items() if token_id in tokenizer.special_ids}
    ids = {mark: token_id for mark, token_id in shown.items() if token_id is not None}
    return ToolUse(
        tools=tuple(tools),
        written=written,
        parallel=parallel,
        required=choice.mode == "required",
        grammar=call_grammar(written, tools, choice, parallel, ids),
        shown_ids=tuple(ids.values()),
        hidden=tuple(ids),
    )


def finish_of(reader: CallReader | None, finish: FinishReason | None) -> FinishReason | Literal["tool_calls"] | None:
    """Why an answer ended, as OpenAI names it: one that calls tools and was not cut off ends with `tool_calls`."""
    return "tool_calls" if reader is not None and reader.called and finish == "stop" else finish


def _takes_one_call(tokenizer: Tokenizer) -> bool:
    """Whether the model's template refuses messages with several calls, as Llama's do: what it answers with several
    could not be followed up."""
    template = tokenizer.tool_template
    return template is not None and _ONE_CALL in template.source


def _check(tools: Sequence[Tool], choice: ToolChoice) -> None:
    counts = Counter(tool.name for tool in tools)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InvalidRequest(f"tools has two of the name {twice[0]!r}", param="tools")
    if not tools and choice.mode == "required":
        raise InvalidRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
    if choice.name and choice.name not in counts:
        raise InvalidRequest(f"tool_choice names {choice.name!r}, which is none of the tools", param="tool_choice")
