"""Backends in processes of their own that a test holds up in the midst of their answers, while a file is there.

What ends by itself may have ended before a busy machine lets a test look at it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.backends.base import Backend, TokenEvent
from engine.config import ModelSpec
from tests.fakes.backend import FakeBackend
from tests.fakes.backend_factories import NoisyBackend

HOLD_FILE = "HOLD_FILE"
HOLD_STEPS = "HOLD_STEPS"
STEPS = 12
"""How many more there are once the file is there, unless HOLD_STEPS says otherwise."""
_LOOK_S = 0.005


class _Held:
    """A Backend that makes a few steps while the file that HOLD_FILE names is there, and goes on when it is gone."""

    _made = 0

    def step(self) -> Sequence[TokenEvent]:
        """Step, or do nothing, so that the worker goes on listening."""
        if not Path(os.environ[HOLD_FILE]).exists():
            self._made = 0
        elif self._made == int(os.environ[HOLD_STEPS]):
            time.sleep(_LOOK_S)
            return ()
        else:
            self._made += 1
        events: Sequence[TokenEvent] = super().step()  # type: ignore[misc]
        return events


class _HeldFake(_Held, FakeBackend):
    pass


class _HeldNoisy(_Held, NoisyBackend):
    pass


def make(spec: ModelSpec) -> Backend:
    """What ERICLLM_BACKEND_FACTORY names for a fake model."""
    return _HeldFake(max_model_len=10**6)


def make_noisy(spec: ModelSpec) -> Backend:
    """The same, and loud as it loads."""
    return _HeldNoisy()


def make_torch(spec: ModelSpec) -> Backend:
    """The same for a real model."""
    from engine.backends.torch.backend import TorchBackend

    class HeldTorch(_Held, TorchBackend):
        pass

    return HeldTorch()


class Hold:
    """The test's end: `begin` before it asks, `end` once it has done what it had to do in the midst of the answers."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, factory: str = "make", *, steps: int = STEPS) -> None:
        """From now on workers have the backend that `factory` makes."""
        self._file = folder / "hold"
        patch.setenv(HOLD_STEPS, str(steps))
        patch.setenv(HOLD_FILE, str(self._file))
        patch.setenv("ERICLLM_BACKEND_FACTORY", f"{__name__}:{factory}")

    def begin(self) -> None:
        """Hold workers up after a few more steps."""
        self._file.touch()

    def end(self) -> None:
        """Let them go on."""
        self._file.unlink()
