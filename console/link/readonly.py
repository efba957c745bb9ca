"""ReadOnlyLink: another link, of which everything can be seen and nothing changed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from console.link.protocol import EngineLink
from console.link.rpc import LOOKS, Call, NullConversation, RpcLink, invoke
from console.link.status import LinkStatus, link_status
from engine.errors import EngineError


class ReadOnly(EngineError):
    """A command was given to a console that takes none."""

    code = "read_only"
    http_status = 403


class ReadOnlyLink(RpcLink):
    """Refuses every call that changes something, with one sentence. Chats are refused, too: they take from others."""

    def __init__(self, link: EngineLink) -> None:
        super().__init__(self)
        self.conversation = NullConversation(self, self._refusal)
        self._link = link

    def standing(self) -> LinkStatus:
        """That of the other link, and that this one takes no commands."""
        status = link_status(self._link)
        calls = LOOKS if status.calls is None else LOOKS & status.calls
        return msgspec.structs.replace(status, read_only=True, calls=calls)

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Return the answer of the other link."""
        return call.on(self._link)(**arguments)

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Return the answer of the other link to a call that changes nothing."""
        if call.changes:
            raise self._refusal()
        return await invoke(call, self._link, arguments)

    def _refusal(self) -> ReadOnly:
        return ReadOnly(self.standing().refusal)
