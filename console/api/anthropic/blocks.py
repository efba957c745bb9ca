"""The blocks of a message: its text, and the tools that it calls."""

from __future__ import annotations

from console.api.anthropic.answers import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    TextBlock,
    TextDelta,
    ToolUseBlock,
)
from console.api.stream import ChunkStream
from console.api.tools import CallArguments, CallBegan, CallReader, Piece, Said, arguments_of, whole


def blocks_of(text: str, reader: CallReader | None) -> list[Block]:
    """Those of a whole answer; reader: what finds its calls, None where there are none."""
    said, calls = (text, ()) if reader is None else whole(reader, text)
    used = [ToolUseBlock(call.id, call.name, arguments_of(call.arguments, cut=call.cut)) for call in calls]
    return [TextBlock(said), *used] if said else [*used]


class BlockWriter:
    """Sends the blocks of an answer as it comes, one after the other, each between its start and its stop."""

    def __init__(self, chunks: ChunkStream, reader: CallReader | None) -> None:
        self._chunks = chunks
        self._reader = reader
        self._index = 0
        self._open: type[Block] | None = None

    async def text(self, text: str) -> None:
        """More of the answer."""
        for piece in [Said(text)] if self._reader is None else self._reader.feed(text):
            await self._piece(piece)

    async def finish(self) -> None:
        """There is no more."""
        for piece in [] if self._reader is None else self._reader.finish():
            await self._piece(piece)
        await self._close()

    async def _piece(self, piece: Piece) -> None:
        match piece:
            case Said(text=text):
                if text:
                    await self._begin(TextBlock(""))
                    await self._chunks.send(BlockDelta(self._index, TextDelta(text)))
            case CallBegan(id=call_id, name=name):
                await self._close()
                await self._begin(ToolUseBlock(call_id, name, arguments_of("{}")))
            case CallArguments(text=text):
                await self._chunks.send(BlockDelta(self._index, InputDelta(text)))
            case _:
                await self._close()

    async def _begin(self, block: Block) -> None:
        """A block of that kind is open."""
        if self._open is not type(block):
            await self._close()
            self._open = type(block)
            await self._chunks.send(BlockStart(self._index, block))

    async def _close(self) -> None:
        if self._open is not None:
            self._open = None
            await self._chunks.send(BlockStop(self._index))
            self._index += 1
