"""How a link stands to its engine: in this process, elsewhere and perhaps out of reach, or a recording. Pure."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import msgspec

Reach = Literal["here", "starting", "connecting", "live", "lost", "refused", "recording"]

CHAT = "conversation.chat"
"""The method that asks a model."""
NEEDS_ADMIN = "The key of this console does not allow that: it needs scope admin"


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """name: "host:port" or a file's name, "" for the engine of this process.

    reach: starting is the engine of this process before its first model loads; lost is tried again by itself, after
    `retry_in_s`; refused, too, but needs an operator to act.
    model: the one that starting is about to load, "" where that is not known.
    reason: one sentence for lost and refused.  read_only: nothing of the engine can be changed.
    calls: names of the calls of `console.link.rpc` that the other end accepts, None for all.
    silent_s: whole seconds since the last data of an instance, 0 while it comes as it should and before the first.
    """

    name: str = ""
    reach: Reach = "here"
    reason: str = ""
    retry_in_s: float | None = None
    read_only: bool = False
    calls: frozenset[str] | None = None
    silent_s: int = 0
    model: str = ""

    @property
    def starting_text(self) -> str:
        """ "Starting demo…" while it starts, else ""."""
        if self.reach != "starting":
            return ""
        return f"Starting {self.model}…" if self.model else "Starting…"

    @property
    def refusal(self) -> str:
        """Why a read-only link takes no command."""
        if self.reach == "recording":
            return "This is a recording: nothing can be changed"
        return "This console is read-only: it shows everything and changes nothing"

    def allows(self, call: str) -> bool:
        """Return whether the other end accepts a call."""
        return self.calls is None or call in self.calls

    def refusal_of(self, call: str = "", *, changes: bool = False) -> str:
        """Return why a call, or without one any change, is refused; "" where it is not. changes: it changes the
        engine, or takes from others."""
        if self.allows(call) if call else not (changes and self.read_only):
            return ""
        if changes and self.read_only:
            return self.refusal
        if self.reach == "recording":
            return "This is a recording: that was not recorded"
        return NEEDS_ADMIN

    @property
    def stale(self) -> bool:
        """True if what is shown is old, or not known yet."""
        return self.reach in ("connecting", "lost", "refused") or self.silent_s > 0


@runtime_checkable
class Distant(Protocol):
    """A link that has more to say of itself than one to the engine of this process."""

    def standing(self) -> LinkStatus:
        """How it stands now, at once."""


def link_status(link: object) -> LinkStatus:
    """Of any link."""
    return link.standing() if isinstance(link, Distant) else LinkStatus()
