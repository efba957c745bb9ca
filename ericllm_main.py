"""The first steps of the `ericllm` command, in a module whose name is ours alone: others may have a `console` and an
`engine` too, and nothing of them is used before it is known whose they are."""

from __future__ import annotations

import os
import signal
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parent
PACKAGES = ("console", "engine")
_MARK = b'DISTRIBUTION = "ericllm"'
_USAGE_ERROR = 2
_FAILURE = 1


def main() -> int:
    """Run the command; returns its exit code."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are imported there is nothing to clean up
    if problem := foreign_package():
        return _refuse(problem, _FAILURE)
    if problem := _use_home():
        return _refuse(problem, _USAGE_ERROR)
    from console.cli import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def foreign_package() -> str:
    """Whose package stands where one of ours should, as a sentence; "" where both are ours."""
    for name in PACKAGES:
        found = find_spec(name)
        if found is None or not found.submodule_search_locations:
            return f"The package '{name}' of ericllm is missing; reinstall ericllm"
        folder = Path(next(iter(found.submodule_search_locations))).absolute()
        if not _is_ours(folder):
            others = [each for each in owners(name) if each != "ericllm"]
            whose = f"that of the distribution {', '.join(others)}" if others else "not ericllm's"
            return (
                f"The package '{name}' in {folder} is {whose}. Reinstall ericllm, in an environment of its own, "
                "as pipx and uv tool make one"
            )
    return ""


def _is_ours(package: Path) -> bool:
    """Whether a package is the one beside this file, and not overwritten. Nothing of it is run."""
    try:
        return package.parent.samefile(_ROOT) and _MARK in (package / "__init__.py").read_bytes()
    except OSError:
        return False


def owners(package: str) -> list[str]:
    """The installed distributions that have a package of this name. Takes a while."""
    return sorted(set(metadata.packages_distributions().get(package, ())))


def _use_home() -> str:
    """Keep all that is kept under ERICLLM_HOME, where that is set; else what is wrong with there being no home."""
    if named := os.environ.get("ERICLLM_HOME"):
        home = Path(named).absolute()
        for kind in ("config", "data", "state", "cache"):
            os.environ[f"XDG_{kind.upper()}_HOME"] = str(home / kind)
        os.environ.setdefault("HOME", str(home))  # of libraries that look no further
        return ""
    try:
        Path.home()
    except RuntimeError:
        return "There is no home folder to keep settings and state in; name a folder for them in ERICLLM_HOME"
    return ""


def _refuse(sentence: str, status: int) -> int:
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in sentence)  # it quotes others' names
    print(f"ericllm: {shown}", file=sys.stderr)
    return status
