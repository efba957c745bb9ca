"""The wheel installs into a fresh environment and serves from there, away from the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine.backends.common.native_build import ISA_FLAGS
from tests.docs.declared import installed_with
from tests.fakes.kernel_cache import share_kernels

ROOT = Path(__file__).parents[2]
MAKE_WHEEL = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w")
"""What builds it is here already: nothing is fetched."""
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def run(*command: str, cwd: Path) -> str:
    """What a command prints; fails with it where it ends with an error."""
    done = subprocess.run(command, cwd=cwd, env=environ(cwd), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environ(home: Path) -> dict[str, str]:
    """That of a person who has only just installed it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ERICLLM_", "PYTHON"))}
    return kept | {"HOME": str(home), "OMP_NUM_THREADS": "1"}


def ready(server: subprocess.Popen[str]) -> str:
    """Where a server listens, once its model answers; fails with what it said where it ends before."""
    said: list[str] = []
    assert server.stdout is not None
    for line in server.stdout:
        said.append(line)
        if "demo is ready" in line:
            found = re.search(r"http://127\.0\.0\.1:\d+", "".join(said))
            assert found is not None, said
            return found[0]
    pytest.fail("".join(said))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel made of the sdist, and of that of the tests what it requires and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    share_kernels(folder / ".cache")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    run(*MAKE_WHEEL, str(folder), str(sdist), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "-q", "--no-deps", "--no-index", str(wheel), cwd=folder)
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    for name in installed_with(required_by(wheel)):
        lend(distribution(name), site)
    return folder


def required_by(wheel: Path) -> list[Requirement]:
    """Its Requires-Dist, extras left out."""
    with zipfile.ZipFile(wheel) as packed:
        (metadata,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        texts = message_from_bytes(packed.read(metadata)).get_all("Requires-Dist", [])
    required = map(Requirement, texts)
    return [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]


def lend(package: Distribution, site: Path) -> None:
    """Make an installed distribution importable from `site` too."""
    for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(package.locate_file(name))


@pytest.mark.slow
def test_the_environment_has_what_the_wheel_requires_and_no_more(installed: Path) -> None:
    python = str(installed / "venv" / "bin" / "python")
    code = "from importlib.util import find_spec; print([each for each in {!r} if find_spec(each)])"
    looked_for = ("torch", "numpy", "pytest", "transformers")
    assert run(python, "-c", code.format(looked_for), cwd=installed).strip() == "['torch', 'numpy']"


@pytest.mark.slow
def test_the_wheel_serves_the_demo_model_outside_the_checkout(installed: Path) -> None:
    python = installed / "venv" / "bin" / "python"
    where = run(str(python), "-c", "import console, engine; print(console.__file__, engine.__file__)", cwd=installed)
    assert where.count(str(installed)) == 2

    command = [str(python.with_name("ericllm")), "--headless", "--port", "0"]
    with subprocess.Popen(
        command, cwd=installed, env=environ(installed), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            url = ready(server)
            body = json.dumps({"prompt": "What is TTFT?", "max_tokens": 8, "temperature": 0}).encode()
            request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert json.load(answer)["text"]
        finally:
            server.terminate()
            server.communicate(timeout=60)


@pytest.mark.slow
def test_the_wheel_has_what_is_no_python_too(installed: Path) -> None:
    (wheel,) = installed.glob("*.whl")
    names = run(sys.executable, "-m", "zipfile", "-l", str(wheel), cwd=installed)
    for name in ("console/themes/ericllm-dark.toml", "console/bench/plot.css", "engine/demo/model/model.safetensors"):
        assert name in names, name
    assert ".cpp" in names and "LICENSE" in names


@pytest.mark.slow
def test_the_sdist_has_all_that_the_checkout_has(installed: Path) -> None:
    folders = (".ci", "console", "docs", "engine", "tests", "themes", "tools")
    files = {file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()}
    files |= {ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt")}
    (sdist,) = installed.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    wanted = {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}
    assert {name for name in wanted if not name.startswith("tests/gpu/results/")} <= held


@pytest.mark.slow
def test_what_an_index_shows_of_the_wheel_has_no_link_that_leads_nowhere(installed: Path) -> None:
    (wheel,) = installed.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = message_from_bytes(packed.read(metadata))
    assert {"console/py.typed", "engine/py.typed", "ericllm_main.py"} <= set(names)
    assert told["Author"] and told["License-Expression"] == "MIT"
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    text = str(told.get_payload())
    assert text.startswith("# EricLLM Console")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []


@pytest.mark.slow
def test_a_wheel_with_kernels_has_one_library_for_each_instruction_set(tmp_path: Path) -> None:
    """That they compile is shown elsewhere: here something that is no compiler writes what it is told to."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho kernels > "$2"\n')
    compiler.chmod(0o755)
    hook = environ(tmp_path) | {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}
    command = [*MAKE_WHEEL, str(tmp_path), str(ROOT)]
    subprocess.run(command, env=hook | {"PATH": f"{compiler.parent}:{hook['PATH']}"}, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*-py3-none-manylinux_*_x86_64.whl")
    with zipfile.ZipFile(wheel) as packed:
        shipped = [name for name in packed.namelist() if "/shipped/" in name]
    assert sorted(Path(name).name.rpartition("-")[0] for name in shipped) == sorted(ISA_FLAGS)
