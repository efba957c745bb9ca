"""The commands that are printed for a person work in the environment that the program is in."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from engine.system import install_command
from engine.system.install_command import install_extra, pip_install


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an environment that this interpreter could be of; it is not active."""
    folder = tmp_path / "ericllm"
    folder.mkdir()
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return folder


def test_an_active_environment_takes_pip_as_it_stands(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    assert pip_install("torch==2.11.*") == "pip install 'torch==2.11.*'"


def test_one_that_is_not_active_is_named_by_its_interpreter(environment: Path) -> None:
    assert pip_install("ninja") == f"{sys.executable} -m pip install ninja"


def test_one_of_pipx_is_named_to_pipx(environment: Path) -> None:
    (environment / "pipx_metadata.json").touch()
    assert pip_install("ninja") == "pipx runpip ericllm install ninja"


def test_one_of_pipx_for_all_users_is_named_as_such(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (environment / "pipx_metadata.json").touch()
    monkeypatch.setenv("PIPX_GLOBAL_HOME", str(environment.parent))
    assert pip_install("ninja") == "pipx runpip --global ericllm install ninja"


def test_advice_leaves_setuptools_importable() -> None:
    code = "from engine.system.install_command import pip_install; pip_install('ninja'); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_of_uv_which_has_no_pip_is_named_to_uv(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_command.PathFinder, "find_spec", lambda name: None)
    assert pip_install("ninja") == f"uv pip install --python {environment} ninja"
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))  # of `uv venv`, where `pip` would be that of the system
    assert pip_install("ninja") == f"uv pip install --python {environment} ninja"


def test_an_extra_is_installed_by_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["numpy", "one>=1; extra == 'cuda'", 'two[x]<3 ; extra == "cuda"', "three; extra == 'ray'"]
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    assert install_extra("cuda") == "pip install 'one>=1' 'two[x]<3'"


def test_every_extra_of_ours_is_found() -> None:
    for extra, package in {"cuda": "exllamav2==", "ray": "ray[client]", "otel": "opentelemetry-sdk"}.items():
        assert package in install_extra(extra)
