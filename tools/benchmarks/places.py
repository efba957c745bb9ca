"""Models, venvs and converted folders that are made once, below one cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tools.benchmarks.engines import OURS, REPAIRED, Row
from tools.synthetic_models import make_synthetic

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("peers")
NOTHING: Mapping[str, str] = MappingProxyType({})
BUILDS = {REPAIRED: {"CMAKE_ARGS": f"-DCMAKE_CXX_FLAGS='-include {REQUIREMENTS / 'amx_repair.h'}'"}}
"""Variables that a venv's packages are built with, where there are any."""


Say = Callable[[str], None]


def _silent(_: str) -> None:
    pass


class NotPrepared(Exception):
    """An engine cannot be installed or its model cannot be made; the last that was said about it."""


@dataclass(frozen=True)
class Places:
    """The cache folder and what lies where in it."""

    cache: Path

    def log(self, shape: str, key: str) -> Path:
        """Where a row's engine says what it says."""
        path = self.cache / "logs" / f"{shape}-{key}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def python(self, row: Row, say: Say = _silent) -> Path:
        """The interpreter that runs a row's engine; its venv is made first if need be. Raises NotPrepared."""
        if row.venv == OURS:
            return Path(sys.executable)
        requirements = REQUIREMENTS / f"{row.packages}.txt"
        build = BUILDS.get(row.venv, {})
        mark = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
        folder = self.cache / "venvs" / f"{row.venv}-{mark}"
        python = folder / "bin" / "python"
        done = folder / "installed"
        if not done.is_file():
            say(f"installing {row.venv} into {folder}")
            venv.create(folder, with_pip=True)
            command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
            command += ["--no-cache-dir"] if build else []  # else pip takes the wheel that it built without them
            self._run([*command, "--requirement", str(requirements)], self.log("install", row.venv), build)
            done.touch()
        return python

    def model(self, shape: str, row: Row, say: Say = _silent) -> Path:
        """The folder that a row's engine loads. Raises NotPrepared."""
        plain = make_synthetic(shape, self.cache / "models" / shape)
        if not row.convert:
            return plain
        folder = self.cache / "converted" / f"{shape}-{row.packages}-{row.convert}"
        if not folder.is_dir():
            say(f"making {folder.name}")
            command = [str(self.python(row)), "-m", f"tools.benchmarks.convert.{row.packages}", "--model", str(plain)]
            self._run([*command, "--to", str(folder), "--weights", row.convert], self.log(shape, f"{row.key}-convert"))
        return folder

    def _run(self, command: Sequence[str], log: Path, more: Mapping[str, str] = NOTHING) -> None:
        with log.open("wb") as output:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment(dict(more)), check=False
            )
        if done.returncode:
            raise NotPrepared(last_words(log))


def environment(more: dict[str, str]) -> dict[str, str]:
    """Return the environment of a runner: this package, no model hub, and no bound on threads but the given one."""
    bounds = ("OMP_", "KMP_", "MKL_", "GOMP_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(bounds)}
    return {**inherited, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}


def last_words(log: Path) -> str:
    """The last line that says what went wrong, else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower()]
    return (wrong or lines or ["it said nothing"])[-1][:300]
