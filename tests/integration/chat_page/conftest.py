"""One browser for all tests of the chat page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.browser import browser


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it is told what to do."""
    with browser(tmp_path_factory.mktemp("chrome")) as address:
        yield address
