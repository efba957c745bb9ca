"""What the admin endpoints take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from console.api.body import Body
from console.api.operator import LoadOrder
from engine.config import MAX_TIMEOUT_S, CacheBits, WeightsName

DRAIN_S = 30.0
MAX_NAME = 256

Seconds = Annotated[float | None, Field(ge=0, le=MAX_TIMEOUT_S)]
Workers = Annotated[int | None, Field(ge=1, le=64)]
MaxPrompts = Annotated[int | None, Field(ge=1, le=4096)]


class LoadBody(Body):
    """See LoadOrder."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    name: Annotated[str, Field(max_length=MAX_NAME)] = ""
    beside: bool = False
    workers: Workers = None
    max_prompts: MaxPrompts = None
    idle_unload_s: Seconds = None
    max_model_len: Annotated[int | None, Field(ge=1, le=10**9)] = None
    cache_bits: CacheBits | None = None
    weights: WeightsName | None = None
    deterministic: bool | None = None
    gpu_split: Annotated[list[Annotated[float, Field(gt=0)]] | None, Field(max_length=64)] = None

    def order(self) -> LoadOrder:
        """What the operator is told."""
        split = None if self.gpu_split is None else tuple(self.gpu_split)
        return LoadOrder(**{**dict(self), "gpu_split": split})


class UnloadBody(Body):
    """model: the first where empty.  drain_seconds: how long its running requests may go on."""

    model: str = ""
    drain_seconds: Annotated[float, Field(ge=0, le=MAX_TIMEOUT_S)] = DRAIN_S


class ReconfigureBody(Body):
    """model: the first where empty. What is left out is not changed."""

    rules = (
        {
            "anyOf": [
                {"required": [name], "properties": {name: {"type": "number"}}}
                for name in ("workers", "max_prompts", "idle_unload_s")
            ]
        },
    )

    model: str = ""
    workers: Workers = None
    max_prompts: MaxPrompts = None
    idle_unload_s: Seconds = None

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return self.workers is None and self.max_prompts is None and self.idle_unload_s is None


class AdapterBody(Body):
    """name: what requests call it.  path: its folder, or its name as it is found in the models folders."""

    model: str = ""
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    scale: Annotated[float, Field(ge=-100, le=100)] = 1.0
