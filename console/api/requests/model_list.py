"""The models and adapters that requests may name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from engine.engine import Engine
from engine.errors import ModelNotFound
from engine.snapshot import ModelReading, ModelState

ANSWERING: tuple[ModelState, ...] = ("ready", "idle")
"""States in which a model answers; an idle one is loaded first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model, or an adapter of one: its parent is its model, its root the name of its folder.

    max_model_len: tokens of prompt and answer together; None while that is unknown.
    """

    name: str
    root: str
    parent: str | None = None
    max_model_len: int | None
    state: ModelState


def answering_models(engine: Engine) -> list[ModelReading]:
    """Return the models that answer, in the order of their loading."""
    return [model for model in engine.models() if model.status.state in ANSWERING]


def first_name(engine: Engine) -> str | None:
    """Return the name of the model that answers where a request names none, None while there is no such model."""
    status = engine.status
    return status.spec.name if status.spec is not None and status.state in ANSWERING else None


def listed_models(engine: Engine) -> dict[str, ListedModel]:
    """Return models and adapters by name; of two with one name, the one that is ready."""
    listed: dict[str, ListedModel] = {}
    for model in sorted(answering_models(engine), key=lambda model: ANSWERING.index(model.status.state)):
        for each in _with_adapters(model):
            listed.setdefault(each.name, each)
    return listed


def find_listed(engine: Engine, name: str) -> ListedModel:
    """Return a model or adapter; raises ModelNotFound."""
    listed = listed_models(engine)
    if name not in listed:
        raise model_not_found(name, listed)
    return listed[name]


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
    for adapter in model.adapters:
        yield replace(own, name=adapter.name, root=adapter.path.name, parent=model.name)
