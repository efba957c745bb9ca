"""Fixtures of the API tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, Gate


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose model answers at once."""
    async with serving(tmp_path) as served:
        yield served


@pytest.fixture
async def paced_api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose backend steps only as often as the test allows."""
    async with serving(tmp_path, FakeBackend(gate=Gate())) as served:
        yield served
