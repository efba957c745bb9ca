"""A load that was asked for over HTTP: it goes on when its client leaves, and can be looked at until the next one."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Literal

import msgspec

from console.api.errors import ErrorBody, InternalError, envelope
from console.api.operator import LoadOrder, Operator
from engine.backends.base import LoadProgress
from engine.engine import Engine
from engine.errors import EngineBusy, EngineError, LoadCancelled

log = logging.getLogger("api")

WHERE = "/admin/load"


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a load stands. progress: of the download, or of the slowest worker.  asked_at: unix time.  see: where this
    can be asked for again."""

    model: str
    state: Literal["loading", "ready", "failed", "cancelled"]
    asked_at: float
    progress: LoadProgress | None = None
    error: ErrorBody | None = None
    see: str = WHERE


class Load:
    """One load, from its order to its end."""

    def __init__(self, order: LoadOrder, engine: Engine, operator: Operator) -> None:
        self._order = order
        self._engine = engine
        self._operator = operator
        self._asked_at = time.time()
        self._work = asyncio.get_running_loop().create_task(self._run())

    @property
    def ended(self) -> bool:
        """Whether it is ready or has failed."""
        return self._work.done()

    @property
    def error(self) -> EngineError | None:
        """Why it failed, once it has."""
        return self._work.result() if self._work.done() else None

    async def wait(self, timeout_s: float) -> None:
        """Return when it has ended, after `timeout_s` at the latest."""
        await asyncio.wait((self._work,), timeout=timeout_s)

    def report(self) -> LoadReport:
        """How it stands now."""
        state: Literal["loading", "ready", "failed", "cancelled"] = "loading"
        error = self.error
        if error is not None:
            state = "cancelled" if isinstance(error, LoadCancelled) else "failed"
        elif self.ended:
            state = "ready"
        return LoadReport(
            model=self._order.model,
            state=state,
            asked_at=self._asked_at,
            progress=self._progress() if state == "loading" else None,
            error=None if error is None else envelope(error).error,
        )

    async def _run(self) -> EngineError | None:
        try:
            await self._operator.load_model(self._order)
        except EngineError as error:
            return error
        except Exception:
            log.exception("the load of %s broke", self._order.model)
            return InternalError("The load broke; the server's log says why")
        return None

    def _progress(self) -> LoadProgress | None:
        download = self._operator.finding()
        if download is not None:
            return download.progress
        models = self._engine.published.models
        return next((model.status.progress for model in models if model.status.state == "loading"), None)


class Loads:
    """The loads of one server: one at a time."""

    def __init__(self, engine: Engine, operator: Operator) -> None:
        self._engine = engine
        self._operator = operator
        self.last: Load | None = None

    def begin(self, order: LoadOrder) -> Load:
        """Start a load. Raises EngineBusy while one is under way."""
        if self.last is not None and not self.last.ended:
            raise EngineBusy(f"{self.last.report().model} is being loaded; wait, or cancel that first", state="loading")
        self.last = Load(order, self._engine, self._operator)
        return self.last
