"""What a screen may ask for about insight. The numbers themselves come with every snapshot."""

from __future__ import annotations

from typing import Protocol


class InsightLink(Protocol):
    """Both raise engine.errors.EngineError."""

    async def reset(self) -> None:
        """Count the session anew from now on."""

    async def measure(self) -> None:
        """Find out what this machine's processor can at most; takes seconds, and is kept for later runs.

        Refused while requests are running: it would slow them down and find less than there is.
        """
