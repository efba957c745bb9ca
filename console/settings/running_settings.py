"""Settings of a running program: where each came from, saved to config.toml, used at once where they need not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from console.link.settings import SettingRow
from console.settings.config_file import WatchedFiles, edit_toml
from console.settings.load_options import knob_values
from console.settings.model_profiles import ModelProfile
from console.settings.rows import setting_rows, toml_value
from console.settings.schema import Settings, flag_of, is_secret
from console.settings.sources import Sources, changed, read_file
from engine.engine import Engine
from engine.errors import EngineError, InvalidRequest
from engine.system.files import replace_file

_OBSERVED = frozenset({"slo_ttft", "slo_itl", "energy_rate", "energy_currency"})
"""Settings that only the engine's insight goes by."""


class LiveSettings:
    """Implements SettingsLink. `rows` and `path` may be called from any thread, `save` on the engine's loop.

    current: the settings in use.
    """

    def __init__(self, engine: Engine, settings: Settings, sources: Sources) -> None:
        self.current = settings
        self._engine = engine
        self._sources = sources
        self._coming = settings
        self._file = WatchedFiles(sources.file)
        self._writing = asyncio.Lock()

    def path(self) -> str:
        """The config.toml that is read and written."""
        return str(self._sources.file)

    @property
    def sources(self) -> Sources:
        """Where they came from, as it is now."""
        return self._sources

    def rows(self) -> Sequence[SettingRow]:
        """Every setting, in the order of the schema; a file that changed is read again."""
        self.refresh()
        config = self._engine.config
        by_backend = ("max_prompts",) if config.library_prompts else ()
        return tuple(
            setting_rows(self.current, self._coming, self._sources, knob_values(config), by_backend=by_backend)
        )

    def refresh(self) -> None:
        """Read the file again where it has changed. Safe on any thread."""
        if self._file.changed():
            self._reread()

    async def save(self, name: str, value: str | None) -> SettingRow:
        """Write one setting, or take it out of the file (None).

        Raises InvalidRequest, and what the engine refuses a knob with; the file is as it was then.
        """
        async with self._writing:
            sources, text = await asyncio.to_thread(_prepare, self._sources, name, value)
            coming = sources.settings()
            if not _waits_for_start(name, sources) and sources.origin(name).source not in ("flag", "variable"):
                await self._use(name, coming)
            await asyncio.to_thread(_write, sources, text)
            self._sources, self._coming = sources, coming
            self._file.changed()
        return next(row for row in self.rows() if row.name == name)

    async def reload(self) -> tuple[list[str], list[str]]:
        """Read the file again. Returns the settings that it changes and that are used from now on, and those that the
        next load or start will use.

        Raises InvalidRequest for a file with a mistake, and what the engine refuses a knob with.
        """
        async with self._writing:
            sources = self._sources.saving(*await asyncio.to_thread(_read_again, self._sources.file))
            coming = sources.settings()
            used, later = list[str](), list[str]()
            for name in Settings.model_fields:
                if getattr(coming, name) == getattr(self.current, name):
                    continue
                if _waits_for_start(name, sources):
                    later.append(name)
                else:
                    await self._use(name, coming)
                    (used if flag_of(name).used == "now" else later).append(name)
            self._sources, self._coming = sources, coming
            self._file.changed()
        return used, later

    async def _use(self, name: str, coming: Settings) -> None:
        value = getattr(coming, name)
        flag = flag_of(name)
        if flag.knob:
            await self._engine.reconfigure(**{flag.engine or name: value})
        if name in _OBSERVED:
            await self._engine.observe({flag.engine or name: value})
        if name == "prefix_sharing":
            self._engine.share_prefixes(value)
        if name == "refresh_hz":
            self._engine.publish_for(value)
        self.current = self.current.model_copy(update={name: value})

    def _reread(self) -> None:
        """Take a change of the file; one with a mistake is ignored, and the next start will say what is wrong."""
        try:
            sources = self._sources.saving(*_read_again(self._sources.file))
            self._sources, self._coming = sources, sources.settings()
        except EngineError:
            return


def _waits_for_start(name: str, sources: Sources) -> bool:
    """Return whether a setting is used from the next start on; a default that depends on the backend is, as well."""
    return flag_of(name).used == "start" or (name == "max_prompts" and sources.library_prompts > 0)


def _read_again(file: Path) -> tuple[dict[str, Any], dict[str, ModelProfile]]:
    """Read the file again. Raises InvalidRequest, for a pipe (`ERICLLM_CONFIG=<(...)`) too: it may stay empty, and
    opening it would wait."""
    with suppress(OSError):  # reading says why
        if file.is_fifo():
            raise InvalidRequest(f"{file} is a pipe, which is read only at start", param="config")
    return read_file(file)


def _prepare(sources: Sources, name: str, typed: str | None) -> tuple[Sources, str]:
    """The sources as they will be, and the file's text. Raises InvalidRequest for a value or a file with a mistake."""
    saved, profiles = _read_again(sources.file)
    text = sources.file.read_text(encoding="utf-8") if sources.file.exists() else ""
    value = None if typed is None else changed(Settings(), {name: typed})
    saved.pop(name, None)
    if value is not None and typed is not None:
        saved[name] = toml_value(typed, getattr(value, name))
    alone = Sources(saved=saved, file=sources.file)
    alone.settings()
    return sources.saving(saved, profiles), edit_toml(text, name, saved.get(name))


def _write(sources: Sources, text: str) -> None:
    try:
        replace_file(sources.file, text.encode(), keep_mode=not any(map(is_secret, sources.saved)))
    except OSError as error:
        raise InvalidRequest(f"{sources.file} cannot be written: {error.strerror}", param="config") from None
