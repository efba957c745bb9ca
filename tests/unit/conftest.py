"""Fixtures of several unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.uninterpreted import Compiles, uninterpreted


@pytest.fixture(scope="module")
def compiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiles]:
    """Compiles Triton's kernels in one process for all tests of a file."""
    pytest.importorskip("triton")
    with uninterpreted(tmp_path_factory.mktemp("triton")) as run:
        yield run
