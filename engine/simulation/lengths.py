"""How long prompts and answers are: always the same, drawn from a distribution, or as a trace has them."""

from __future__ import annotations

import math
import random
import re
from typing import Literal

import msgspec

from engine.errors import InvalidRequest

MAX_TOKENS = 1_000_000
_MAX_DEVIATIONS = 3
_MAX_MEANS = 20
_MAX_CV = 10.0
_FIXED = re.compile(r"\d{1,7}")
_UNIFORM = re.compile(r"(\d{1,7})-(\d{1,7})")
_NORMAL = re.compile(r"normal:(\d{1,7}):(\d{1,7})")
_LOG_NORMAL = re.compile(r"(\d{1,7})~(\d{1,3}(?:\.\d{1,6})?|\.\d{1,6})")
_FORMS = "128, 64-256 (any in it), normal:128:32 (mean and deviation), 128~0.8 (mean and coefficient of variation)"


class Length(msgspec.Struct, frozen=True):
    """Tokens. first: the number, the least, or the mean.  second: the most, or the standard deviation.

    cv: the coefficient of variation of a log-normal one.
    """

    kind: Literal["fixed", "uniform", "normal", "log-normal", "trace"]
    first: int = 0
    second: int = 0
    cv: float = 0.0

    @classmethod
    def parse(cls, text: str, param: str = "", *, traced: bool = False) -> Length:
        """From "128", "64-256", "normal:128:32" or "128~0.8"; from "trace" too, where it is traced.

        Raises InvalidRequest, its param the given one, which the sentence then names.
        """
        length, named = _parsed(text.strip()), f"{param}: " if param else ""
        if length is None or (length.kind == "trace" and not traced):
            forms = f"{_FORMS}, trace" if traced else _FORMS
            raise InvalidRequest(f"{named}{text or 'nothing'} is not a length; use {forms}", param=param or "length")
        if not 1 <= length.first <= MAX_TOKENS or length.second > MAX_TOKENS:
            message = f"{named}{text}: a length is between 1 and {MAX_TOKENS} tokens"
            raise InvalidRequest(message, param=param or "length")
        if length.kind == "uniform" and length.second < length.first:
            raise InvalidRequest(f"{named}{text}: the max is below the min", param=param or "length")
        if length.kind == "log-normal" and not 0 < length.cv <= _MAX_CV:
            message = f"{named}{text}: a coefficient of variation is more than 0, max {_MAX_CV:g}"
            raise InvalidRequest(message, param=param or "length")
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
            case "log-normal":
                return f"{self.first}~{self.cv:g}"
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
                return self.first + _MAX_DEVIATIONS * self.second
            case "log-normal":
                return _MAX_MEANS * self.first
        return None

    @property
    def expected(self) -> float:
        """The mean, before anything is cut. Not of a trace."""
        return (self.first + self.second) / 2 if self.kind == "uniform" else float(self.first)

    def draw(self, rng: random.Random) -> int:
        """One length. A normal one is cut at three deviations, a log-normal one at twenty times its mean, both at one
        token. Not for a trace, which has its own."""
        match self.kind:
            case "fixed":
                return self.first
            case "uniform":
                return rng.randint(self.first, self.second)
            case "normal":
                least, most = (self.first + sign * _MAX_DEVIATIONS * self.second for sign in (-1, 1))
                return max(1, least, min(round(rng.gauss(self.first, self.second)), most))
            case "log-normal":
                variance = math.log1p(self.cv**2)
                drawn = rng.lognormvariate(math.log(self.first) - variance / 2, math.sqrt(variance))
                return max(1, min(round(drawn), _MAX_MEANS * self.first))
        raise AssertionError("a trace has its own prompt lengths")


def _parsed(text: str) -> Length | None:
    if text == "trace":
        return TRACE
    if _FIXED.fullmatch(text):
        return fixed(int(text))
    if found := _UNIFORM.fullmatch(text):
        return uniform(int(found[1]), int(found[2]))
    if found := _NORMAL.fullmatch(text):
        return Length("normal", int(found[1]), int(found[2]))
    if found := _LOG_NORMAL.fullmatch(text):
        return Length("log-normal", int(found[1]), cv=float(found[2]))
    return None


TRACE = Length("trace", 1)
"""As a trace has them."""


def fixed(tokens: int) -> Length:
    """Return a constant length."""
    return Length("fixed", tokens)


def uniform(least: int, most: int) -> Length:
    """Any number between the two, either included."""
    return Length("uniform", least, most)
