"""ReadOnlyLink: another link, of which everything can be seen and nothing changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from console.link.protocol import ApiStatus, EngineLink
from console.link.rpc import Call, NullConversation, RpcLink, invoke
from console.link.status import LinkStatus, link_status
from engine.errors import EngineError
from engine.snapshot import LogEntry, Snapshot


class ReadOnly(EngineError):
    """A command was given to a console that takes none."""

    code = "read_only"
    http_status = 403


class ReadOnlyLink(RpcLink):
    """Refuses every call that changes something, with one sentence. Chats are refused, too: they take from others."""

    def __init__(self, link: EngineLink) -> None:
        super().__init__(self)
        self.conversation = NullConversation(self, _refusal)
        self._link = link

    def snapshot(self) -> Snapshot:
        """As it is."""
        return self._link.snapshot()

    def api_status(self) -> ApiStatus:
        """As it is."""
        return self._link.api_status()

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """As they are."""
        return self._link.logs(after)

    def standing(self) -> LinkStatus:
        """That of the other link, and that this one takes no commands."""
        return msgspec.structs.replace(link_status(self._link), read_only=True)

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """What the other link gives."""
        return call.on(self._link)(**arguments)

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """What the other link gives for what changes nothing."""
        if call.changes:
            raise _refusal()
        return await invoke(call, self._link, arguments)

    async def start_api(self) -> None:
        """Refused."""
        raise _refusal()

    async def stop_api(self, *, finish: bool = False) -> None:
        """Refused."""
        raise _refusal()


def _refusal() -> ReadOnly:
    return ReadOnly("This console is read-only: it shows everything and changes nothing")
