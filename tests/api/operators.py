"""An operator for admin requests whose models are fake ones, made on demand in a folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from console.link.local import LocalEngine
from console.link.protocol import EngineLink
from console.runtime.loops import CurrentLoop
from console.settings.load_options import NO_OPTIONS, LoadOptions
from engine.config import AdapterSpec, ModelSpec
from engine.engine import Engine
from engine.errors import ModelNotFound
from engine.models.knobs import Knobs
from tests.fakes.model import fake_spec


def named_spec(folder: Path, name: str, **fields: object) -> ModelSpec:
    """The fake model under another name, in a folder of its own."""
    return msgspec.structs.replace(fake_spec(folder / name, **fields), name=name)


class FolderOperator:
    """Models of admin requests. `names`: the models there are; engine: set by who serves it; orders: loads so far."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.engine: Engine | None = None
        self.orders: list[tuple[str, LoadOptions]] = []
        self.names = names
        self.folder = folder

    async def admit(self, kind: str, value: Any) -> Any:
        """Names alone; of an adapter its folder."""
        if isinstance(value, str) and value.startswith("/"):
            raise ModelNotFound(f"{value} is in none of the models folders")
        return str(self.folder / value) if kind == "adapter" else value

    def link(self) -> EngineLink:
        """The engine as its console has it, which loads one of `names`."""
        assert self.engine is not None
        runtime = cast(Any, SimpleNamespace(engine=self.engine, **_NO_SERVICES))
        link = LocalEngine(runtime, CurrentLoop())
        link.cancel_load = self.engine.cancel_load
        link.models = FolderModels(self, self.engine)  # type: ignore[assignment]
        link.attach = self._attach  # type: ignore[method-assign]
        return link

    async def _attach(self, name: str, path: str, model: str = "", *, scale: float = 1.0) -> None:
        assert self.engine is not None
        await self.engine.attach(AdapterSpec(name=name, path=Path(path), scale=scale), model)


class FolderModels:
    """The part of a ModelsLink that admin requests use."""

    def __init__(self, operator: FolderOperator, engine: Engine) -> None:
        self._operator = operator
        self._engine = engine

    def fetching(self) -> None:
        """Nothing is ever downloaded."""

    async def note_knobs(self, model: str, knobs: Knobs) -> None:
        """Nothing is remembered."""

    async def load(
        self,
        model: str,
        changes: LoadOptions = NO_OPTIONS,
        *,
        beside: bool = False,
        name: str = "",
        rename: bool = True,
    ) -> None:
        """Load one of the operator's names."""
        operator = self._operator
        operator.orders.append((model, changes))
        if model not in operator.names:
            raise ModelNotFound(f"no model is called {model}; available: {', '.join(operator.names)}")
        await self._engine.load(
            named_spec(operator.folder, model, max_model_len=changes.max_model_len),
            beside=beside,
            num_workers=changes.num_workers,
            max_prompts=changes.max_prompts,
            idle_unload_s=changes.idle_unload,
        )


async def _nothing(*_: object, **__: object) -> None:
    """Not asked of it."""


_NO_SERVICES: dict[str, Any] = {
    "api": None,
    "benches": None,
    "live_settings": None,
    "tuning": None,
    "state_dir": None,
    "starting": False,
    "fetching": lambda: None,
    "download_status": lambda: None,
    **dict.fromkeys(
        (
            "api_status",
            "list_models",
            "cancel_load",
            "diagnose",
            "start_api",
            "stop_api",
            "download",
            "load",
            "estimate",
        ),
        _nothing,
    ),
}
