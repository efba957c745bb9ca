"""The fake backend at the pace of a model: what ERICLLM_BACKEND_FACTORY names for the workers of the chaos."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.backends.base import TokenEvent
from engine.config import ModelSpec
from tests.fakes.backend import FakeBackend

STEP_S = 0.004


class PacedBackend(FakeBackend):
    """A step takes as long as a small model's."""

    def step(self) -> Sequence[TokenEvent]:
        """A token for everybody, after a while."""
        time.sleep(STEP_S)
        return super().step()


def make(spec: ModelSpec) -> FakeBackend:
    """One of them."""
    return PacedBackend()
