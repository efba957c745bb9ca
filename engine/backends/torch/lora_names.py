"""Which adapters can be named, and which are still computed with."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

import msgspec

from engine.backends.torch.lora import LoraAdapter
from engine.backends.torch.lora_loading import AdapterLoader
from engine.config import AdapterSpec
from engine.errors import EngineError, InvalidRequest, UnsupportedModel, WorkerFailed
from engine.models.adapters import version_of


class AttachedAdapters:
    """The adapters of one model, by AdapterSpec.key: name and version, or the name alone where no version was given.

    One stays in memory as long as it is attached or anybody holds it: a request that was taken with an adapter ends
    with it, whatever happens to the name meanwhile.
    """

    def __init__(self, loader: AdapterLoader) -> None:
        self._loader = loader
        self._attached: dict[str, LoraAdapter] = {}
        self._by_key: WeakValueDictionary[str, LoraAdapter] = WeakValueDictionary()
        self._refused: dict[str, str] = {}

    @property
    def by_key(self) -> Mapping[str, LoraAdapter]:
        """Every adapter in memory."""
        return self._by_key

    def attach(self, spec: AdapterSpec) -> LoraAdapter:
        """Load an adapter and make it usable under its key, in place of another of that key. One that is in memory
        already is not loaded again. Raises InvalidRequest or ModelLoadFailed, with nothing changed: also where the
        folder holds another version by now."""
        try:
            adapter = self._by_key.get(spec.key) if spec.version else None
            self._attached[spec.key] = adapter = adapter or self._load(spec)
        except EngineError as error:
            self._refused[spec.key] = error.message
            raise
        self._refused.pop(spec.key, None)
        return adapter

    def _load(self, spec: AdapterSpec) -> LoraAdapter:
        self._loader.refuse_misfit(spec)  # by its headers; what comes next reads every byte, and no step runs meanwhile
        found = msgspec.structs.replace(spec, version=version_of(spec))
        if spec.version not in ("", found.version):
            raise UnsupportedModel(f"the files in {spec.path} have changed since the adapter was attached")
        adapter = self._by_key.get(found.key) or self._loader.load(spec, found.key)
        self._by_key[found.key] = adapter
        return adapter

    def detach(self, key: str) -> None:
        """Forget one; unknown ones are fine."""
        self._attached.pop(key, None)
        self._refused.pop(key, None)

    def clear(self) -> None:
        """Forget every one."""
        self._attached.clear()
        self._refused.clear()

    def find(self, key: str) -> LoraAdapter | None:
        """The adapter of that key, None for "". Raises InvalidRequest with the names that there are, or WorkerFailed
        where it could not be attached."""
        if not key or key in self._attached:
            return self._attached.get(key)
        name = key.partition("\0")[0]
        if key in self._refused:
            raise WorkerFailed(f"the adapter {name} could not be attached: {self._refused[key]}")
        known = ", ".join(sorted({each.partition("\0")[0] for each in self._attached})) or "none"
        raise InvalidRequest(f"no adapter {name} is attached; attached: {known}", param="adapter", value=name)
