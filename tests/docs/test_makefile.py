"""The Makefile, as far as nothing has to be fetched for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_an_interrupted_make_clean_leaves_no_environment_that_make_run_would_trust(tmp_path: Path) -> None:
    interrupted = tmp_path / "bin" / "rm"
    interrupted.parent.mkdir()
    interrupted.write_text('#!/bin/sh\n[ ! -e "$2" ] || exit 130\n')
    interrupted.chmod(0o755)
    environment = tmp_path / "env"
    environment.mkdir()
    (environment / ".made").touch()

    path = f"{interrupted.parent}:{os.environ['PATH']}"
    subprocess.run(
        ["make", "clean", f"VENV={environment}"], cwd=ROOT, env=os.environ | {"PATH": path}, check=False, timeout=60
    )
    assert not environment.exists()

    subprocess.run(["make", "clean", f"VENV={environment}"], cwd=ROOT, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == [interrupted.parent]


@pytest.mark.parametrize(("has_kernels", "is_there"), [(True, True), (False, True), (False, False)])
def test_where_there_is_no_compiler_make_run_installs_one_or_says_what_to_do(
    tmp_path: Path, has_kernels: bool, is_there: bool
) -> None:
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    programs = {
        "python": f"exit {int(not has_kernels)}",
        "pip": f'echo "$@" >> {tmp_path}/installed\ncase "$*" in *compiler*) exit {int(not is_there)};; esac',
    }
    for name, script in programs.items():
        program = environment / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    for name in (".made", ".torch-any"):
        (environment / name).touch()
    made = subprocess.run(
        ["make", f"VENV={environment}", f"{environment}/.run"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0, made.stderr
    assert (environment / ".run").exists()
    installed = (tmp_path / "installed").read_text().splitlines()
    assert [each.rpartition("--editable ")[2] for each in installed] == [".", *([] if has_kernels else [".[compiler]"])]
    advice = f"install g++, or run `{environment}/bin/pip install ziglang`"
    assert (advice in made.stdout) == (not has_kernels and not is_there)
