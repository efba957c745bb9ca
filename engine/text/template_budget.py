"""What one rendering of a chat template may do, and what each thing that it does costs: pure but for the clock."""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, KeysView, Mapping, Sequence, Sized, ValuesView
from itertools import permutations
from typing import Any

from jinja2 import Undefined
from jinja2.runtime import Context
from jinja2.utils import Namespace

MAX_WORK = 2**27
"""Characters, items and steps that one rendering may make; a step counts as `_STEP`."""

MAX_S = 5.0
_STEP = 128
_MAX_BITS = 4096
_MAX_DIGITS = 4096
_MAX_SOUGHT = 256
_CLOCK_EVERY = 32
_ITEM = 16
"""What an item of a list counts as, in characters."""

_OF_NO_ITEMS = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length"})
_OF_ITEMS = frozenset(
    {"batch", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sum"}
)
"""Those that look at no item of a list, and those that look at none from inside; all others may read it out."""

# fmt: off
_OF_TEXT = frozenset({
    "capitalize", "count", "d", "default", "e", "escape", "first", "float", "indent", "int", "last", "length",
    "lower", "safe", "string", "title", "trim", "upper",
})
# fmt: on
"""Those that see a text as one."""

_OF_BYTES = frozenset({"encode", "from_bytes", "to_bytes"})
_ODD_FORMAT = "it formats text in a way that may have no end"
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_SPLITTING = frozenset({"rsplit", "split", "splitlines", "striptags", "unescape"})
_SEEKING = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"})
"""Those that take the longer for each character of the text, the longer what they look for is."""

_PLAIN_FORMAT = re.compile(r"%(?:[-+ #0]?[0-9]{0,3}(?:\.[0-9]{1,3})?[a-zA-Z%]|\([^()%]*\)s)")
_WIDE_FIELD = re.compile(r"\{[^{}:!]*[:!][^{}]*(?:\d{4}|\{)")


class TooMuchWork(Exception):
    """The template does not come to an end, or makes too much of what it is given."""


class Budget:
    """What one rendering may still do. Raises TooMuchWork when it is used up, or its time is."""

    def __init__(self) -> None:
        self._left = MAX_WORK
        self._steps = 0
        self._ends = time.monotonic() + MAX_S

    def spend(self, amount: int = 0) -> None:
        """One step that makes `amount` characters."""
        self._left -= amount + _STEP
        self._steps += 1
        if self._left < 0:
            raise TooMuchWork("it goes on for ever, or makes too long a text")
        if self._steps % _CLOCK_EVERY == 0 and time.monotonic() > self._ends:
            raise TooMuchWork(f"it takes longer than {MAX_S:g} s")

    def weigh(self, value: object) -> int:
        """Spend what `value` is when it is written out, and return it; raises TooMuchWork early where it is endless."""
        before = self._left
        waiting: list[object] = [value]
        while waiting:
            match waiting.pop():
                case str() as text:
                    self.spend(len(text))
                case Mapping() as mapping:
                    self.spend(_ITEM * len(mapping))
                    waiting += [*mapping.keys(), *mapping.values()]
                case Namespace() as space:
                    waiting.append(object.__getattribute__(space, "_Namespace__attrs"))
                case list() | tuple() | set() | KeysView() | ValuesView() | ItemsView() as items:
                    self.spend(_ITEM * len(items))
                    waiting += items
                case _:
                    self.spend()
        return before - self._left


class BudgetedContext(Context):
    """A rendering's variables, and its budget, which everything that it calls shares."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """A context within this one."""
        context = super().derived(locals)
        assert isinstance(context, BudgetedContext)
        context.budget = self.budget
        return context


def budget_of(context: Context) -> Budget:
    """The budget of the rendering that `context` belongs to."""
    assert isinstance(context, BudgetedContext)
    return context.budget


def made_by(operator: str, left: Any, right: Any, budget: Budget) -> int:
    """Characters that an operator makes; raises TooMuchWork for a number beyond all use."""
    match operator, left, right:
        case "+", str() | list() | tuple(), str() | list() | tuple():
            return _size(left) + _size(right)
        case "*", str() | list() | tuple(), int():
            return _size(left) * max(0, right)
        case "*", int(), str() | list() | tuple():
            return _size(right) * max(0, left)
        case "**", int(), int() if left.bit_length() * max(1, right) > _MAX_BITS:
            raise TooMuchWork("it makes a number of too many digits")
        case "*", int(), int() if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TooMuchWork("it makes a number of too many digits")
        case "%", str(), _:
            if re.sub(_PLAIN_FORMAT, "", left).count("%"):
                raise TooMuchWork(_ODD_FORMAT)
            return len(left) + left.count("%") * (1000 + budget.weigh(right))
        case _:
            return 0


def made_by_method(owner: object, name: str, args: Sequence[Any], budget: Budget) -> int:
    """Characters that a method makes. args: all of them, those by name last."""
    if name in _OF_BYTES:
        raise TooMuchWork("it deals in bytes, which no prompt is made of")
    budget.weigh([arg for arg in args if not isinstance(arg, str)])
    if not isinstance(owner, str):
        return 0
    _refuse_long_search(name, args)
    match name, *args:
        case "replace", str() as old, str() as new, *_:
            return len(owner) + owner.count(old) * len(new)
        case "translate", table:
            return len(owner) * budget.weigh(table)
        case "join", parts:
            return len(owner) * len(parts) if isinstance(parts, Sized) else 0
        case "format" | "format_map", *values:
            plain = all(isinstance(value, str | int | float | None) for value in values)
            if not plain or _WIDE_FIELD.search(owner):
                raise TooMuchWork(_ODD_FORMAT)
            texts = [value for value in values if isinstance(value, str)]
            return len(owner) + owner.count("{") * (_MAX_BITS + _longest(texts))
        case _ if name in _PADDING:
            widths = [arg for arg in args if isinstance(arg, int)]
            return len(owner) + max([8, *widths]) * (1 + owner.count("\t"))
        case _:
            return len(owner) * (_ITEM if name in _SPLITTING else 1)


def _size(value: str | list[object] | tuple[object, ...]) -> int:
    return len(value) if isinstance(value, str) else _ITEM * len(value)


def _longest(values: Sequence[object]) -> int:
    """The longest text or the largest number among them."""
    sizes = [len(value) if isinstance(value, str) else value for value in values if isinstance(value, str | int)]
    return max(map(abs, sizes), default=0)


def made_by_filter(name: str, value: object, args: Sequence[Any], budget: Budget) -> int:
    """Characters that a filter makes; raises TooMuchWork for what it should not be asked. args: all of them, those by
    name last and in any order."""
    most = _longest(args)
    budget.weigh([arg for arg in args if not isinstance(arg, str)])
    _refuse_long_search(name, args)
    match name, value, args:
        case "replace", str() as text, _:
            return _replaced(text, args)
        case "indent", str() as text, _:
            return len(text) + most * (1 + text.count("\n"))
        case "replace" | "indent", _, _ if not isinstance(value, Undefined):
            raise TooMuchWork(f"{name} gets what is no text")
        case "int" | "float", str() as text, _ if len(text) > _MAX_DIGITS:
            raise TooMuchWork("it makes a number of too many digits")
        case "batch" | "slice" | "round", _, _ if most > 1000:
            raise TooMuchWork(f"{name} gets a number beyond all use")
        case "sum", _, [*given] if any(isinstance(each, list | tuple) for each in given):
            raise TooMuchWork("it adds up what are no numbers")
        case _, str() as text, _:
            return len(text) if name in _OF_TEXT else _ITEM * len(text)
        case _ if name in _OF_NO_ITEMS:
            return 0
        case _, Sized(), _ if name in _OF_ITEMS:
            return _ITEM * len(value)
        case _:
            budget.weigh(value)
            return 0


def _refuse_long_search(name: str, args: Sequence[Any]) -> None:
    if name in _SEEKING and any(isinstance(arg, str) and len(arg) > _MAX_SOUGHT for arg in args):
        raise TooMuchWork(f"{name} looks for too long a text")


def _replaced(text: str, args: Sequence[Any]) -> int:
    """Characters after a replacement. args: the old text and the new one, and how often, in any order."""
    if not all(isinstance(arg, str | int | float | Undefined | None) for arg in args):
        raise TooMuchWork("replace gets what is no text")
    words = [str(arg) for arg in args]
    return len(text) + max((text.count(old) * len(new) for old, new in permutations(words, 2)), default=0)
