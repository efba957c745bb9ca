"""What OpenAI's chat answers with: messages, chunks of them, and the calls in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from console.api.generation import StoppedBy
from console.api.logprobs import ChatLogprobs, PromptLogprobs
from console.api.openai import Usage, UsageField
from console.api.tools import CallArguments, CallBegan, Piece, Said, ToolCall
from engine.backends.base import FinishReason


class CalledFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is called, and with what; in a stream the name comes with the first piece of a call only."""

    name: str | None = None
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the client is to make."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatCallPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to a call. id and type come with the first piece only."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatAnswer(msgspec.Struct, frozen=True):
    """The message that answers. content: null where it does nothing but call."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ChatCall] | msgspec.UnsetType = msgspec.UNSET


class ChatPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds. role comes with the first of a choice only."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ChatCallPiece] | msgspec.UnsetType = msgspec.UNSET


ChatFinish = FinishReason | Literal["tool_calls"]


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer. stop_reason: vLLM's, the stop string or the id of the stop token that ended it."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: StoppedBy = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one answer. stop_reason: as in ChatChoice, with the end of the answer."""

    index: int
    delta: ChatPiece
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: StoppedBy | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. prompt_logprobs: where asked for, as vLLM gives them.

    system_fingerprint: of what computes answers; where it changes, those to requests with a seed may change.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. usage is left out, or asked for: null until the last one.

    system_fingerprint: as in ChatCompletion.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageField = msgspec.UNSET


def message_of(said: str, calls: Sequence[ToolCall]) -> ChatAnswer:
    """The message that says and calls this."""
    if not calls:
        return ChatAnswer(said)
    called = [ChatCall(id=call.id, function=CalledFunction(call.name, call.arguments)) for call in calls]
    return ChatAnswer(said or None, tool_calls=called)


def piece_of(found: Piece) -> ChatPiece | None:
    """What a stream tells of it; None for what shows by itself."""
    match found:
        case Said(text=text):
            return ChatPiece(content=text)
        case CallBegan(index=index, id=call_id, name=name):
            began = ChatCallPiece(index=index, id=call_id, type="function", function=CalledFunction(name, ""))
            return ChatPiece(tool_calls=[began])
        case CallArguments(index=index, text=text):
            return ChatPiece(tool_calls=[ChatCallPiece(index=index, function=CalledFunction(arguments=text))])
        case _:
            return None
