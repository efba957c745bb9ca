"""FakeBackends for processes of their own: what ERICLLM_BACKEND_FACTORY names. Some are noisy, crash or hang."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.backends.base import BackendRequest, LoadedModel, TokenEvent, TokenMask
from engine.config import ModelSpec
from tests.fakes.backend import FakeBackend

RAM_FILE_BYTES = 32 << 20


class NoisyBackend(FakeBackend):
    """Writes to the process's stdout and stderr below Python with every load, as native libraries do."""

    def load(self, spec: ModelSpec, **settings: Any) -> LoadedModel:
        """Load, loudly."""
        os.write(1, b"native out\n")
        os.write(2, b"native \xff err, unfinished")
        return super().load(spec, **settings)


class ForgetfulBackend(FakeBackend):
    """Says the same letter for ever, at the pace of a small model, and keeps no request that has ended."""

    def __init__(self, **options: Any) -> None:
        super().__init__(reply=lambda prompt_ids, index: ord("a"), **options)

    def submit(self, request: BackendRequest, mask: TokenMask | None = None) -> None:
        """Take a request."""
        super().submit(request, mask)
        self.submitted.clear()

    def step(self) -> Sequence[TokenEvent]:
        """A token for everybody, after a while."""
        time.sleep(0.004)
        return super().step()


class CrashingBackend(FakeBackend):
    """Brings its process down with a segmentation fault's signal in its third step."""

    def step(self) -> Sequence[TokenEvent]:
        """Step, or crash."""
        if self.steps == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step()


class StuckBackend(FakeBackend):
    """Says so on stdout and never comes back from its third step, as a hung kernel does not."""

    def step(self) -> Sequence[TokenEvent]:
        """Step, or hang."""
        if self.steps == 2:
            os.write(1, b"stuck\n")
            ctypes.CDLL(None).pause()
        return super().step()


def make(spec: ModelSpec) -> FakeBackend:
    """A plain FakeBackend."""
    return FakeBackend(max_model_len=10**6)


def make_noisy(spec: ModelSpec) -> FakeBackend:
    """Likewise, a NoisyBackend."""
    return NoisyBackend()


def make_crashing(spec: ModelSpec) -> FakeBackend:
    """Likewise, a CrashingBackend."""
    return CrashingBackend()


def make_stuck(spec: ModelSpec) -> FakeBackend:
    """Likewise, a StuckBackend."""
    return StuckBackend()


def make_telling(spec: ModelSpec) -> FakeBackend:
    """A FakeBackend; the thread count that it finds in its environment goes to stdout."""
    os.write(1, b"OMP_NUM_THREADS=%d\n" % int(os.environ["OMP_NUM_THREADS"]))
    return FakeBackend()


def make_with_ram_file(spec: ModelSpec) -> FakeBackend:
    """A FakeBackend whose process has a RAM file of ours open, of which it has touched nothing."""
    os.posix_fallocate(os.memfd_create("ericllm-test"), 0, RAM_FILE_BYTES)
    return FakeBackend()


def make_that_signals_itself(spec: ModelSpec) -> FakeBackend:
    """A FakeBackend; fails where another thread cannot send a signal to this one, as C's library has another id of
    it."""
    with ThreadPoolExecutor(1) as other:
        other.submit(signal.pthread_kill, threading.get_ident(), 0).result()
    return FakeBackend()


def forgetful(spec: ModelSpec) -> FakeBackend:
    """A backend for storms of requests."""
    return ForgetfulBackend(max_model_len=spec.max_model_len or 4096, vocab_size=200_000)
