"""The settings that autotune found, by model and hardware: kept in the state folder, used where they are to be.

They come after flags, variables and config.toml, and before the defaults. Where any of these sets one of several that
go together (the two ways to set cache bits, say), what was found for the others is not used either.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from console.link.tuning import Tried
from console.settings.schema import TUNED_FILE, Settings
from console.settings.sources import Sources
from console.tuning.autotune.space import KnobName, Setting
from console.tuning.last_settings import model_key
from engine.devices import new_probe, parse_devices, usable_cores
from engine.models.resolve import resolve_local
from engine.snapshot import DeviceReading
from engine.system.files import replace_file

MAX_ENTRIES = 500
TUNABLE = ("num_workers", "max_prompts", "step_tokens", "threads", "cache_bits", "ngram_draft", "draft_tokens")
"""Settings that autotune finds."""
_TOGETHER = (
    frozenset({"cache_bits", "cache_8bit"}),
    frozenset({"ngram_draft", "draft_tokens", "draft_model"}),
    frozenset({"step_tokens", "backend"}),
)
_log = logging.getLogger("console")


class TunedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A result of tuning. model, hardware: its key.  at: unix time.  applied: whether it is used.

    settings: by their names, those that were searched.  measured: what they gave.
    slo_ttft_s, slo_itl_s, percentile, mix: what it was searched for.
    """

    model: str
    hardware: str
    at: float
    applied: bool
    settings: dict[str, int | bool | None]
    measured: Tried
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    percentile: float = 95.0
    mix: str = ""


class _Kept(msgspec.Struct, kw_only=True):
    version: int = 1
    entries: list[TunedProfile] = []


class TunedProfiles:
    """The file in `folder`; None keeps nothing. Blocking. Read for each call, as several consoles may share it.

    Of a model on some hardware it has the one that is applied, and what was found since.
    """

    def __init__(self, folder: Path | None) -> None:
        self.file = folder / TUNED_FILE if folder is not None else None

    def applied(self, model: str, hardware: str) -> TunedProfile | None:
        """Return the applied result for a model on such hardware."""
        return next((each for each in self._of(model, hardware) if each.applied), None)

    def knows(self, model: str) -> bool:
        """Return whether a result is applied for a model, on any hardware."""
        return any(each.model == model and each.applied for each in self._read())

    def keep(self, found: TunedProfile) -> None:
        """In place of what was found for it before; what is applied stays until something else is. Raises OSError."""
        if self.file is None:
            return
        outdated = [each for each in self._of(found.model, found.hardware) if found.applied or not each.applied]
        current = [each for each in self._read() if each not in outdated]
        content = msgspec.json.encode(_Kept(entries=[*current, found][-MAX_ENTRIES:]))
        replace_file(self.file, msgspec.json.format(content, indent=2))

    def _of(self, model: str, hardware: str) -> Sequence[TunedProfile]:
        """In the order in which they were found."""
        return [each for each in self._read() if (each.model, each.hardware) == (model, hardware)]

    def _read(self) -> Sequence[TunedProfile]:
        if self.file is None:
            return ()
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=_Kept).entries
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s cannot be read and starts empty: %s", self.file, error)
            return ()


def tuned_for(settings: Settings, model: str, folder: Path | None) -> Mapping[str, int | bool | None]:
    """Return the applied settings of a model (as --model takes it) on the hardware that the settings name; devices are
    read only where there is something to be used."""
    profiles, key = TunedProfiles(folder), model_key(model, resolve_local(model, settings.models_dir))
    if not profiles.knows(key):
        return {}
    devices = new_probe(parse_devices(settings.devices) if settings.devices else ()).read()
    found = profiles.applied(key, hardware_of(devices))
    return found.settings if found is not None else {}


def with_tuned(sources: Sources, settings: Settings, folder: Path | None, model: str = "") -> Sources:
    """The sources with what was found for a model, that of the settings by default, and nothing of another."""
    found = tuned_for(settings, model or settings.model, folder)
    return replace(sources, tuned=usable(found, sources.given), tuned_in=str(TunedProfiles(folder).file or ""))


def settings_for(
    sources: Sources, settings: Settings, folder: Path | None, model: str
) -> tuple[Settings, frozenset[str]]:
    """The settings of a running program for another of its models, and the names of those that were found for it.

    settings: as they are now. What was found for the model before is no concern of this one's.
    """
    own = with_tuned(sources, settings, folder, model)
    if not (sources.tuned or own.tuned):
        return settings, frozenset()
    before, now = sources.settings(), own.settings()
    changes = {
        name: getattr(now, name)
        for name in (*sources.tuned, *own.tuned)
        if getattr(settings, name) == getattr(before, name)
    }
    return settings.model_copy(update=changes), frozenset(own.tuned)


def usable(tuned: Mapping[str, int | bool | None], given: Iterable[str]) -> dict[str, int | bool | None]:
    """Return the part of it that does not conflict with the settings that were given."""
    named = set(given)
    crossed = frozenset().union(*(group for group in _TOGETHER if group & named))
    return {name: value for name, value in tuned.items() if name in TUNABLE and name not in named | crossed}


def hardware_of(devices: Sequence[DeviceReading]) -> str:
    """ "2 x NVIDIA GeForce RTX 3090", or the processor and its cores where there is no other device."""
    names = [device.name for device in devices if device.kind != "cpu"]
    if not names:
        processor = next((device.name for device in devices), "CPU")
        return f"{processor}, {usable_cores()} cores"
    return " + ".join(f"{count} x {name}" for name, count in sorted(Counter(names).items()))


def settings_of(setting: Setting, knobs: Iterable[KnobName]) -> dict[str, int | bool | None]:
    """A setting as settings of the program, as far as its knobs were turned."""
    names: dict[KnobName, str] = {"workers": "num_workers"}
    found: dict[str, int | bool | None] = {}
    for knob in knobs:
        if knob == "draft_tokens":
            ahead = setting.draft_tokens
            found |= {"ngram_draft": ahead > 0, "draft_tokens": ahead or None}
        else:
            found[names.get(knob, knob)] = setting.value(knob)
    return found
