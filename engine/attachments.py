"""Attachments: the LoRA adapters of one model, and how far its workers are with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.config import AdapterSpec
from engine.errors import ErrorInfo
from engine.replica import Replica
from engine.snapshot import AdapterReading


class Attachments:
    """Adapters by name, in order of their coming. One that is retired can be named no more, and is still kept for the
    requests that named it."""

    def __init__(self) -> None:
        self._specs: dict[str, AdapterSpec] = {}
        self._retired: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def get(self, name: str) -> AdapterSpec | None:
        """The adapter of that name."""
        return self._specs.get(name)

    def add(self, adapter: AdapterSpec) -> None:
        """One more, or the same name with other weights."""
        self._specs[adapter.name] = adapter
        self._retired.discard(adapter.name)

    def retire(self, name: str) -> None:
        """Name it no more; unknown names are fine."""
        if self._specs.pop(name, None) is not None:
            self._retired.add(name)

    def unused(self, used: Iterable[str]) -> list[str]:
        """Those retired that no request uses any more. used: names that live requests use."""
        return sorted(self._retired.difference(used)) if self._retired else []

    def forget(self, name: str) -> None:
        """It is kept for nobody any more."""
        self._retired.discard(name)

    def specs(self) -> tuple[AdapterSpec, ...]:
        """All of them."""
        return tuple(self._specs.values())

    def readings(self, replicas: Sequence[Replica]) -> tuple[AdapterReading, ...]:
        """What is shown of each."""
        return tuple(self._reading(spec, replicas) for spec in self._specs.values())

    @staticmethod
    def settled(name: str, replicas: Sequence[Replica]) -> tuple[bool, ErrorInfo | None]:
        """Whether every worker that is ready has answered for this adapter, and the first error among the answers."""
        ready = [replica for replica in replicas if replica.state in ("ready", "draining")]
        answers = [replica.attached[name] for replica in ready if name in replica.attached]
        return len(answers) == len(ready), next((answer.error for answer in answers if answer.error), None)

    @staticmethod
    def _reading(spec: AdapterSpec, replicas: Sequence[Replica]) -> AdapterReading:
        answers = [replica.attached[spec.name] for replica in replicas if spec.name in replica.attached]
        return AdapterReading(
            name=spec.name,
            path=spec.path,
            workers=sum(answer.error is None for answer in answers),
            size_bytes=max((answer.size_bytes for answer in answers), default=0),
            error=next((answer.error for answer in answers if answer.error is not None), None),
        )
