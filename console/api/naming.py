"""What clients of a dialect call our fields: an error that speaks of one should name it as the client sent it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from console.api.errors import LONGEST_MESSAGE
from engine.errors import EngineError

AS_SENT = "as_sent"
"""The detail of an error that names fields as the client does already."""


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A sentence about our fields as one about the client's. names: by ours, theirs; only whole words are changed."""
    if not names:
        return message
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", lambda found: names[found[1]], message)


def told_as(error: EngineError, names: Mapping[str, str]) -> str:
    """An error's sentence in the client's words, no longer than any may be. names: as `renamed` has them."""
    message = error.message if error.details.get(AS_SENT) else renamed(error.message, names)
    return message[:LONGEST_MESSAGE]
