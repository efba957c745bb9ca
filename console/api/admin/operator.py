"""Operator: what the admin endpoints ask of whoever holds the settings, the models on disk and the engine."""

from __future__ import annotations

from typing import Any, Protocol

from console.link.rpc import Names
from console.settings.load_options import LoadOptions
from engine.config import AdapterSpec
from engine.placement.estimate import Estimate
from engine.snapshot import ModelStatus


class Operator(Protocol):
    """Carries out orders from outside. They are not trusted with paths: those must lie in the folders that the settings
    name."""

    async def load_model(self, model: str, options: LoadOptions, *, name: str = "", beside: bool = False) -> None:
        """Find a model by a name as --model takes it, download it where needed, and load it; returns when it answers.

        name: clients' name of it, its own where empty.  beside: keep the models that are loaded. Raises EngineError.
        """

    async def cancel_load(self) -> None:
        """Stop the download or the load under way, whoever asked for it."""

    def finding(self) -> ModelStatus | None:
        """The download under way, None when there is none."""

    async def estimate(self, model: str, options: LoadOptions, *, beside: bool = False) -> Estimate:
        """What the load would take of each device now, and whether it fits. Raises EngineError."""

    async def admit(self, kind: Names, value: Any) -> Any:
        """Return the name by which the engine's machine finds what a client names, and a folder for an adapter; for
        options of a load, the options with their folders as found here.

        Raises EngineError for a folder that lies elsewhere, and for a setting that names folders.
        """

    async def find_adapter(self, name: str, path: str, scale: float) -> AdapterSpec:
        """The adapter in a folder, or of a name as it is found in the models folders. Raises EngineError."""
