"""The settings that each model was last loaded with, in a file of the state folder."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec

from console.settings.load_options import NO_OPTIONS, LoadOptions
from engine.models.hub_cache import place_in_cache
from engine.system.files import replace_file

MAX_MODELS = 500
_FILE = "model-settings.json"
_log = logging.getLogger("console")


class LastSettings:
    """Settings by model. folder: where they are kept; None keeps them in memory. Blocking; from any thread.

    The file is read for every call, so that several consoles may share it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / _FILE if folder is not None else None
        self._memory: dict[str, LoadOptions] = {}
        self._lock = threading.Lock()

    def of(self, model: str) -> LoadOptions:
        """Return the settings that a model was last loaded with; nothing where it never was."""
        with self._lock:
            return self._read().get(model, NO_OPTIONS)

    def note(self, model: str, settings: LoadOptions) -> None:
        """Remember them; those of models that were noted longest ago are forgotten when there are too many."""
        with self._lock:
            saved = {name: value for name, value in self._read().items() if name != model}
            self._write(dict([*saved.items(), (model, settings)][-MAX_MODELS:]))

    def forget(self, model: str) -> None:
        """Remember nothing of a model any more."""
        with self._lock:
            saved = self._read()
            if saved.pop(model, None) is not None:
                self._write(saved)

    def _read(self) -> dict[str, LoadOptions]:
        if self._file is None:
            return dict(self._memory)
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, LoadOptions])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s cannot be read and starts empty: %s", self._file, error)
            return {}

    def _write(self, settings: dict[str, LoadOptions]) -> None:
        """Write the file; a failure is only logged, and the next form starts without it."""
        self._memory = settings
        if self._file is None:
            return
        try:
            replace_file(self._file, msgspec.json.encode(settings))
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._file, error)


def model_key(name: str, path: Path | None) -> str:
    """By what a model is remembered: its hub id where it came from there, whatever its commit, and its file in there
    where it is one of several, else its path.

    path: its folder or file, None where it is not on this machine: then its name without a revision.
    """
    if path is None:
        return name.partition("@")[0]
    place = place_in_cache(path)
    return str(path.absolute()) if place is None else str(Path(place[0]) / place[2])
