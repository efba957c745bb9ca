"""Calls of tools as Ollama tells them: whole, also in a stream."""

from __future__ import annotations

from console.api.ollama.answers import ToolCalled, ToolFunction
from console.api.tools import CallArguments, CallBegan, CallCut, CallEnded, CallReader, Said, arguments_of


class CallCollector:
    """Puts calls together while an answer comes. reader: what finds them, None where there are none."""

    def __init__(self, reader: CallReader | None) -> None:
        self._reader = reader
        self._began: CallBegan | None = None
        self._arguments: list[str] = []

    def read(self, text: str, *, ended: bool) -> tuple[str, list[ToolCalled]]:
        """Return what more of the answer says, and the calls that it completes or ends within; one that breaks off
        was none."""
        if self._reader is None:
            return text, []
        said: list[str] = []
        calls: list[ToolCalled] = []
        for piece in (*self._reader.feed(text), *(self._reader.finish() if ended else ())):
            match piece:
                case Said(text=words):
                    said.append(words)
                case CallBegan():
                    self._began, self._arguments = piece, []
                case CallArguments(text=more):
                    self._arguments.append(more)
                case CallEnded(index=index) | CallCut(index=index) if self._began is not None:
                    arguments = arguments_of("".join(self._arguments), cut=isinstance(piece, CallCut))
                    calls.append(ToolCalled(self._began.id, ToolFunction(index, self._began.name, arguments)))
                case _:
                    self._began = None
        return "".join(said), calls
