"""Suites that others publish, run by a pytest of their own against a server, and their misses explained."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

_PATIENCE_S = 240
_CONFIG = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = session
asyncio_default_test_loop_scope = session
filterwarnings = error
markers =
    benchmark
    vcr
"""
Status = Literal["passed", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test ended. module: dotted; name: without the parameters; message: why it was skipped or failed."""

    module: str
    name: str
    parameters: str
    status: Status
    message: str


@dataclass(frozen=True, slots=True)
class Miss:
    """Why tests are missed, in a sentence. message: a pattern of what they are told; tests, parameters: patterns of
    their whole names and parameters."""

    because: str
    message: str
    tests: str
    parameters: str = ".*"

    def covers(self, ended: Outcome) -> bool:
        """True if it is about this test."""
        return bool(re.fullmatch(self.tests, ended.name) and re.fullmatch(self.parameters, ended.parameters))


async def outcomes(
    folder: Path, arguments: Sequence[str], *, rootdir: Path, path: Sequence[Path], variables: Mapping[str, str]
) -> list[Outcome]:
    """Run these tests with pytest. folder: for its files; path: from where they import."""
    (folder / "pytest.ini").write_text(_CONFIG)
    report = folder / "report.xml"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "OPENAI_"))}
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", "-c", str(folder / "pytest.ini"), "--rootdir", str(rootdir)),
        *(
            "--noconftest",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-p",
            "pytest_asyncio.plugin",
            "--junitxml",
            str(report),
        ),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=rootdir,
        env=environment
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": os.pathsep.join(map(str, path)), **variables},
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            printed, _ = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    assert program.returncode in (0, 1), printed.decode()[-8000:]
    return [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    name, _, parameters = case.attrib["name"].partition("[")
    status: Status = "passed"
    message = ""
    for tag, meaning in _STATUSES.items():
        if (found := case.find(tag)) is not None:
            status, message = meaning, found.attrib["message"]
    module = re.sub(r"\.Test\w+$", "", case.attrib["classname"])
    return Outcome(module, name, parameters.removesuffix("]"), status, message)


_STATUSES: Mapping[str, Status] = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def contradictions(ended: Sequence[Outcome], misses: Sequence[Miss]) -> list[str]:
    """What the explanations do not fit: a miss without one or for another reason, a test that is explained and passes,
    and an explanation of none."""
    found: list[str] = []
    unused: list[Miss | None] = [*misses]
    for each in ended:
        miss = next((miss for miss in misses if miss.covers(each)), None)
        test = f"{each.name}[{each.parameters}]"
        if miss in unused:
            unused.remove(miss)
        if miss is None and each.status == "failed":
            found.append(f"{test} is not explained: {each.message}")
        elif miss is not None and each.status != "failed":
            found.append(f"{test} passes, and is explained: {miss.because}")
        elif miss is not None and not re.search(miss.message, each.message):
            found.append(f"{test} misses for another reason: {each.message}")
    return [*found, *(f"explains no test: {miss.because}" for miss in unused if miss is not None)]
