"""Messages between a chat template's renderer and its user, in frames: a length, then that many bytes.

A job is marshalled: it comes from our own process, and marshal has all that JSON has. An answer is one of `Answer` and
text in UTF-8, lone surrogates included, which our own process has no reason to trust.
"""

from __future__ import annotations

import struct
from enum import IntEnum

LENGTH = struct.Struct("!Q")

OUT_OF_MEMORY = 3
"""Exit status of the renderer."""


class Answer(IntEnum):
    """Kind of an answer, by its text: the prompt, or nothing where a template was compiled; the template's own
    complaint about the messages; why there is no prompt."""

    DONE = 0
    REFUSED = 1
    FAILED = 2
