"""CallReader: an answer's text into what is said and what is called, as it comes."""

from __future__ import annotations

import logging
import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from console.api.tools.calls import (
    CallArguments,
    CallBegan,
    CallBroken,
    CallCut,
    CallEnded,
    Piece,
    Said,
    Tool,
    ToolCall,
)
from console.api.tools.formats import ToolFormat
from console.api.tools.json_stream import Malformed, Reading, Source

log = logging.getLogger("api")

_SHORT = string.ascii_letters + string.digits
_SHORT_ID = 9
_CALL_KEYS = frozenset({"id", "type", "tool_call_id"})


class CallReader:
    """Reads one answer. What is found depends on the text, not on how it is split into pieces.

    Text before a call is given at once, but for white space at its end and what may begin a call. A call is given as
    soon as it has a name; one that turns out to be none is broken off, and all of its text is given as what is said, so
    that nothing is lost. One that the answer ends within stays as far as it came, and its markers are no text.

    tools: a bare call (`ToolFormat.bare`) must be of one of them.  one: calls after the first are left out.
    required: the answer is held to calls, so that an end of it which may begin one does.
    hidden: markers that are control tokens; they are never given as text.  id_prefix: of the calls' ids.
    """

    def __init__(
        self,
        written: ToolFormat,
        tools: Sequence[Tool],
        *,
        one: bool = False,
        required: bool = False,
        hidden: Sequence[str] = (),
        id_prefix: str = "call_",
    ) -> None:
        self._format = written
        self._schemas = {tool.name: tool.schema for tool in tools}
        self._one = one
        self._required = required
        self._hidden = tuple(hidden)
        self._id_prefix = id_prefix
        self._source = Source()
        self._pieces: list[Piece] = []
        self._space = ""
        self._index = 0
        self._open = False
        self._cut = False
        self._bare = False
        self._reading = self._read()
        self._advance()

    @property
    def called(self) -> bool:
        """Whether there was a call, and all are whole."""
        return self._index > 0 and not self._cut

    def feed(self, text: str) -> list[Piece]:
        """What more text brings."""
        self._source.push(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """What the end of the text brings; nothing is held back after it."""
        self._source.end()
        pieces = self._advance()
        if self._space and not self._index:
            pieces = _joined([*pieces, Said(self._space)])
        self._space = ""
        return [piece for piece in pieces if not isinstance(piece, Said)] if self._required else pieces

    # What shapes tell of the calls that they read.

    def begin(self, name: str) -> None:
        """A call begins; raises Malformed where a bare one is of no tool."""
        if self._bare and name not in self._schemas:
            raise Malformed(f"there is no tool {name!r}")
        self._open = True
        self._give(CallBegan(self._index, self._new_id(), name))

    def member(self, key: str) -> None:
        """A member that calls need not have; raises Malformed where a bare one has it: it is an answer in JSON."""
        if self._bare and key not in _CALL_KEYS:
            raise Malformed(f"calls have no {key!r}")

    def arguments(self, text: str) -> None:
        """More of the call's arguments."""
        self._give(CallArguments(self._index, text))

    def complete(self) -> None:
        """The call is whole."""
        self._give(CallEnded(self._index))
        self._open, self._space = False, ""
        self._index += 1
        self._source.mark()

    def schema(self, name: str) -> Mapping[str, Any]:
        """Of a tool's arguments."""
        return self._schemas.get(name, {})

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return _joined(pieces)

    def _read(self) -> Reading[None]:
        source = self._source
        if self._format.bare:
            yield from source.skip_space()
            lead = source.taken
            if (yield from source.more()) and (yield from source.peek()) == "{":
                self._bare = True
                yield from self._try("", lead)
                self._bare = False
            else:
                self._say(lead)
        openings = self._format.shape.openings
        while marker := (yield from source.until((*openings, *self._hidden), self._say)):
            if marker in openings:
                yield from self._try(marker, marker)

    def _try(self, opening: str, lead: str) -> Reading[None]:
        """Calls, or the text of what turned out to be none, after `lead`."""
        self._source.mark()
        before = self._index
        try:
            yield from self._format.shape.read(self._source, self, opening)
        except Malformed as error:
            maybe_text = self._bare and not self._open and self._index == before
            if self._source.ended and not maybe_text:
                self._end_within_call()
            else:
                if not maybe_text:
                    log.warning("A tool call of the model is malformed, and given as text: %s", error)
                if self._open:
                    self._give(CallBroken(self._index))
                    self._open = False
                self._say((lead if self._index == before else "") + self._source.taken)
        self._source.mark()

    def _end_within_call(self) -> None:
        """Nothing of what is left is text; the call is cut off where it has a name already."""
        if self._open:
            self._give(CallCut(self._index))
            self._cut = not (self._one and self._index)
        self._open, self._space = False, ""
        self._source.drop()

    def _say(self, text: str) -> None:
        """Give text, but for the white space at its end: it belongs to a call that may follow."""
        for marker in self._hidden:
            text = text.replace(marker, "")
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._pieces.append(Said(said))

    def _give(self, piece: Piece) -> None:
        if not (self._one and self._index):
            self._pieces.append(piece)

    def _new_id(self) -> str:
        if self._format.short_ids:
            return "".join(secrets.choice(_SHORT) for _ in range(_SHORT_ID))
        return f"{self._id_prefix}{uuid.uuid4().hex[:24]}"


def whole(reader: CallReader, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """What an answer says and the calls that it makes. `reader` has read nothing yet."""
    said: list[str] = []
    begun: dict[int, tuple[CallBegan, list[str]]] = {}
    calls: list[ToolCall] = []
    for piece in (*reader.feed(text), *reader.finish()):
        match piece:
            case Said(text=words):
                said.append(words)
            case CallBegan(index=index):
                begun[index] = (piece, [])
            case CallArguments(index=index, text=more):
                begun[index][1].append(more)
            case CallEnded(index=index) | CallCut(index=index):
                began, arguments = begun[index]
                cut = isinstance(piece, CallCut)
                calls.append(ToolCall(id=began.id, name=began.name, arguments="".join(arguments), cut=cut))
            case CallBroken():
                pass
    return "".join(said), tuple(calls)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with texts that follow each other in one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        match last, piece:
            case (Said(text=first), Said(text=second)):
                joined[-1] = Said(first + second)
            case (CallArguments(index=index, text=first), CallArguments(text=second)):
                joined[-1] = CallArguments(index, first + second)
            case _:
                joined.append(piece)
    return joined
