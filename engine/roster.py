"""Roster: the deployments that there are, the first of them, and what a name means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count

from engine.deployment import Deployment
from engine.errors import ModelNotFound, NoModelLoaded
from engine.lane import Lane
from engine.replica import Replica

_MEANT = ("ready", "idle", "loading", "draining", "unloading", "failed")
"""States, the best first, in which a deployment is what its name means."""


class Roster:
    """Deployments in order of their coming. first: the one that requests without a name go to."""

    def __init__(self) -> None:
        self.first: Deployment | None = None
        self._deployments: list[Deployment] = []
        self._numbers = count(1)

    def __iter__(self) -> Iterator[Deployment]:
        return iter(self._deployments)

    def __len__(self) -> int:
        return len(self._deployments)

    def __contains__(self, deployment: object) -> bool:
        return deployment in self._deployments

    def new_key(self, name: str) -> str:
        """A key that no deployment has had."""
        return f"{name}#{next(self._numbers)}"

    def add(self, deployment: Deployment) -> None:
        """One more."""
        self._deployments.append(deployment)
        self.first = self.first or deployment

    def succeed(self, old: Deployment, new: Deployment) -> None:
        """`new` is the first where `old` was."""
        if self.first is old:
            self.first = new

    def remove(self, deployment: Deployment) -> None:
        """One less; one that answers takes the place of the first."""
        if deployment in self._deployments:
            self._deployments.remove(deployment)
        if self.first is deployment:
            self.first = next((each for each in self if each.state in ("ready", "idle")), None)

    # -- who is meant -------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """What clients may name: models, and their adapters."""
        adapters = [adapter.name for deployment in self for adapter in deployment.adapters.specs()]
        return list(dict.fromkeys([*(deployment.spec.name for deployment in self), *adapters]))

    def named(self, name: str) -> tuple[Deployment, str]:
        """The deployment that `name` means ("" is the first), and the adapter where it is one's name.

        Raises NoModelLoaded where there is nothing at all, ModelNotFound with what there is.
        """
        if self.first is None:
            raise NoModelLoaded("no model is loaded", state="unloaded")
        if not name:
            return self.first, ""
        for state in _MEANT:
            for deployment in reversed(self._deployments):
                if deployment.state == state and deployment.spec.name == name:
                    return deployment, ""
        for deployment in reversed(self._deployments):
            if name in deployment.adapters:
                return deployment, name
        available = ", ".join(self.names())
        raise ModelNotFound(
            f"There is no model {name!r} here; available: {available}", param="model", model=name, available=available
        )

    def by_key(self, key: str) -> Deployment | None:
        """The deployment of that key, where it still is."""
        return next((deployment for deployment in self if deployment.key == key), None)

    def of_lane(self, lane: Lane) -> Deployment | None:
        """Whose requests are in this lane."""
        return next((deployment for deployment in self if deployment.lane is lane), None)

    # -- workers ------------------------------------------------------------------------------------------------

    def replicas(self) -> tuple[Replica, ...]:
        """The workers of all models."""
        return tuple(replica for deployment in self for replica in deployment.replicas())

    def pids(self) -> set[int]:
        """The processes that are ours: this one and the workers'."""
        return {os.getpid(), *(replica.pid for replica in self.replicas() if replica.pid is not None)}

    def new_worker_id(self) -> str:
        """An id that no worker has."""
        taken = {replica.id for replica in self.replicas()}
        return next(name for name in (f"w{number}" for number in count()) if name not in taken)
