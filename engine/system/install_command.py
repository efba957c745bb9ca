"""The command that installs something into this program's environment, however that was made. Advice, never run."""

from __future__ import annotations

import os
import shlex
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

_PIPX_GLOBAL_HOME = "/opt/pipx"


def pip_install(*arguments: str) -> str:
    """`pip install ARGUMENTS` in this interpreter's environment: one of pipx, of uv, an active one, or any other.

    pip is looked for on the path alone: setuptools' finder takes any other question about pip for a build by pip, and
    can then not be imported any more.
    """
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").is_file():
        is_global = prefix.is_relative_to(os.environ.get("PIPX_GLOBAL_HOME") or _PIPX_GLOBAL_HOME)
        command = ["pipx", "runpip", *(["--global"] if is_global else []), prefix.name, "install"]
    elif PathFinder.find_spec("pip") is None:  # as in those that uv makes
        command = ["uv", "pip", "install", "--python", sys.prefix]
    elif sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix:
        command = ["pip", "install"]
    else:
        command = [sys.executable, "-m", "pip", "install"]
    return shlex.join([*command, *arguments])


def install_extra(extra: str) -> str:
    """The command that brings what an extra of ours has, by its packages: an index may have anything under our name."""
    try:
        required = metadata.requires("ericllm") or []
    except metadata.PackageNotFoundError:
        required = []
    packages = [each.partition(";")[0].strip() for each in required if f"extra == '{extra}'" in each.replace('"', "'")]
    return pip_install(*packages or [f"ericllm[{extra}]"])
