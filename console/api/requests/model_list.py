"""The models and adapters that requests may name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.config import ModelSpec
from engine.engine import Engine, LoadOrder
from engine.errors import ModelNotFound
from engine.snapshot import ModelReading, ModelState, ModelStatus

ANSWERING: tuple[ModelState, ...] = ("ready", "idle")
"""States in which a model answers; an idle one is loaded first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model, an alias of one, whose root is the model, or an adapter: its parent is its model, its root the name of
    its folder.

    max_model_len: tokens of prompt and answer together; None while that is unknown.
    """

    name: str
    root: str
    parent: str | None = None
    max_model_len: int | None
    state: ModelState


class Loadable(Protocol):
    """The models that requests may have loaded."""

    async def find(self, name: str) -> LoadOrder | None:
        """Return how the model of a name is loaded; None where there is none. Raises EngineError where it cannot be."""
        ...

    async def listed(self) -> Sequence[ModelSpec]:
        """Return all of them: their folders and names."""
        ...


class VisibleModels:
    """The models that a client may name. loadable: those that it may have loaded; without them it does not see either
    what others have had loaded, unless it is in memory. only: a name, where it may name the model of that alone."""

    def __init__(self, engine: Engine, loadable: Loadable | None, only: str | None = None) -> None:
        self._engine = engine
        self._loadable = loadable
        self._only = only

    def answering(self) -> list[ModelReading]:
        """Return those that answer, in the order of their loading."""
        return [
            model
            for model in self._engine.models()
            if model.status.state in ANSWERING
            and (self._loadable is not None or model.status.state == "ready" or not model.loaded_by_request)
        ]

    async def readings(self) -> list[ModelReading]:
        """Return all of them: those that are ready, those that sleep, and those that can be loaded."""
        found = sorted(self.answering(), key=lambda model: ANSWERING.index(model.status.state))
        shown, present = {model.name for model in found}, {model.name: model for model in self._engine.models()}
        for spec in () if self._loadable is None else await self._loadable.listed():
            if spec.name not in shown:
                unloaded = ModelReading(key="", name=spec.name, status=ModelStatus(spec=spec))
                found.append(present.get(spec.name, unloaded))
        return [model for model in found if self._only is None or self._only in names_of(model)]

    async def listed(self) -> dict[str, ListedModel]:
        """Return models, their aliases, and adapters by name; of two with one name, the one that is ready."""
        listed: dict[str, ListedModel] = {}
        for model in await self.readings():
            for each in _with_adapters(model):
                listed.setdefault(each.name, each)
        return listed

    async def find(self, name: str) -> ListedModel:
        """Return a model or adapter; raises ModelNotFound."""
        listed = await self.listed()
        if name not in listed:
            raise model_not_found(name, listed)
        return listed[name]


def names_of(model: ModelReading) -> list[str]:
    """Return the names of a model: its own, its aliases and its adapters."""
    aliases = () if model.status.spec is None else model.status.spec.aliases
    return [model.name, *aliases, *(adapter.name for adapter in model.adapters)]


def first_name(engine: Engine) -> str | None:
    """Return the name of the model that answers where a request names none, None while there is no such model."""
    status = engine.status
    return status.spec.name if status.spec is not None and status.state in ANSWERING else None


def model_not_found(name: str, names: Iterable[str]) -> ModelNotFound:
    """Return the error about a name that is none of `names`."""
    available = ", ".join(names)
    return ModelNotFound(
        f"There is no model {name!r}; available: {available or 'none'}",
        param="model",
        model=name,
        available=available,
    )


def _with_adapters(model: ModelReading) -> Iterator[ListedModel]:
    loaded, spec = model.status.model, model.status.spec
    limit = loaded.max_model_len if loaded is not None else spec.max_model_len if spec is not None else None
    own = ListedModel(name=model.name, root=model.name, max_model_len=limit, state=model.status.state)
    yield own
    for alias in () if spec is None else spec.aliases:
        yield replace(own, name=alias)
    for adapter in model.adapters:
        yield replace(own, name=adapter.name, root=adapter.path.name, parent=model.name)
