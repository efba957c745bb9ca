"""A library: a fake generator, or its own on stubbed kernels. What holds for the one must hold for the other."""

from __future__ import annotations

import pytest

from tests.fakes.exllama import FakeExllama, RealExllama
from tests.fakes.exllama3 import RealExllama3
from tests.integration.exllama_backend.loaded import Make


@pytest.fixture(params=[FakeExllama, RealExllama], ids=["fake", "real"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a library, with the fakes' options."""
    maker: Make = request.param
    return maker


@pytest.fixture(params=[FakeExllama, RealExllama, RealExllama3], ids=["fake", "real", "exllamav3"])
def make_any(request: pytest.FixtureRequest) -> Make:
    """Makes either library, with the options that all of the fakes have."""
    maker: Make = request.param
    return maker
