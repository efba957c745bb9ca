"""What clients of a dialect call our fields: an error that speaks of one should name it as the client sent it."""

from __future__ import annotations

import re
from collections.abc import Mapping


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A sentence about our fields as one about the client's. names: by ours, theirs; only whole words are changed."""
    if not names:
        return message
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", lambda found: names[found[1]], message)
