"""Model families: a module here describes the architectures of one as data, and is found by itself. No torch here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from engine.backends.common.families.base import Architecture


def architectures() -> Mapping[str, Architecture]:
    """Return each `Architecture` that a module of this package holds, by its name in config.json."""
    return _architectures(tuple(__path__))


@lru_cache(maxsize=4)
def _architectures(folders: tuple[str, ...]) -> Mapping[str, Architecture]:
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(folders)]
    values = [value for module in modules for value in vars(module).values() if isinstance(value, Architecture)]
    return MappingProxyType({architecture.name: architecture for architecture in values})
