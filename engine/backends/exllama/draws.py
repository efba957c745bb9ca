"""The random numbers of one request: functions of its seed and the token's position alone."""

from __future__ import annotations

import struct
from hashlib import blake2b


class Draws:
    """Stands in for a job's random generator, so that a request resumed elsewhere draws what it would have drawn.

    position: index in the answer of the token that is drawn now.  A position's first number decides about XTC, the
    others are its tries.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._position = 0
        self._used = 0

    def move_to(self, position: int) -> float:
        """Go to a token and return the number that decides about XTC there."""
        self._position = position
        self._used = 0
        return self.random()

    def random(self) -> float:
        """The position's next number in [0, 1)."""
        key = struct.pack("<qqq", self._seed, self._position, self._used)
        self._used += 1
        return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53
