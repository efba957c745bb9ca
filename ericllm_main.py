"""The first steps of the `ericllm` command, in a module whose name is ours alone: others may have a `console` and an
`engine` too, and nothing of them is used before it is known whose they are."""

from __future__ import annotations

import os
import signal
import sys

# All else is imported once `main` has seen to it that a stop ends no import in a traceback.

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
    try:
        from console.cli.main import main as run

        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in PACKAGES:
            raise
        return _refuse(f"The package '{missing}', which ericllm needs, is missing; reinstall ericllm", _FAILURE)


def foreign_package() -> str:
    """Whose package stands where one of ours should, as a sentence; "" where both are ours."""
    from importlib.util import find_spec
    from pathlib import Path

    for name in PACKAGES:
        found = find_spec(name)
        if found is None:
            return f"The package '{name}' of ericllm is missing; reinstall ericllm"
        place = Path(next(iter(found.submodule_search_locations or ()), found.origin or "")).absolute()
        if place.parent.resolve() != Path(__file__).parent.resolve():
            return (
                f"The package '{name}' in {place} is found before ericllm's. Take {place.parent} off the module path: "
                "that is PYTHONPATH, or the current folder"
            )
        try:
            is_ours = _MARK in (place / "__init__.py").read_bytes()
        except OSError:
            is_ours = False
        if not is_ours:
            others = [each for each in owners(name) if each != "ericllm"]
            whose = f"that of the distribution {', '.join(others)}" if others else "not ericllm's"
            return (
                f"The package '{name}' in {place} is {whose}. Reinstall ericllm, in an environment of its own, "
                "as pipx and uv tool make one"
            )
    return ""


def owners(package: str) -> list[str]:
    """The installed distributions that have a package of this name. Takes a while."""
    from importlib import metadata

    return sorted(set(metadata.packages_distributions().get(package, ())))


def _use_home() -> str:
    """Keep all that is kept under ERICLLM_HOME, where that is set; else what is wrong with there being no home."""
    from pathlib import Path

    if named := os.environ.get("ERICLLM_HOME"):
        try:
            home = Path(named).expanduser().absolute()
        except (RuntimeError, OSError):  # nobody has that ~, or the current folder was removed
            return f"ERICLLM_HOME={named} leads nowhere from here; name a folder by its whole path"
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
