"""An answer on its way from a model into a conversation: shown as it comes, kept once a second and at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from console.chats.kept import Turn, TurnNote
from console.links.conversation import ChatDelta
from engine.errors import EngineError

KEEP_S = 1.0
log = logging.getLogger(__name__)


class Answering:
    """turn: the answer as far as it came, its note with a sentence where it failed.

    keep: writes the answer down; show: takes it each time there is more of it.
    """

    def __init__(self, turn: Turn, keep: Callable[[Turn], None], show: Callable[[Turn], None]) -> None:
        self.turn = turn
        self._keep = keep
        self._show = show
        self._before = turn.note
        self._new = asyncio.Event()

    async def run(self, deltas: AsyncIterator[ChatDelta]) -> None:
        """Take all of it; what came is kept when this is cancelled, and when the model fails, too."""
        finish, problem = "cancelled", ""
        keeper = asyncio.create_task(self._keep_up())
        try:
            async with contextlib.aclosing(deltas) as stream:  # type: ignore[type-var]
                async for delta in stream:
                    self._take(delta)
                    finish = delta.finish or finish
        except EngineError as error:
            finish, problem = "error", error.message
        except Exception:
            log.exception("an answer failed")
            finish, problem = "error", "The answer failed unexpectedly; the log says how."
        finally:
            keeper.cancel()
            note = msgspec.structs.replace(self.turn.note, finish=finish, problem=problem)
            self.turn = msgspec.structs.replace(self.turn, note=note, unfinished=False)
            self._keep(self.turn)

    def _take(self, delta: ChatDelta) -> None:
        note = TurnNote(
            model=self._before.model,
            output_tokens=self._before.output_tokens + delta.output_tokens,
            tokens_per_s=delta.tokens_per_s if delta.tokens_per_s is not None else self._before.tokens_per_s,
            ttft_s=delta.ttft_s,
        )
        self.turn = msgspec.structs.replace(self.turn, content=self.turn.content + delta.text, note=note)
        self._new.set()
        self._show(self.turn)

    async def _keep_up(self) -> None:
        """The first words at once, then once a second for as long as there are new ones."""
        while True:
            await self._new.wait()
            self._new.clear()
            self._keep(self.turn)
            await asyncio.sleep(KEEP_S)
