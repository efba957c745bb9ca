"""Operator: what the admin endpoints ask of whoever holds the settings, the models on disk and the engine."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from engine.config import AdapterSpec, CacheBits, WeightsName
from engine.placement.estimate import Estimate
from engine.snapshot import ModelStatus


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A model to load, by a name as --model takes it. What is None is left as the settings and the operator have it.

    name: what clients are to call it, its own name where empty.  beside: keep the models that are loaded.
    gpu_split: GiB of weights per GPU.
    """

    model: str
    name: str = ""
    beside: bool = False
    workers: int | None = None
    max_prompts: int | None = None
    idle_unload_s: float | None = None
    max_model_len: int | None = None
    cache_bits: CacheBits | None = None
    weights: WeightsName | None = None
    deterministic: bool | None = None
    gpu_split: tuple[float, ...] | None = None


class Operator(Protocol):
    """Carries out orders from outside. They are not trusted with paths: those must lie in the folders that the settings
    name."""

    async def load_model(self, order: LoadOrder) -> None:
        """Find the model, download it where it must be, and load it; returns when it answers. Raises EngineError."""

    async def cancel_load(self) -> None:
        """Stop the download or the load under way, whoever asked for it."""

    def finding(self) -> ModelStatus | None:
        """The download under way, None when there is none."""

    async def estimate(self, order: LoadOrder) -> Estimate:
        """What the load would take of each device now, and whether it fits. Raises EngineError."""

    async def admit(self, kind: Literal["model", "adapter", "setting"], name: str) -> str:
        """The name by which the engine's machine finds what somebody elsewhere names; a folder for an adapter.

        Raises EngineError for a folder that lies elsewhere, and for a setting that names folders.
        """

    async def find_adapter(self, name: str, path: str, scale: float) -> AdapterSpec:
        """The adapter in a folder, or of a name as it is found in the models folders. Raises EngineError."""
