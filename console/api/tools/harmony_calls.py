"""Parser of GPT-OSS's harmony format, whose messages have a header with a channel and the tool that they are for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from console.api.tools.call_parsers import Schemas, read_arguments
from console.api.tools.json_stream import Malformed, Parser, Source

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL = "<|constrain|>", "<|call|>"

_TO_TOOL = "to=functions."
"""Begins an answer to a prompt that ends within the header, and without a channel yet."""

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.:/-]+)")
_MAX_HEADER = 512


@dataclass(frozen=True, slots=True)
class HarmonyCalls:
    """<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{arguments}<|call|>, or with the recipient
    before the channel, as templates write it.

    A message without a recipient is text: its header is dropped.
    """

    @property
    def openings(self) -> tuple[str, ...]:
        return (START, CHANNEL, END, CALL, _TO_TOOL)

    @property
    def markers(self) -> tuple[str, ...]:
        return (START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL)

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        if opening in (END, CALL):
            return
        header = opening + (yield from _read_header(source))
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            sink.separate()
            return
        sink.begin(recipient[1])
        yield from source.skip_space()
        yield from read_arguments(source, sink.arguments)
        sink.complete()
        if (yield from source.skip_space()):
            yield from source.accept_closing(CALL)


def _read_header(source: Source) -> Parser[str]:
    """Parse a message's header, up to the marker of its text."""
    header = ""
    while not (yield from source.accept(MESSAGE)):
        yield from source.peek()
        header += source.take()
        if len(header) > _MAX_HEADER:
            raise Malformed(f"{MESSAGE!r} is missing")
    return header
