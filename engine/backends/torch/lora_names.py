"""Which adapters can be named, and which are still computed with."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

from engine.backends.torch.lora import LoraAdapter
from engine.backends.torch.lora_loading import AdapterLoader
from engine.config import AdapterSpec
from engine.errors import InvalidRequest
from engine.models.adapters import Version, version_of


class AttachedAdapters:
    """The adapters of one model. One stays in memory as long as it has its name or anybody holds it: a request that was
    taken with an adapter ends with it, whatever happens to the name meanwhile."""

    def __init__(self, loader: AdapterLoader) -> None:
        self._loader = loader
        self._named: dict[str, LoraAdapter] = {}
        self._by_key: WeakValueDictionary[str, LoraAdapter] = WeakValueDictionary()
        self._versions: dict[str, list[Version]] = {}

    @property
    def by_key(self) -> Mapping[str, LoraAdapter]:
        """Every adapter in memory."""
        return self._by_key

    def attach(self, spec: AdapterSpec) -> LoraAdapter:
        """Load an adapter and give it its name, in place of another of that name. One that is in memory already is not
        loaded again. Raises InvalidRequest or ModelLoadFailed, with nothing changed."""
        version = version_of(spec)
        versions = self._versions.get(spec.name, [])
        number = versions.index(version) if version in versions else len(versions)
        key = f"{spec.name}\0{number}" if number else spec.name
        adapter = self._by_key.get(key) or self._loader.load(spec, key)
        self._versions[spec.name] = versions if version in versions else [*versions, version]
        self._named[spec.name] = self._by_key[key] = adapter
        return adapter

    def detach(self, name: str) -> None:
        """Take the name away; unknown ones are fine."""
        self._named.pop(name, None)

    def clear(self) -> None:
        """Take every name away."""
        self._named.clear()

    def named(self, name: str) -> LoraAdapter | None:
        """The adapter of that name, None for "". Raises InvalidRequest with the names that there are."""
        if not name:
            return None
        if name not in self._named:
            known = ", ".join(sorted(self._named)) or "none"
            raise InvalidRequest(f"no adapter {name} is attached; attached: {known}", param="adapter", value=name)
        return self._named[name]
