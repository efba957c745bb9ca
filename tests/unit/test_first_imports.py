"""The process that forks workers begins to import before the engine and the API do, and after the first frame."""

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

PATIENCE_S = 60
ROOT = Path(__file__).parents[2]
LATER = ("aiohttp", "engine.engine")
CODE = f"""
import os, sys, threading
from console.runtime import loading
from console.settings.schema import Settings
from console.settings.sources import Sources
from engine.worker_process.fork_server import ForkServer

def importing(cls):
    print("begins after", [name for name in {LATER!r} if name in sys.modules], flush=True)
    os._exit(0)

ForkServer.importing = classmethod(importing)
loading.usable_cores = lambda: 2

class App:
    def __init__(self, link, *, on_shown, **options):
        self.on_shown = on_shown

    def run(self):
        self.on_shown()
        threading.Event().wait({PATIENCE_S})

settings = Settings(model="demo")
choice = loading.choose_model(settings)
from {{module}} import {{run}}
{{run}}(settings, choice, Sources(){{app}})
"""


@pytest.mark.parametrize(
    ("module", "run", "app"),
    [("console.tui.terminal", "run_console", ", App"), ("console.runtime.headless", "run_headless", "")],
)
def test_workers_begin_to_import_before_the_engine_and_the_api(module: str, run: str, app: str) -> None:
    code = CODE.format(module=module, run=run, app=app)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "begins after []\n", result.stderr


@pytest.mark.parametrize(
    ("cores", "cluster", "worker_host", "is_here"),
    [
        (2, "local", "process", True),
        (1, "local", "process", False),
        (2, "ray", "process", False),
        (2, "local", "thread", False),
        (2, "local", "process", None),
    ],
)
async def test_nothing_begins_without_a_core_for_it_or_a_worker_here(
    cores: int, cluster: str, worker_host: str, is_here: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """is_here: None where the model is yet to be downloaded."""
    server = ForkServer()
    monkeypatch.setattr(ForkServer, "importing", lambda: server)
    monkeypatch.setattr(loading, "usable_cores", lambda: cores)
    choice = ModelChoice("a model", None if is_here is None else fake_spec(tmp_path))
    settings = Settings().model_copy(update={"cluster": cluster, "worker_host": worker_host})
    assert await importing_workers(settings, choice) is (server if is_here else None)
