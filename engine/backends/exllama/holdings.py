"""What a load allocates, in one place, so that it can be given back whole, and what generators are made over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.backends.exllama.memory import Gpus

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """A model of the library's, loaded or about to be, and its cache."""

    model: Any
    cache: Any = None


@dataclass(slots=True)
class Holdings:
    """The library's objects that own memory. Whoever else refers to them (jobs, results) lets go before `free`.

    models: the main one first.
    """

    gpus: Gpus
    models: list[Held] = field(default_factory=list)
    adapters: list[Any] = field(default_factory=list)
    generator: Any = None

    def close_generator(self) -> None:
        """Drop the generator, and end the threads of its samplers and filters, which would outlive it."""
        generator, self.generator = self.generator, None
        for name in ("sampling_pool", "filter_pool"):
            pool = getattr(generator, name, None)
            if pool is not None:
                pool.shutdown(wait=False)

    def free(self) -> None:
        """Give everything back; idempotent. What fails to unload is logged, and the rest goes all the same."""
        had_any = bool(self.models)
        self.close_generator()
        for adapter in self.adapters:
            _try(adapter.unload)
        self.adapters.clear()
        for held in self.models:
            held.cache = None
            _try(held.model.unload)
        self.models.clear()
        if had_any:
            self.gpus.give_back()


def _try(unload: Callable[[], None]) -> None:
    try:
        unload()
    except Exception:
        _logger.exception("part of the model could not be unloaded")
