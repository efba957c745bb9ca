"""The search space: settings, the knobs that they differ in, and the grid that these span. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

KnobName = Literal["workers", "max_prompts", "step_tokens", "threads", "cache_bits", "draft_tokens"]
MIN_CACHE_BITS = 8
"""Fewer change answers visibly, so that they are only tried where they are asked for."""
COARSE_LEVELS = 3
"""Values of a knob that the coarse grid has, at most."""
COUPLED: frozenset[frozenset[KnobName]] = frozenset(
    frozenset(pair)
    for pair in (
        ("workers", "max_prompts"),
        ("workers", "threads"),
        ("max_prompts", "step_tokens"),
        ("max_prompts", "cache_bits"),
        ("max_prompts", "draft_tokens"),
    )
)
"""Knobs of which one may make up for the other: turning either alone may find nothing where both together would."""
MEMORY: tuple[KnobName, ...] = ("workers", "max_prompts", "step_tokens", "cache_bits")
"""Knobs that ask for more memory the higher they are."""


class Setting(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One choice of all knobs. threads: of each worker, 0 shares the cores out.

    draft_tokens: guessed ahead from the request's own text, at most; 0 is none.
    """

    workers: int = 1
    max_prompts: int = 16
    step_tokens: int = 512
    threads: int = 0
    cache_bits: int = 16
    draft_tokens: int = 0

    @property
    def places(self) -> int:
        """Requests that all workers work on at once."""
        return self.workers * self.max_prompts

    def value(self, knob: KnobName) -> int:
        """Of one knob."""
        found: int = getattr(self, knob)
        return found

    def with_value(self, knob: KnobName, value: int) -> Setting:
        """The same but for one knob."""
        return msgspec.structs.replace(self, **{knob: value})

    def asks_no_less_memory_than(self, other: Setting) -> bool:
        """Return whether it cannot fit where `other` does not."""
        return all(self.value(knob) >= other.value(knob) for knob in MEMORY)


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """One knob. values: ascending.  turn_s: what turning it takes until its effect can be measured."""

    name: KnobName
    values: tuple[int, ...]
    turn_s: float = 0.0

    def coarse(self, levels: int = COARSE_LEVELS) -> tuple[int, ...]:
        """A few values, spread evenly and off the ends where there are many."""
        count = len(self.values)
        if count <= levels:
            return self.values
        return tuple(self.values[int((index + 0.5) * count / levels)] for index in range(levels))

    def stepped(self, value: int, by: int) -> int | None:
        """Return the value `by` places further; None beyond the ends, or from a value that is none of its own."""
        if value not in self.values:
            return None
        index = self.values.index(value) + by
        return self.values[index] if 0 <= index < len(self.values) else None


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """All settings that may be tried. start: the one in use, whose values knobs that are not in `knobs` keep."""

    knobs: tuple[Knob, ...]
    start: Setting

    def all(self) -> Iterator[Setting]:
        """Every setting of the grid."""
        yield from self._grid([knob.values for knob in self.knobs])

    @property
    def size(self) -> int:
        """How many there are."""
        count = 1
        for knob in self.knobs:
            count *= len(knob.values)
        return count

    def coarse(self, limit: int, draw: random.Random) -> list[Setting]:
        """`start`, then up to `limit` settings of the coarse grid, those that are cheap to go to one after the other.

        Where that grid has more, a Latin hypercube of it: each value of a knob is there as often as any other (McKay,
        Beckman and Conover 1979).
        """
        levels = [knob.coarse() for knob in self.knobs]
        found = list(self._grid(levels))
        if len(found) > limit:
            columns = [_balanced(values, limit, draw) for values in levels]
            found = list(dict.fromkeys(self._setting(row) for row in zip(*columns, strict=True)))
        return [self.start, *self.in_order(each for each in found if each != self.start)]

    def in_order(self, settings: Iterable[Setting], at: Setting | None = None) -> list[Setting]:
        """So that what is dear to turn is turned least often, and begins with what is in use: `at`, or else `start`."""
        used = at or self.start
        dearest_first = sorted(self.knobs, key=lambda knob: -knob.turn_s)

        def place(setting: Setting) -> list[tuple[bool, int]]:
            values = [(setting.value(knob.name), used.value(knob.name)) for knob in dearest_first]
            return [(value != now, value) for value, now in values]

        return sorted(settings, key=place)

    def turn_s(self, old: Setting, new: Setting) -> float:
        """Return the cost of going from one setting to another: the dearest knob that is turned."""
        return max((knob.turn_s for knob in self.knobs if old.value(knob.name) != new.value(knob.name)), default=0.0)

    def moves(self, setting: Setting, by: int) -> list[Setting]:
        """One knob turned `by` places, up or down; cheap ones first."""
        found = (
            setting.with_value(knob.name, value)
            for knob in self.knobs
            for direction in (by, -by)
            if (value := knob.stepped(setting.value(knob.name), direction)) is not None
        )
        return sorted(found, key=lambda each: self.turn_s(setting, each))

    def diagonal_moves(self, setting: Setting) -> list[Setting]:
        """Two coupled knobs turned a place, one up and one down or both the same way; cheap ones first."""
        found = []
        for one, other in itertools.combinations(self.knobs, 2):
            if frozenset((one.name, other.name)) in COUPLED:
                for ways in itertools.product((1, -1), repeat=2):
                    values = [
                        knob.stepped(setting.value(knob.name), way)
                        for knob, way in zip((one, other), ways, strict=True)
                    ]
                    if values[0] is not None and values[1] is not None:
                        found.append(setting.with_value(one.name, values[0]).with_value(other.name, values[1]))
        return sorted(found, key=lambda each: self.turn_s(setting, each))

    def _grid(self, levels: Sequence[Sequence[int]]) -> Iterator[Setting]:
        yield from map(self._setting, itertools.product(*levels))

    def _setting(self, values: Sequence[int]) -> Setting:
        names = [knob.name for knob in self.knobs]
        return msgspec.structs.replace(self.start, **dict(zip(names, values, strict=True)))


def _balanced(values: Sequence[int], count: int, draw: random.Random) -> list[int]:
    column = [values[index % len(values)] for index in range(count)]
    draw.shuffle(column)
    return column
