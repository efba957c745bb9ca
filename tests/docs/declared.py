"""What pyproject.toml declares, and what comes with it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def declared(extra: str = "") -> list[Requirement]:
    """The project's dependencies; with `extra`, that extra's instead."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(map(Requirement, project["optional-dependencies"][extra] if extra else project["dependencies"]))


def installed_with(requirements: Iterable[Requirement]) -> set[str]:
    """Names of the distributions that pip brings for these on this machine, as far as they are installed: what each
    requires of others, with the extras that were asked for and no more."""
    found: set[str] = set()
    done: set[str] = set()
    waiting = list(requirements)
    while waiting:
        wanted = waiting.pop()
        if str(wanted) in done or not (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            continue
        done.add(str(wanted))
        try:
            package = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        found.add(canonicalize_name(wanted.name))
        waiting.extend(_required_by(package, wanted))
    return found


def _required_by(package: Distribution, wanted: Requirement) -> Iterator[Requirement]:
    for required in map(Requirement, package.requires or ()):
        if required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
            required.marker = None
            yield required


def imports_of(file: Path) -> set[str]:
    """Top-level packages that a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: Sequence[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "find_spec") and node.args:
            argument = node.args[0]
            names = [argument.value] if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else ()
        found.update(name.partition(".")[0] for name in names)
    return found


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
