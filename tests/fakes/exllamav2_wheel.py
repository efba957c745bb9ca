"""The real exllamav2 package, unpacked but not installed: what tests read, and import with its kernels stubbed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

WHEEL = "exllamav2-0.3.2-py3-none-any.whl"
_REQUIREMENT = "exllamav2==0.3.2"
_MARKER = "exllamav2/version.py"


def wheel_folder() -> Path:
    """A folder whose `exllamav2/` is the package (pure Python and CUDA sources), downloaded with pip at
    first use, which `make test` has before it runs them.

    ERICLLM_EXLLAMAV2_WHEEL may name a wheel file that is at hand. Raises RuntimeError where pip fails: no network,
    say. Safe beside other test runs: the folder appears whole or not at all.
    """
    folder = platformdirs.user_cache_path("ericllm") / "tests" / WHEEL.removesuffix("-py3-none-any.whl")
    if (folder / _MARKER).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(_wheel_file(Path(temporary))) as wheel:
            wheel.extractall(unpacked)
        try:
            unpacked.rename(folder)
        except OSError:  # another run was faster, or left something broken behind
            if not (folder / _MARKER).is_file():
                shutil.rmtree(folder)
                unpacked.rename(folder)
    return folder


def _wheel_file(folder: Path) -> Path:
    at_hand = os.environ.get("ERICLLM_EXLLAMAV2_WHEEL")
    if at_hand:
        return Path(at_hand)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not download {_REQUIREMENT}: {done.stderr.strip()}")
    return folder / WHEEL


if __name__ == "__main__":
    wheel_folder()
