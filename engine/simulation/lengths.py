"""How long prompts and answers are: always the same, drawn from a distribution, or as a trace has them."""

from __future__ import annotations

import random
import re
from typing import Literal

import msgspec

from engine.errors import InvalidRequest

MAX_TOKENS = 1_000_000
_FIXED = re.compile(r"\d{1,7}")
_UNIFORM = re.compile(r"(\d{1,7})-(\d{1,7})")
_NORMAL = re.compile(r"normal:(\d{1,7}):(\d{1,7})")


class Length(msgspec.Struct, frozen=True):
    """Tokens. first: the number, the least, or the mean; second: the most, or the standard deviation."""

    kind: Literal["fixed", "uniform", "normal", "trace"]
    first: int = 0
    second: int = 0

    @classmethod
    def parse(cls, text: str) -> Length:
        """From "128", "64-256", "normal:128:32" or "trace". Raises InvalidRequest."""
        length = _parsed(text.strip())
        if length is None:
            raise InvalidRequest(
                f"{text} is no length; there are 128, 64-256 (any in it), normal:128:32 (mean and deviation) and trace",
                param="length",
            )
        if not 1 <= length.first <= MAX_TOKENS or length.second > MAX_TOKENS:
            raise InvalidRequest(f"{text}: a length is between 1 and {MAX_TOKENS} tokens", param="length")
        if length.kind == "uniform" and length.second < length.first:
            raise InvalidRequest(f"{text}: the most is less than the least", param="length")
        return length

    def __str__(self) -> str:
        """As it is written."""
        match self.kind:
            case "fixed":
                return str(self.first)
            case "uniform":
                return f"{self.first}-{self.second}"
            case "normal":
                return f"normal:{self.first}:{self.second}"
        return "trace"

    @property
    def most(self) -> int | None:
        """The longest that it gives; None where a trace says."""
        match self.kind:
            case "fixed":
                return self.first
            case "uniform":
                return self.second
            case "normal":
                return self.first + 3 * self.second
        return None

    def draw(self, rng: random.Random) -> int:
        """One length. A normal one is cut at three deviations and at one token. Not for a trace, which has its own."""
        match self.kind:
            case "fixed":
                return self.first
            case "uniform":
                return rng.randint(self.first, self.second)
            case "normal":
                drawn = round(rng.gauss(self.first, self.second))
                return max(1, self.first - 3 * self.second, min(drawn, self.first + 3 * self.second))
        raise AssertionError("a trace says itself how long its prompts are")


def _parsed(text: str) -> Length | None:
    if text == "trace":
        return TRACE
    if _FIXED.fullmatch(text):
        return Length("fixed", int(text))
    if uniform := _UNIFORM.fullmatch(text):
        return Length("uniform", int(uniform[1]), int(uniform[2]))
    if normal := _NORMAL.fullmatch(text):
        return Length("normal", int(normal[1]), int(normal[2]))
    return None


TRACE = Length("trace", 1)
"""As a trace has them."""


def fixed(tokens: int) -> Length:
    """Always so many."""
    return Length("fixed", tokens)
