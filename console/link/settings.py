"""`link.settings`: every setting as a row, with its value and where that came from; and saving one to config.toml."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

Source = Literal["flag", "variable", "file", "tuned", "default", "console"]
"""Source of the value in use. tuned: autotune found and applied it.  console: an operator changed it while the program
ran, and it was not saved."""

When = Literal["now", "load", "start"]
"""When a saved value is used: at once, by the next model that is loaded, or when the program starts again."""

Kind = Literal["text", "number", "choice", "switch", "list"]


class SettingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. No field ever holds a secret: where there is one, `value` and `saved` are HIDDEN.

    value: what is in use, as config.toml has it without quotes; "" where nothing is set.
    where: what set it: "--port", "ERICLLM_PORT", a path; "" for a default.
    saved: what config.toml says, None where it says nothing.
    wins: the flag or variable that wins over the file; "" where none does.
    waits: whether another value than the one in use is there to be used at the time that `when` says.
    basic: one of those that most operators set.
    unit: of its numbers, as "s"; "" where they have none.
    """

    name: str
    group: str
    help: str
    kind: Kind
    value: str
    source: Source
    where: str
    default: str
    when: When
    choices: tuple[str, ...] = ()
    saved: str | None = None
    wins: str = ""
    secret: bool = False
    waits: bool = False
    basic: bool = False
    unit: str = ""

    def with_unit(self, value: str) -> str:
        """Return one of its values as it is shown: a number with its unit."""
        is_number = value.replace(".", "", 1).isdecimal()
        return f"{value} {self.unit}" if self.unit and is_number else value


HIDDEN = "••••••••"


class SettingsLink(Protocol):
    """Settings, for their screen."""

    def rows(self) -> Sequence[SettingRow]:
        """Every setting, in the order of the schema; at once."""

    def path(self) -> str:
        """The config.toml that `save` writes."""

    async def save(self, name: str, value: str | None) -> SettingRow:
        """Write one setting to config.toml, or take it out of there (None); returns the row as it is then.

        value: as a flag takes it. What need not wait is in use when this returns. Raises InvalidRequest with one
        sentence on a bad value, and leaves the file as it was.
        """
