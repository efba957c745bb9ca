"""LoadOptions: the options of one load of a model, made of the settings that a load goes by.

Form, HTTP, RPC and the file of last loads have these names and types; the bounds are those of the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import msgspec
from pydantic.fields import FieldInfo

from console.settings.schema import Flag, fields
from engine.config import EngineConfig


def load_options() -> Iterator[tuple[str, FieldInfo, Flag]]:
    """Yield the settings that a load may set of its own, in the order of the schema."""
    for name, field, flag in fields():
        if (flag.knob or flag.used == "load") and name != "cache_8bit":  # cache_bits says the same
            yield name, field, flag


def value_type(field: FieldInfo) -> Any:
    """Return the type of a setting's value in JSON: a path is text, and None is left out."""
    annotation = field.annotation
    if get_origin(annotation) is tuple:
        item, *_ = get_args(annotation)
        return tuple[get_args(item)[0] if get_origin(item) is Annotated else item, ...]  # type: ignore[misc]
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] if _is_optional(annotation) else []
    kind = kinds[0] if kinds else annotation
    return str if Path in (kind, *get_args(kind)) else kind


def names_folder(field: FieldInfo) -> bool:
    """Return whether a setting's value is a file or folder of the engine's machine."""
    return "Path" in repr(field.annotation)


def knob_values(config: EngineConfig) -> dict[str, Any]:
    """Return the knobs of an engine by the names of their settings."""
    return {name: getattr(config, flag.engine or name) for name, _, flag in fields() if flag.knob}


def _is_optional(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


class _Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    def given(self) -> dict[str, Any]:
        """Return the values that are set, by their names."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}

    def as_settings(self) -> dict[str, Any]:
        """Return the settings that the load changes: cache bits of its own are not overruled by --cache_8bit."""
        given = self.given()
        return given | {"cache_8bit": False} if "cache_bits" in given else given


if TYPE_CHECKING:

    class LoadOptions(_Options, frozen=True, kw_only=True):
        """Options of one load, by the names of the settings; None leaves one as the program has it."""

        def __init__(self, **values: object) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    LoadOptions = msgspec.defstruct(
        "LoadOptions",
        [(name, Union[value_type(field), None], None) for name, field, _ in load_options()],  # noqa: UP007
        bases=(_Options,),
        module=__name__,
        frozen=True,
        kw_only=True,
        omit_defaults=True,
    )

NO_OPTIONS = LoadOptions()
"""A load that leaves everything as the program has it."""


def options_of(values: Mapping[str, object]) -> LoadOptions:
    """Return the options among values of settings, as plain data."""
    plain = {
        name: str(value) if isinstance(value, Path) else value
        for name, _, _ in load_options()
        if (value := values.get(name)) is not None
    }
    return LoadOptions(**plain)
