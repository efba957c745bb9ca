"""CallReader: splits an answer's text into text and calls, as it arrives."""

from __future__ import annotations

import logging
import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from console.api.tools.calls import (
    AnswerPiece,
    CallArguments,
    CallEnd,
    CallMalformed,
    CallStart,
    CallTruncated,
    TextPiece,
    Tool,
    ToolCall,
)
from console.api.tools.formats import ToolFormat
from console.api.tools.json_stream import Malformed, Parser, Source

log = logging.getLogger("api")

_SHORT = string.ascii_letters + string.digits
_SHORT_ID = 9
_CALL_KEYS = frozenset({"id", "type", "tool_call_id"})


class CallReader:
    """Reads one answer. The result depends on the text, not on how it is split into pieces.

    Text before a call is emitted at once, except for white space at its end and what may begin a call. A call is
    emitted as soon as it has a name; a malformed one ends with CallMalformed, and all of its text is emitted as text.
    One that the end of the answer truncates is emitted so far, and its markers are not text.

    tools: those that may be called; a bare call (`ToolFormat.bare`) must be of one of them.
    restricted: True if any call must be.  one: True to drop calls after the first.
    required: True if the grammar allows only calls, so that a truncated marker belongs to one.
    hidden: markers that are control tokens, never emitted as text.  id_prefix: of the calls' ids.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[Tool],
        *,
        restricted: bool = False,
        one: bool = False,
        required: bool = False,
        hidden: Sequence[str] = (),
        id_prefix: str = "call_",
    ) -> None:
        self._format = tool_format
        self._schemas = {tool.name: tool.schema for tool in tools}
        self._restricted = restricted
        self._one = one
        self._required = required
        self._hidden = tuple(hidden)
        self._id_prefix = id_prefix
        self._source = Source()
        self._pieces: list[AnswerPiece] = []
        self._held_space = ""
        self._index = 0
        self._in_call = False
        self._cut = False
        self._bare = False
        self._has_text = self._is_separate = False
        openings = tool_format.shape.openings
        self._stops = (*openings, *(each for each in hidden if not any(each in opening for opening in openings)))
        self._parser = self._parse()
        self._advance()

    @property
    def has_calls(self) -> bool:
        """True if there was a call, and all are complete."""
        return self._index > 0 and not self._cut

    def feed(self, text: str) -> list[AnswerPiece]:
        """Return the pieces of more text."""
        self._source.push(text)
        return self._advance()

    def finish(self) -> list[AnswerPiece]:
        """Return the pieces at the end of the text."""
        self._source.end()
        pieces = self._advance()
        if self._held_space and not self._index:
            pieces = _merge_pieces([*pieces, TextPiece(self._held_space)])
        self._held_space = ""
        return [piece for piece in pieces if not isinstance(piece, TextPiece)] if self._required else pieces

    # Sink of the shapes' parsers.

    def begin(self, name: str) -> None:
        """Begin a call. Raises Malformed for a call of another tool, where that is none."""
        if (self._bare or self._restricted) and name not in self._schemas:
            raise Malformed(f"there is no tool {name!r}")
        self._in_call = True
        self._emit(CallStart(self._index, self._new_id(), name))

    def member(self, key: str) -> None:
        """Check another member's key. Raises Malformed where a bare call has it: then it is an answer in JSON."""
        if self._bare and key not in _CALL_KEYS:
            raise Malformed(f"calls have no {key!r}")

    def arguments(self, text: str) -> None:
        """Emit more of the call's arguments."""
        self._emit(CallArguments(self._index, text))

    def complete(self) -> None:
        """End the call."""
        self._emit(CallEnd(self._index))
        self._in_call, self._held_space = False, ""
        self._index += 1
        self._source.mark()

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a tool's arguments."""
        return self._schemas.get(name, {})

    def separate(self) -> None:
        """Separate the text before, if any, from the text that follows by a line break."""
        self._is_separate = self._has_text

    def _advance(self) -> list[AnswerPiece]:
        next(self._parser, None)
        pieces, self._pieces = self._pieces, []
        return _merge_pieces(pieces)

    def _parse(self) -> Parser[None]:
        source = self._source
        if self._format.bare:
            yield from source.skip_space()
            prefix = source.consumed
            if (yield from source.more()) and (yield from source.peek()) == self._format.bare:
                self._bare = True
                yield from self._read_calls("", prefix)
                self._bare = False
            else:
                self._emit_text(prefix)
        openings = self._format.shape.openings
        while marker := (yield from source.until(self._stops, self._emit_text, hidden=self._hidden)):
            if marker in openings:
                yield from self._read_calls(marker, marker)

    def _read_calls(self, opening: str, prefix: str) -> Parser[None]:
        """Parse calls, or emit their text if malformed, after `prefix`."""
        self._source.mark()
        before = self._index
        try:
            yield from self._format.shape.read(self._source, self, opening)
        except Malformed as error:
            may_be_text = self._bare and not self._in_call and self._index == before
            if self._source.ended and not may_be_text:
                self._end_within_call()
            else:
                if not may_be_text:
                    log.warning("malformed tool call of the model: %s", error)
                if self._in_call:
                    self._emit(CallMalformed(self._index))
                    self._in_call = False
                self._emit_text((prefix if self._index == before else "") + self._source.consumed)
        self._source.mark()

    def _end_within_call(self) -> None:
        """Drop the rest of the text; a call that has a name is truncated."""
        if self._in_call:
            self._emit(CallTruncated(self._index))
            self._cut = not (self._one and self._index)
        self._in_call, self._held_space = False, ""
        self._source.discard_rest()

    def _emit_text(self, text: str) -> None:
        """Emit text, but hold back the white space at its end, which belongs to a call that may follow."""
        for marker in self._hidden:
            text = text.replace(marker, "")
        if self._is_separate and text.strip():
            text, self._held_space, self._is_separate = text.lstrip(), "\n", False
        text = self._held_space + text
        texts = text.rstrip()
        self._held_space = text[len(texts) :]
        if texts:
            self._has_text = True
            self._pieces.append(TextPiece(texts))

    def _emit(self, piece: AnswerPiece) -> None:
        if not (self._one and self._index):
            self._pieces.append(piece)

    def _new_id(self) -> str:
        if self._format.short_ids:
            return "".join(secrets.choice(_SHORT) for _ in range(_SHORT_ID))
        return f"{self._id_prefix}{uuid.uuid4().hex[:24]}"


def read_answer(reader: CallReader, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text and calls of a complete answer. `reader` must be new."""
    texts: list[str] = []
    started: dict[int, tuple[CallStart, list[str]]] = {}
    calls: list[ToolCall] = []
    for piece in (*reader.feed(text), *reader.finish()):
        match piece:
            case TextPiece(text=text):
                texts.append(text)
            case CallStart(index=index):
                started[index] = (piece, [])
            case CallArguments(index=index, text=more):
                started[index][1].append(more)
            case CallEnd(index=index) | CallTruncated(index=index):
                start, arguments = started[index]
                truncated = isinstance(piece, CallTruncated)
                calls.append(ToolCall(id=start.id, name=start.name, arguments="".join(arguments), truncated=truncated))
            case CallMalformed():
                pass
    return "".join(texts), tuple(calls)


def _merge_pieces(pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
    """Merge consecutive texts."""
    merged: list[AnswerPiece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        match last, piece:
            case (TextPiece(text=first), TextPiece(text=second)):
                merged[-1] = TextPiece(first + second)
            case (CallArguments(index=index, text=first), CallArguments(text=second)):
                merged[-1] = CallArguments(index, first + second)
            case _:
                merged.append(piece)
    return merged
