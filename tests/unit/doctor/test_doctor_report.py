"""How the doctor's report is shown: as a table, as JSON, and never without a command."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

import engine.backends
from console.runtime.doctor import as_json, as_text
from engine.backends.exllamav2.doctor import Exllama
from engine.doctor.examine import examine
from engine.doctor.facts import Package, Toolchain, Torch
from tests.fakes.examined import exllama, found
from tests.fakes.machines import CPU_TORCH_ON_A_GPU_MACHINE, H100_TO_COMPILE, TOOLS, TURING, WITHOUT_GPU, changed


def test_the_table_is_aligned_and_breaks_no_command() -> None:
    text = as_text(exllama(changed(H100_TO_COMPILE, toolchain=Toolchain())), width=80)
    lines = text.splitlines()
    values = {line[27] for line in lines if line.startswith("  ") and not line.startswith(" " * 27)}
    assert values and " " not in values
    for finding in exllama(changed(H100_TO_COMPILE, toolchain=Toolchain())).findings:
        for command in finding.advice.split("`")[1::2]:
            assert command in text
    assert all(len(line) <= 80 for line in lines if "`" not in line and "/" not in line and ".whl" not in line)
    assert "\N{NO-BREAK SPACE}" not in text


def test_no_area_stands_in_two_places() -> None:
    areas = [finding.area for finding in exllama(H100_TO_COMPILE).findings]
    starts = [area for before, area in zip(["", *areas], areas, strict=False) if area != before]
    assert len(starts) == len(set(starts))


def test_every_thing_that_is_missing_or_broken_comes_with_a_command_or_stands_on_others_that_do() -> None:
    """`kernels`, `in use` and the backends sum up rows that have their own advice."""
    machines = (
        CPU_TORCH_ON_A_GPU_MACHINE,
        changed(H100_TO_COMPILE, toolchain=Toolchain()),
        changed(TURING, attention={"triton": Package()}, exllama=Exllama()),
        changed(WITHOUT_GPU, driver={"card": True}, torch=Torch()),
        changed(H100_TO_COMPILE, toolchain=msgspec.structs.replace(TOOLS, nvcc_version="11.8")),
    )
    for facts in machines:
        report = exllama(facts)
        bare = {f.name for f in report.findings if f.state in ("missing", "broken") and "`" not in f.advice}
        assert bare <= {"kernels", "in use", "exllamav2"}
        assert "`" in found(report, "exllamav2").advice or found(report, "exllamav2").state == "ok"


def test_the_report_as_json_carries_the_verdict() -> None:
    value = msgspec.json.decode(as_json(exllama(WITHOUT_GPU)))
    assert value["can_run"] is False
    assert value["backend"] == "exllamav2"
    assert value["verdict"].startswith("The exllamav2 backend cannot run here")
    assert {"area", "name", "state", "value", "advice"} == set(value["findings"][0])


def test_the_doctor_of_an_added_backend_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "example").mkdir()
    (tmp_path / "example" / "__init__.py").write_text("")
    (tmp_path / "example" / "doctor.py").write_text(
        "from engine.doctor.report import Finding\n"
        "def findings(facts, *, wanted):\n"
        "    yield Finding('Example', 'example', 'ok', facts.machine)\n"
    )
    monkeypatch.setattr(engine.backends, "__path__", [*engine.backends.__path__, str(tmp_path)])
    assert found(examine(WITHOUT_GPU, "torch"), "example").value == "x86_64"
    for name in ("engine.backends.example.doctor", "engine.backends.example"):
        del sys.modules[name]
