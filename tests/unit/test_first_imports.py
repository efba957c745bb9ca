"""The process that forks workers begins to import before the screen, the engine and the API do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from console.runtime import loading
from console.runtime.loading import ModelChoice, importing_workers
from console.settings.schema import Settings
from engine.worker_process.fork_server import ForkServer
from tests.fakes.model import fake_spec

ROOT = Path(__file__).parents[2]
LATER = ("textual", "aiohttp", "engine.engine", "console.api")
CODE = f"""
import os, sys
from console.runtime import loading
from console.settings.schema import Settings
from console.settings.sources import Sources
from engine.worker_process.fork_server import ForkServer

def importing(cls):
    print("begins after", [name for name in {LATER!r} if name in sys.modules], flush=True)
    os._exit(0)

ForkServer.importing = classmethod(importing)
loading.usable_cores = lambda: 2
settings = Settings(model="demo")
choice = loading.choose_model(settings)
from {{module}} import {{run}}
{{run}}(settings, choice, Sources())
"""


@pytest.mark.parametrize(
    ("module", "run"), [("console.tui.terminal", "run_console"), ("console.runtime.headless", "run_headless")]
)
def test_workers_begin_to_import_before_the_screen_the_engine_and_the_api(module: str, run: str) -> None:
    code = CODE.format(module=module, run=run)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "begins after []\n", result.stderr


@pytest.mark.parametrize(
    ("cores", "cluster", "is_here"), [(2, "local", True), (1, "local", False), (2, "ray", False), (2, "local", None)]
)
async def test_nothing_begins_without_a_core_for_it_or_a_worker_here(
    cores: int, cluster: str, is_here: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """is_here: None where the model is yet to be downloaded."""
    server = ForkServer()
    monkeypatch.setattr(ForkServer, "importing", lambda: server)
    monkeypatch.setattr(loading, "usable_cores", lambda: cores)
    choice = ModelChoice("a model", None if is_here is None else fake_spec(tmp_path))
    settings = Settings().model_copy(update={"cluster": cluster})
    assert await importing_workers(settings, choice) is (server if is_here else None)
