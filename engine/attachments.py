"""Attachments: the LoRA adapters of one model, and how far its workers are with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from engine.config import AdapterSpec
from engine.errors import ErrorInfo, from_info
from engine.replica import Replica
from engine.request import Request
from engine.snapshot import AdapterReading


class Holder(Protocol):
    """The workers that adapters are given to, those to come included."""

    def __iter__(self) -> Iterator[Replica]: ...
    def attach(self, adapter: AdapterSpec) -> None: ...
    def detach(self, name: str) -> None: ...


class Attachments:
    """Adapters by name, in order of their coming. One that is retired can be named no more, and is still kept for the
    requests that named it."""

    def __init__(self) -> None:
        self._specs: dict[str, AdapterSpec] = {}
        self._retired: set[str] = set()
        self._workers: Holder | None = None
        self._news = asyncio.Event()

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def specs(self) -> tuple[AdapterSpec, ...]:
        """All that can be named."""
        return tuple(self._specs.values())

    def readings(self, replicas: Sequence[Replica]) -> tuple[AdapterReading, ...]:
        """What is shown of each."""
        return tuple(self._reading(spec, replicas) for spec in self._specs.values())

    def give(self, workers: Holder | None) -> None:
        """The model was loaded on these workers: they get every adapter. None: it was unloaded."""
        self._workers = workers
        if workers is not None:
            for adapter in self._specs.values():
                workers.attach(adapter)

    def inherit(self, old: Attachments) -> None:
        """Take the adapters that another deployment of the same model has."""
        for adapter in old._specs.values():
            if self._specs.get(adapter.name) != adapter:
                self._add(adapter)

    def changed(self) -> None:
        """Something happened to a worker: it may have answered."""
        self._news.set()

    async def attach(self, adapter: AdapterSpec) -> None:
        """Make it usable on every worker; returns when all that are ready have it.

        Raises what the first of them refused it with; nothing is changed then.
        """
        before = self._specs.get(adapter.name)
        self._add(adapter)
        error = await self._answer(adapter.name)
        if error is None:
            return
        if before is not None:
            self._add(before)
        else:
            del self._specs[adapter.name]
            self._forget(adapter.name)
        raise from_info(error)

    def detach(self, name: str, live: Iterable[Request]) -> None:
        """Name it no more; it goes when none of the live requests uses it. Raises KeyError."""
        del self._specs[name]
        self._retired.add(name)
        self.settle(live)

    def settle(self, live: Iterable[Request]) -> None:
        """Let go of what is retired and used by none of the live requests."""
        for name in self._retired.difference(request.adapter for request in live) if self._retired else ():
            self._forget(name)

    def _add(self, adapter: AdapterSpec) -> None:
        self._specs[adapter.name] = adapter
        self._retired.discard(adapter.name)
        if self._workers is not None:
            self._workers.attach(adapter)

    def _forget(self, name: str) -> None:
        self._retired.discard(name)
        if self._workers is not None:
            self._workers.detach(name)

    async def _answer(self, name: str) -> ErrorInfo | None:
        """Wait until every ready worker has answered for an adapter; the first error among the answers."""
        while True:
            workers = [] if self._workers is None else list(self._workers)
            ready = [replica for replica in workers if replica.state in ("ready", "draining")]
            answers = [replica.orders.attached[name] for replica in ready if name in replica.orders.attached]
            error = next((answer.error for answer in answers if answer.error), None)
            if error is not None or len(answers) == len(ready):
                return error
            self._news.clear()
            await self._news.wait()

    @staticmethod
    def _reading(spec: AdapterSpec, replicas: Sequence[Replica]) -> AdapterReading:
        answers = [replica.orders.attached[spec.name] for replica in replicas if spec.name in replica.orders.attached]
        return AdapterReading(
            name=spec.name,
            path=spec.path,
            workers=sum(answer.error is None for answer in answers),
            size_bytes=max((answer.size_bytes for answer in answers), default=0),
            error=next((answer.error for answer in answers if answer.error is not None), None),
        )
