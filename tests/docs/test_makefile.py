"""The Makefile, as far as nothing has to be fetched for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

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
