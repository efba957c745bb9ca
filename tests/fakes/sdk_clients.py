"""Pytest plugin for an SDK's own tests: the clients that their fixtures ask for.

It stands in for their conftest.py, which needs packages to replay recorded sessions. It is copied to where nothing else
of these tests is importable: `tests` is their package. Variables: SDK is openai or anthropic, TEST_API_BASE_URL the
server.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.utils")

_SDK = importlib.import_module(os.environ["SDK"])
_CLIENT = {"openai": "OpenAI", "anthropic": "Anthropic"}[os.environ["SDK"]]
_OPTIONS: dict[str, Any] = {"base_url": os.environ["TEST_API_BASE_URL"], "api_key": "none", "max_retries": 0}


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client that validates answers strictly or not."""
    strict = getattr(request, "param", True)
    with getattr(_SDK, _CLIENT)(**_OPTIONS, _strict_response_validation=strict) as made:
        yield made


@pytest.fixture(scope="session")
async def async_client(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A client that validates answers strictly or not, or whose transport is aiohttp."""
    wanted = getattr(request, "param", True)
    options: dict[str, Any] = {"_strict_response_validation": wanted is not False}
    if isinstance(wanted, dict):
        assert wanted == {"http_client": "aiohttp"}
        options["http_client"] = _SDK.DefaultAioHttpClient()
    async with getattr(_SDK, f"Async{_CLIENT}")(**_OPTIONS, **options) as made:
        yield made
