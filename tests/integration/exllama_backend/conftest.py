"""A library: a fake generator, or its own on stubbed kernels. What holds for the one must hold for the other."""

from __future__ import annotations

import pytest

from tests.fakes.exllama import FakeExllama, RealExllama
from tests.integration.exllama_backend.loaded import Make


@pytest.fixture(params=[FakeExllama, RealExllama], ids=["fake", "real"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a library, with the fakes' options."""
    maker: Make = request.param
    return maker
