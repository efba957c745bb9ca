"""What the schema says of each setting: its flag, its group, and whether it is a secret."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from console.setting_flags import Flag, Group
from console.settings import Settings


def fields() -> Sequence[tuple[str, FieldInfo, Flag]]:
    """Every setting with its flag, by its group, in the order of the model."""
    found = [(name, field, flag_of(name)) for name, field in Settings.model_fields.items()]
    return sorted(found, key=lambda each: get_args(Group).index(each[2].group))


def flag_of(name: str) -> Flag:
    """What a setting is besides its type."""
    return next(extra for extra in Settings.model_fields[name].metadata if isinstance(extra, Flag))


SECRETS = frozenset(
    name
    for name, field in Settings.model_fields.items()
    if SecretStr in (field.annotation, *get_args(field.annotation))
)
"""Settings whose values are never shown."""
