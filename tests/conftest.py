"""Settings for every test."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from engine.system.tasks import reduce_gc_pauses

# No deadlines: machines differ and tests share them. CI draws the same examples each time; here they are new ones.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Without a GPU, Triton's kernels run in its interpreter; it has to be told before its first import.
if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What is printed for a person is printed for one whose environment is active.
os.environ["VIRTUAL_ENV"] = sys.prefix


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A test computes on one thread unless it says otherwise: others run beside it, and sums stay the same."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def _modules_are_no_garbage() -> None:
    """What the tests of a file import or keep is not looked through again by those of the next: each unload of a model
    looks for garbage, which takes seconds where all modules and tests are looked through. Never to be unfrozen."""
    gc.collect()
    gc.freeze()


MAX_ID_LENGTH = 60


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a long parameter by its beginning and its length: the names of tests go to all processes, into logs, and
    into the environment of what tests start."""
    if not isinstance(val, str | bytes) or len(val) <= MAX_ID_LENGTH:
        return None
    start = val[: MAX_ID_LENGTH // 2]
    return f"{start if isinstance(start, str) else start.decode('latin-1')}... of {len(val)}"


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is imported by now stays: to look through it for garbage took a quarter of the screen tests' time."""
    if "torch" in sys.modules:
        _compile_kernels()
    gc.collect()
    reduce_gc_pauses()


def _compile_kernels() -> None:
    """A load waits for the compiler; a test's time limit must not hold for that."""
    from engine.backends.common.native_build import CannotBuild, build_library, cache_folder
    from engine.backends.torch.native.library import native_isa

    with contextlib.suppress(CannotBuild):
        if (isa := native_isa()) is not None:
            build_library(isa, cache_folder())
        if (libraries := sys.modules.get("tests.fakes.native_libraries")) is not None:
            for name in libraries.LIBRARIES:
                libraries.native(name)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch computes with two threads, on however many cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
