"""FakeSettings: the settings' rows without an engine. It takes what the schema takes and writes down what is saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from console.link.settings import SettingRow
from console.settings.rows import setting_rows
from console.settings.schema import Settings, flag_of
from console.settings.sources import Sources, changed
from engine.errors import EngineError

FILE = Path("/home/op/.config/ericllm/config.toml")
SOURCES = Sources(
    flags={"port": "8001"},
    variables={"api_key": "s3cret"},
    saved={"theme": "ericllm-light", "max_prompts": 8, "port": 9000, "draft_tokens": 4},
    file=FILE,
)


class FakeSettings:
    """sources: what the program was started with.  names: the settings there are, all of them by default."""

    def __init__(
        self,
        sources: Sources = SOURCES,
        turned: Mapping[str, object] | None = None,
        names: Collection[str] = tuple(Settings.model_fields),
    ) -> None:
        self.sources = sources
        self.in_use = sources.settings()
        self.turned = dict(turned or {})
        self.names = names
        self.saves: list[tuple[str, str | None]] = []
        self.failures: dict[str, EngineError] = {}

    def rows(self) -> Sequence[SettingRow]:
        """Made as the real ones are."""
        rows = setting_rows(self.in_use, self.sources.settings(), self.sources, self.turned)
        return tuple(row for row in rows if row.name in self.names)

    def path(self) -> str:
        """A file that is not there."""
        return str(FILE)

    async def save(self, name: str, value: str | None) -> SettingRow:
        """Checks the value and keeps it."""
        self.saves.append((name, value))
        if name in self.failures:
            raise self.failures.pop(name)
        saved: dict[str, Any] = {key: kept for key, kept in self.sources.saved.items() if key != name}
        if value is not None:
            saved[name] = getattr(changed(Settings(), {name: value}), name)
        self.sources = self.sources.saving(saved)
        if flag_of(name).used != "start" and not {name} & {*self.sources.flags, *self.sources.variables}:
            self.in_use = self.in_use.model_copy(update={name: getattr(self.sources.settings(), name)})
        return next(row for row in self.rows() if row.name == name)
