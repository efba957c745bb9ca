"""The types of settings' values: lists as flags have them, folders that must be there, simulated devices.

What is wrong with a value is a ValueError with half a sentence, which `console.settings.sources` puts behind where it
stands.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from engine.errors import InvalidRequest
from engine.models.files import home_expanded, is_file, is_folder


def _split_list(value: object) -> object:
    """'16,24' -> ['16', '24'], '' -> []; anything but text is left to pydantic."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")] if value.strip() else []
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    return value


def _split_paths(value: object) -> object:
    if isinstance(value, str):
        return [part for part in value.split(os.pathsep) if part]
    return value


def whole_number(value: object) -> object:
    """'8' -> 8, as variables have it; anything else is left to pydantic."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _plain_words(value: tuple[str, ...]) -> tuple[str, ...]:
    if any(not word or any(map(str.isspace, word)) for word in value):
        raise ValueError("must be words separated by commas")
    return tuple(word.lower().rstrip("/") for word in value)


def _client_names(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(value) or len(set(value)) < len(value):
        raise ValueError("must be different names, separated by commas")
    return value


def _existing_folder(value: Path) -> Path:
    if not is_folder(home_expanded(value)):
        raise ValueError(f"there is no folder {value}")
    return value


def _existing_model(value: Path) -> Path:
    from engine.models.gguf.file import is_gguf

    return value if is_gguf(value) and is_file(home_expanded(value)) else _existing_folder(value)


def _existing_folders(value: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(_existing_folder(home_expanded(path)) for path in value)


def _adapter(value: Path) -> Path:
    from engine.models.adapters import CONFIG

    if not is_file(home_expanded(value) / CONFIG):
        raise ValueError(f"there is no {CONFIG} in {value}")
    return value


def _check_simulated(value: str) -> str:
    if value:
        from engine.devices.simulated import parse_devices

        try:
            parse_devices(value)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
    return value


def _networks(value: tuple[str, ...]) -> tuple[str, ...]:
    for each in value:
        try:
            ipaddress.ip_network(each)
        except ValueError:
            raise ValueError(f"{each} is not an address or network, such as 10.0.0.0/8") from None
    return value


_SHORT = MappingProxyType({"ms": 1e-3, "s": 1.0, "": 1.0})
"""Of latencies, where 5m would rather be a slip of the hand."""
_LONG = MappingProxyType({**_SHORT, "m": 60.0, "h": 3600.0})


def duration_s(value: object) -> object:
    """ "500ms" and "0.5s" -> 0.5; anything but text is left to pydantic, which takes a number as seconds."""
    return _in_seconds(value, _SHORT, "500ms, 0.5s") if isinstance(value, str) else value


def span_s(text: str) -> float:
    """ "90s" and "90" -> 90, "2m" -> 120, "1.5h" -> 5400: of what may take hours. Raises ValueError."""
    return _in_seconds(text, _LONG, "90s, 10m, 2h")


def _in_seconds(text: str, units: Mapping[str, float], examples: str) -> float:
    parts = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", text)
    if parts is None or parts[2] not in units:
        raise ValueError(f"not a duration; examples: {examples}")
    return float(parts[1]) * units[parts[2]]


def did_you_mean(word: str, words: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """ "; did you mean ...?" where one of the words is like it, else nothing. shown: that word, as it is written.

    The shortest that has all parts of it ("num-workers" for "workers") comes before one that is spelt like it.
    """
    choices, parts = list(words), _parts(word)
    whole = sorted((each for each in choices if parts and parts <= _parts(each)), key=len)
    near = whole or difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean {shown(near[0])}?" if near else ""


def _parts(name: str) -> set[str]:
    """The parts of a name of a setting or flag."""
    return set(re.split("[-_]", name.strip("-_").lower())) - {""}


GigabyteList = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_split_list)]
MegabyteList = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_split_list)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split_list), AfterValidator(_client_names)]
Words = Annotated[tuple[str, ...], BeforeValidator(_split_list), AfterValidator(_plain_words)]
Networks = Annotated[tuple[str, ...], BeforeValidator(_split_list), AfterValidator(_networks)]
Folders = Annotated[tuple[Path, ...], BeforeValidator(_split_paths), AfterValidator(_existing_folders)]
Folder = Annotated[Path, AfterValidator(_existing_folder)]
ModelPath = Annotated[Path, AfterValidator(_existing_model)]
AdapterFolder = Annotated[Folder, AfterValidator(_adapter)]
Duration = Annotated[float, BeforeValidator(duration_s)]
SimulatedDevices = Annotated[str, AfterValidator(_check_simulated)]
