"""A fake backend in a child process that a test paces through a file: every byte in it allows one step."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from engine.backends.base import TokenEvent
from engine.config import ModelSpec
from tests.fakes.backend import FakeBackend

PACE_FILE = "PACE_FILE"
FACTORY = "tests.fakes.paced:make"
_LOOK_S = 0.005


class FilePacedBackend(FakeBackend):
    """A FakeBackend that steps as often as there are bytes in the file that PACE_FILE names."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._file = Path(os.environ[PACE_FILE])

    def step(self) -> Sequence[TokenEvent]:
        """Step if it is allowed; else do nothing, so that the worker goes on listening."""
        if self._file.stat().st_size <= self.steps:
            time.sleep(_LOOK_S)
            return ()
        return super().step()


def make(spec: ModelSpec) -> FakeBackend:
    """What ERICLLM_BACKEND_FACTORY names."""
    return FilePacedBackend()
