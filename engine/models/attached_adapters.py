"""ModelAdapters: the LoRA adapters of one model, and how far its workers are with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from engine.config import AdapterSpec
from engine.errors import ErrorInfo, from_info
from engine.models.adapters import version_of
from engine.requests.request import Request
from engine.snapshot import AdapterReading
from engine.workers.replica import Replica


class AdapterHost(Protocol):
    """The workers that adapters are given to, those to come included."""

    def __iter__(self) -> Iterator[Replica]: ...
    def attach(self, adapter: AdapterSpec) -> None: ...
    def detach(self, key: str) -> None: ...


class ModelAdapters:
    """Adapters by name, in order of their coming; a name means one version of its adapter at a time.

    Workers have every version that has its name, is on its way to it, or is used by a live request, which ends with the
    one that it began with.
    """

    def __init__(self) -> None:
        self._specs: dict[str, AdapterSpec] = {}
        self._given: dict[str, AdapterSpec] = {}
        self._coming: list[AdapterSpec] = []
        self._workers: AdapterHost | None = None
        self._news = asyncio.Event()

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def key(self, name: str) -> str:
        """The key of the version that a name means now, "" for "". Raises KeyError."""
        return self._specs[name].key if name else ""

    def specs(self) -> tuple[AdapterSpec, ...]:
        """All that can be named."""
        return tuple(self._specs.values())

    def readings(self, replicas: Sequence[Replica]) -> tuple[AdapterReading, ...]:
        """Return a reading of each."""
        return tuple(self._reading(spec, replicas) for spec in self._specs.values())

    def set_workers(self, workers: AdapterHost | None) -> None:
        """The model was loaded on these workers: they get every adapter. None: it was unloaded."""
        self._workers = workers
        if workers is not None:
            for adapter in self._given.values():
                workers.attach(adapter)

    def inherit(self, old: ModelAdapters) -> None:
        """Take the adapters that another deployment of the same model has."""
        for key in old._given:
            self.keep(key, old)
        self._specs |= old._specs

    def keep(self, key: str, old: ModelAdapters) -> None:
        """Have a version that another deployment has, for a request that comes from there."""
        if key not in self._given:
            self._give(old._given[key])

    def adopt(self, adapter: AdapterSpec) -> None:
        """Have the name of an adapter mean this version, which another deployment of the same model took."""
        self._give(adapter)
        self._specs[adapter.name] = adapter

    def wake(self) -> None:
        """Something happened to a worker: it may have answered."""
        self._news.set()

    async def attach(self, adapter: AdapterSpec, live: Iterable[Request]) -> AdapterSpec:
        """Make it usable on every worker, and its name mean it; returns it with its version when all that are ready
        have it. One that it takes the place of is kept for the live requests that use it.

        Raises what the first of them refused it with; nothing is changed then.
        """
        adapter = msgspec.structs.replace(adapter, version=await asyncio.to_thread(version_of, adapter))
        self._coming.append(adapter)
        try:
            self._give(adapter)
            if (error := await self._answer(adapter.key)) is not None:
                raise from_info(error)
            self._specs[adapter.name] = adapter
            return adapter
        finally:
            self._coming.remove(adapter)
            self.settle(live)

    def detach(self, name: str, live: Iterable[Request]) -> None:
        """Name it no more; it goes when none of the live requests uses it. Raises KeyError."""
        del self._specs[name]
        self.settle(live)

    def settle(self, live: Iterable[Request]) -> None:
        """Let go of what has no name and is used by none of the live requests."""
        if len(self._given) == len(self._specs):
            return
        wanted = {adapter.key for adapter in (*self._specs.values(), *self._coming)}
        for key in self._given.keys() - wanted - {request.adapter_key for request in live}:
            del self._given[key]
            if self._workers is not None:
                self._workers.detach(key)

    def _give(self, adapter: AdapterSpec) -> None:
        self._given[adapter.key] = adapter
        if self._workers is not None:
            self._workers.attach(adapter)

    async def _answer(self, key: str) -> ErrorInfo | None:
        """Wait until every ready worker has answered for an adapter; the first error among the answers."""
        while True:
            workers = [] if self._workers is None else list(self._workers)
            ready = [replica for replica in workers if replica.state in ("ready", "draining")]
            answers = [replica.desired.attached[key] for replica in ready if key in replica.desired.attached]
            error = next((answer.error for answer in answers if answer.error), None)
            if error is not None or len(answers) == len(ready):
                return error
            self._news.clear()
            await self._news.wait()

    @staticmethod
    def _reading(spec: AdapterSpec, replicas: Sequence[Replica]) -> AdapterReading:
        answers = [replica.desired.attached[spec.key] for replica in replicas if spec.key in replica.desired.attached]
        return AdapterReading(
            name=spec.name,
            path=spec.path,
            workers=sum(answer.error is None for answer in answers),
            size_bytes=max((answer.size_bytes for answer in answers), default=0),
            error=next((answer.error for answer in answers if answer.error is not None), None),
        )
