"""An operator for admin requests whose models are fake ones, made on demand in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from console.settings.load_options import LoadOptions
from engine.config import AdapterSpec, ModelSpec
from engine.engine import Engine
from engine.errors import ModelNotFound
from engine.placement.estimate import Estimate
from engine.snapshot import ModelStatus
from tests.fakes.model import fake_spec


def named_spec(folder: Path, name: str, **fields: object) -> ModelSpec:
    """The fake model under another name, in a folder of its own."""
    return msgspec.structs.replace(fake_spec(folder / name, **fields), name=name)


class FolderOperator:
    """Implements Operator. `names`: the models there are; engine: set by who serves it."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.engine: Engine | None = None
        self.orders: list[tuple[str, LoadOptions]] = []
        self._folder = folder
        self._names = names

    async def load_model(self, model: str, options: LoadOptions, *, name: str = "", beside: bool = False) -> None:
        """Load one of `names`."""
        self.orders.append((model, options))
        if model not in self._names:
            raise ModelNotFound(f"no model is called {model}; there are: {', '.join(self._names)}")
        assert self.engine is not None
        await self.engine.load(
            named_spec(self._folder, model, max_model_len=options.max_model_len),
            beside=beside,
            workers=options.num_workers,
            max_prompts=options.max_prompts,
            idle_unload_s=options.idle_unload,
        )

    async def cancel_load(self) -> None:
        """Cancel the engine's load."""
        assert self.engine is not None
        await self.engine.cancel_load()

    def finding(self) -> ModelStatus | None:
        """Nothing is ever downloaded."""
        return None

    async def estimate(self, model: str, options: LoadOptions, *, beside: bool = False) -> Estimate:
        """Not asked of it."""
        raise NotImplementedError

    async def admit(self, kind: str, value: Any) -> Any:
        """Names alone."""
        if isinstance(value, str) and value.startswith("/"):
            raise ModelNotFound(f"{value} lies in none of the folders that models are taken from")
        return value

    async def find_adapter(self, name: str, path: str, scale: float) -> AdapterSpec:
        """Whatever is asked for."""
        return AdapterSpec(name=name, path=self._folder / path, scale=scale)
