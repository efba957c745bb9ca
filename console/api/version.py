"""Version of the server."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def product_version() -> str:
    """The version that is installed, "unknown" where none is."""
    try:
        return version("ericllm")
    except PackageNotFoundError:
        return "unknown"
