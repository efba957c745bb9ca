"""Standing: where one model stands between loading and gone, and why it does not answer."""

from __future__ import annotations

import logging
import time

from engine.backends.base import LoadedModel
from engine.config import ModelSpec
from engine.errors import ErrorInfo, NoModelLoaded
from engine.snapshot import ModelState, ModelStatus

_RETRY_AFTER_S = 5
_log = logging.getLogger("engine")


class Standing:
    """loading -> ready -> draining -> unloading -> gone, or failed, or idle; each transition is logged.

    status: but for the progress of a load.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.status = ModelStatus(since_s=time.time())
        self._spec = spec

    def go(self, state: ModelState, model: LoadedModel | None = None) -> None:
        """To another state. model: what a load ended with, kept until the memory is given back."""
        kept = self.status.model if state in ("ready", "draining", "unloading") else None
        self.status = ModelStatus(state=state, spec=self._spec, model=model or kept, since_s=time.time())
        _log.info("%s: %s", self._spec.name, state)

    def fail(self, error: ErrorInfo) -> None:
        """To "failed"."""
        self.status = ModelStatus(state="failed", spec=self._spec, error=error, since_s=time.time())
        _log.error("%s: failed: %s", self._spec.name, error.message)

    def refusal(self) -> NoModelLoaded:
        """Why it does not answer."""
        name, error = self._spec.name, self.status.error
        sentence, wait_s = {
            "loading": (f"{name} is still loading", _RETRY_AFTER_S),
            "draining": (f"{name} is being unloaded", _RETRY_AFTER_S),
            "unloading": (f"{name} is being unloaded", _RETRY_AFTER_S),
            "idle": (f"{name} sleeps until it is asked", _RETRY_AFTER_S),
            "failed": (f"{name} has failed: {error.message if error is not None else 'why is not known'}", None),
        }.get(self.status.state, ("no model is loaded", None))
        return NoModelLoaded(sentence, state=self.status.state, retry_after_s=wait_s)
