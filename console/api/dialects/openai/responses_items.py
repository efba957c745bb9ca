"""Responses and their items, as /v1/responses answers with them, and the events of each while it grows."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from console.api.dialects.openai.responses_body import Message, complete_part, full_name
from console.api.requests.generation import WhyField
from console.api.requests.logprobs import ChatLogprob
from console.api.tools import (
    AnswerPiece,
    CallArguments,
    CallEnd,
    CallMalformed,
    CallReader,
    CallStart,
    CallTruncated,
    TextPiece,
)
from engine.engine import StreamDelta
from engine.errors import EngineError

# The `type` of each is its first field.

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    """Text of the answer. logprobs: where requested."""

    text: str
    annotations: list[None] = []
    logprobs: list[ChatLogprob] = []


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text", tag_field="type"):
    """Thinking of the model as a summary, unabridged."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    """Thinking of the model."""

    text: str


Part = OutputText | SummaryText | ReasoningText


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    """The text of the answer."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call", tag_field="type"):
    """A call for the client to make."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def full_name(self) -> str:
        """The name that the model knows the function by."""
        return full_name(self.namespace or "", self.name)


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning", tag_field="type"):
    """Thinking of the model before its answer: the summary where one was requested, else the content."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []


Item = MessageItem | CallItem | ReasoningItem


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True, tag="function", tag_field="type"):
    """A tool of the request."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class InputDetails(msgspec.Struct, frozen=True):
    """cached_tokens: found in the prefix cache.  cache_write_tokens: billed by OpenAI; caching costs nothing here."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """reasoning_tokens: those of the answer's tokens that are thinking."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. why: what the time went into, where requested."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    why: WhyField = msgspec.UNSET


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is not whole."""

    reason: Literal["max_output_tokens", "timeout"]


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class ReasoningEcho(msgspec.Struct, frozen=True):
    """As requested."""

    effort: str | None
    summary: str | None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, with what was requested."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[Item]
    instructions: str | None
    previous_response_id: str | None
    tools: list[FunctionDefinition]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: ReasoningEcho
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    truncation: Literal["disabled"] = "disabled"
    store: bool
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"
    metadata: dict[str, str]
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    usage: ResponseUsage | None = None


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream, by its type: of the response, of an item, of a part of one, or more of its text."""

    type: str
    sequence_number: int
    response: Response | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    item: Item | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    summary_index: int | msgspec.UnsetType = msgspec.UNSET
    part: Part | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatLogprob] | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """Items of a stored response's input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class Deleted(msgspec.Struct, frozen=True):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(msgspec.Struct, frozen=True):
    """The tokens of a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseNotFound(EngineError):
    """No response of that id is stored, or one of another client; details: param, value."""

    code = "response_not_found"
    http_status = 404


# The items of an answer, and the events of each, as its pieces come.


class ItemWriter:
    """Makes items of an answer, one after the other, and the events that show them grow.

    reader: parses tool calls; None without tools.  summarizes: thinking comes as a summary.  namespaces: of functions
    that have one, and their names there, by their full names.

    items: of the answer. A malformed call, whose text follows as text, is none of them: it has events alone.
    """

    def __init__(
        self, reader: CallReader | None, *, summarizes: bool, namespaces: Mapping[str, tuple[str, str]]
    ) -> None:
        self.items: list[Item] = []
        self._reader = reader
        self._summarizes = summarizes
        self._namespaces = namespaces
        self._events: list[ResponseEvent] = []
        self._number = 0
        self._index = 0
        self._open: Item | None = None
        self._text = ""
        self._logprobs: list[ChatLogprob] = []

    def event(self, kind: str, **fields: object) -> ResponseEvent:
        """Return the next event."""
        self._number += 1
        return ResponseEvent(type=f"response.{kind}", sequence_number=self._number - 1, **fields)  # type: ignore[arg-type]

    def feed(self, delta: StreamDelta, logprobs: list[ChatLogprob]) -> list[ResponseEvent]:
        """Take more of the answer; return its events."""
        if delta.thinking:
            self._think(delta.thinking)
        pieces: Sequence[AnswerPiece] = (
            [TextPiece(delta.text)] if self._reader is None else self._reader.feed(delta.text)
        )
        if delta.finish is not None and self._reader is not None:
            pieces = [*pieces, *self._reader.finish()]
        for piece in pieces:
            self._take(piece, logprobs)
        events, self._events = self._events, []
        return events

    def end(self, status: Status) -> list[ResponseEvent]:
        """End the last item; return its events."""
        self._close(status)
        events, self._events = self._events, []
        return events

    def _take(self, piece: AnswerPiece, logprobs: list[ChatLogprob]) -> None:
        match piece:
            case TextPiece(text=text) if text:
                if not isinstance(self._open, MessageItem):
                    self._begin(MessageItem(id=new_item_id("msg"), status="in_progress", content=[]), OutputText(""))
                self._text += text
                self._logprobs += logprobs
                self._emit("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
            case CallStart(id=call_id, name=name):
                space, own_name = self._namespaces.get(name, (msgspec.UNSET, name))
                item = CallItem(
                    id=new_item_id("fc"),
                    call_id=call_id,
                    name=own_name,
                    arguments="",
                    status="in_progress",
                    namespace=space,
                )
                self._begin(item)
            case CallArguments(text=text):
                self._text += text
                self._emit("function_call_arguments.delta", delta=text)
            case CallEnd():
                self._close("completed")
            case CallTruncated():
                self._close("incomplete")
            case CallMalformed():
                self._close("incomplete")
                self.items.pop()

    def _think(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            part = SummaryText("") if self._summarizes else ReasoningText("")
            self._begin(ReasoningItem(id=new_item_id("rs")), part)
        self._text += text
        if self._summarizes:
            self._emit("reasoning_summary_text.delta", summary_index=0, delta=text)
        else:
            self._emit("reasoning_text.delta", content_index=0, delta=text)

    def _begin(self, item: Item, part: Part | None = None) -> None:
        """Open an item, once the one before it has ended."""
        self._close("completed")
        self._open, self._text, self._logprobs = item, "", []
        self._events.append(self.event("output_item.added", output_index=self._index, item=item))
        if part is not None:
            self._part("added", part)

    def _part(self, what: str, part: Part) -> None:
        if isinstance(part, SummaryText):
            self._emit(f"reasoning_summary_part.{what}", summary_index=0, part=part)
        else:
            self._emit(f"content_part.{what}", content_index=0, part=part)

    def _close(self, status: Status) -> None:
        item, text = self._open, self._text
        match item:
            case None:
                return
            case MessageItem():
                part = OutputText(text, logprobs=self._logprobs)
                self._emit("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
                self._part("done", part)
                done: Item = msgspec.structs.replace(item, status=status, content=[part])
            case CallItem():
                self._emit("function_call_arguments.done", name=item.name, arguments=text)
                done = msgspec.structs.replace(item, status=status, arguments=text)
            case ReasoningItem() if self._summarizes:
                self._emit("reasoning_summary_text.done", summary_index=0, text=text)
                self._part("done", SummaryText(text))
                done = msgspec.structs.replace(item, summary=[SummaryText(text)])
            case ReasoningItem():
                self._emit("reasoning_text.done", content_index=0, text=text)
                self._part("done", ReasoningText(text))
                done = msgspec.structs.replace(item, content=[ReasoningText(text)])
        self._events.append(self.event("output_item.done", output_index=self._index, item=done))
        self.items.append(done)
        self._index += 1
        self._open = None

    def _emit(self, kind: str, **fields: object) -> None:
        """Add an event of the open item."""
        assert self._open is not None, f"{kind} belongs to an item"
        self._events.append(self.event(kind, item_id=self._open.id, output_index=self._index, **fields))


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Return an answer as the assistant's message that the next turn follows, with the complete part of its calls."""
    turn: Message = {"role": "assistant", "content": None}
    calls = []
    for item in items:
        match item:
            case MessageItem():
                turn["content"] = (turn["content"] or "") + "".join(part.text for part in item.content)
            case ReasoningItem():
                thought: list[SummaryText | ReasoningText] = [*item.summary, *item.content]
                turn["reasoning_content"] = "".join(part.text for part in thought)
            case CallItem():
                arguments = item.arguments if item.status == "completed" else complete_part(item.arguments) or "{}"
                function = {"name": item.full_name, "arguments": arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
    if calls:
        turn["tool_calls"] = calls
    return [turn] if calls or turn["content"] is not None else []


def new_item_id(prefix: str) -> str:
    """Return a new id, as "msg_2f…"."""
    return f"{prefix}_{secrets.token_hex(16)}"
