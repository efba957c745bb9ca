"""What /v1/messages answers: a message, or the events that make one up. The `type` of each is its first field."""

from __future__ import annotations

from typing import Literal

import msgspec

from console.api.generation import Generation
from console.api.stream import Framing
from console.api.tools import JsonObject

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]
"""pause_turn: the time was up; sent back as the last message, the answer goes on from there."""


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    """A piece of the answer that is text."""

    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    """A call of a tool. input: by the tool's own schema; empty at the start of a streamed one."""

    id: str
    name: str
    input: JsonObject


Block = TextBlock | ToolUseBlock


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. input_tokens: those of the prompt that were computed; the others were found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    """The answer. stop_sequence: the one that ended it."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class TokensCounted(msgspec.Struct, frozen=True):
    """What a conversation would take as a prompt."""

    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    """The message, still empty."""

    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"):
    """A block begins, empty."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    """More text."""

    text: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    """More of a call's input as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    """More of a block."""

    index: int
    delta: TextDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    """A block is whole."""

    index: int


class Ending(msgspec.Struct, frozen=True):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    """The message ends. usage: all of it."""

    delta: Ending
    usage: Usage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    """Nothing comes after this."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def usage_of(generation: Generation) -> Usage:
    """What the generation used so far."""
    tokens = generation.tokens
    return Usage(
        input_tokens=tokens.prompt - tokens.cached,
        cache_read_input_tokens=tokens.cached,
        output_tokens=tokens.output,
    )


def _as_event(document: bytes) -> bytes:
    """An event is named by the type of what it holds, {"type":"message_start",...}."""
    return b"event: %b\ndata: %b\n\n" % (document.split(b'"', 4)[3], document)


EVENTS = Framing("text/event-stream", _as_event, _as_event(b'{"type":"ping"}'))
