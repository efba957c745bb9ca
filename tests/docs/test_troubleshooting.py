"""Troubleshooting: every sentence that the page explains under "It does not start" is one that the program says."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import console.runtime.loading
import engine.worker_process.factory
import ericllm_main
from console.api.server import ApiSettings
from console.cli.main import NO_SCREEN
from console.runtime.loading import choose_model
from console.runtime.output import redirected_stream
from console.settings.sources import load_settings
from engine.errors import EngineError, ModelNotFound
from engine.models.hub_client import explain_hub_error
from engine.models.hub_id import HubId, choose_gguf, gguf_models
from engine.models.resolve import resolve_local
from tests.api.harness import serving

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## It does not start\n")[2].partition("\n## ")[0]
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", SECTION)

Provoke = Callable[[Path, pytest.MonkeyPatch], Awaitable[str]]


def refused(**flags: object) -> str:
    """Why a model with these flags is refused before anything starts."""
    with pytest.raises(EngineError) as error:
        choose_model(load_settings(flags, env={}, file=Path("nowhere.toml")))
    return error.value.message


def folder_of(tmp_path: Path, *, architecture: str, weights: str = "") -> str:
    """A model's folder with everything but what it lacks."""
    demo = resolve_local("demo", ())
    assert demo is not None
    for file in (*demo.glob("*.json"), *demo.glob("*.jinja")):
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    if weights == "safetensors":
        for file in demo.glob("*.safetensors"):
            shutil.copy(file, tmp_path)
    elif weights:
        (tmp_path / weights).write_bytes(b"x")
    return str(tmp_path)


async def no_folder(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(model="/models/x")


async def no_name(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(model="x")


async def no_hub(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    return explain_hub_error(OSError("no network"), "org/name", None, "https://hub").message


async def no_weights(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(model=folder_of(tmp_path, architecture="LlamaForCausalLM"))


async def pickled(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(model=folder_of(tmp_path, architecture="LlamaForCausalLM", weights="pytorch_model.bin"))


async def unknown(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(model=folder_of(tmp_path, architecture="XForCausalLM", weights="safetensors"))


async def no_backend(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(engine.worker_process.factory, "library_lacks", lambda backend: "no NVIDIA GPU was found")
    return refused(model="demo", backend="exllamav2")


async def no_gpu(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(console.runtime.loading, "has_nvidia_gpu", lambda: False)
    return refused(model="demo", gpu_split="16,24")


async def not_served(tmp_path: Path, settings: ApiSettings) -> str:
    with pytest.raises(EngineError) as error:
        async with serving(tmp_path, settings=settings, load=False):
            pass
    return re.sub(r"port \d+", "port 8000", error.value.message)


async def port_taken(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    with socket.create_server(("127.0.0.1", 0)) as other:
        return await not_served(tmp_path, ApiSettings(host="127.0.0.1", port=other.getsockname()[1]))


async def no_key(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    return await not_served(tmp_path, ApiSettings(host="0.0.0.0", port=0))


async def not_ours(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(ericllm_main, "_MARK", b"of another")
    return ericllm_main.foreign_package()


async def no_home(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.delenv("ERICLLM_HOME", raising=False)
    patch.delenv("HOME")
    patch.setattr("pwd.getpwuid", {}.__getitem__)
    return ericllm_main._use_home()


def streams(patch: pytest.MonkeyPatch, *redirected: str) -> None:
    """Standard streams that are terminals but for some."""
    for name in ("stdin", "stdout", "stderr"):
        patch.setattr(sys, f"__{name}__", SimpleNamespace(isatty=lambda name=name: name not in redirected))


async def no_screen(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    streams(patch, "stderr")
    return NO_SCREEN.format(redirected_stream())


async def dumb(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    streams(patch)
    patch.setenv("TERM", "dumb")
    with pytest.raises(EngineError) as error:
        redirected_stream()
    return error.value.message


async def no_quantisation(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    with pytest.raises(ModelNotFound) as caught:
        choose_gguf(gguf_models({"a-Q8_0.gguf": 1, "a-Q6_K.gguf": 1}), HubId(repo_id="org/name"))
    return caught.value.message


PROVOKED: dict[str, Provoke] = {
    "The package 'console' in ...": not_ours,
    "There is no home folder to keep settings and state in": no_home,
    "stderr is not a terminal; running headless": no_screen,
    "This terminal cannot show the console (TERM=dumb)": dumb,
    "there is no folder /models/x": no_folder,
    "no model is called x": no_name,
    "org/name could not be downloaded from the hub ...": no_hub,
    "org/name has no GGUF model of Q4_K_M ...": no_quantisation,
    "the folder holds no weights: it has no *.safetensors file": no_weights,
    "pytorch_model.bin is a pickle, which can run code when read ...": pickled,
    "unsupported architecture: ...": unknown,
    "--backend exllamav2 cannot run here: ...": no_backend,
    "Cannot listen on 127.0.0.1 port 8000: ...": port_taken,
    "Not listening on 0.0.0.0 port 8000 without a key": no_key,
    "--gpu_split spreads workers over GPUs, and none was found": no_gpu,
}


def test_every_sentence_of_the_page_is_provoked_here() -> None:
    assert sorted(QUOTED) == sorted(PROVOKED)


@pytest.mark.parametrize("sentence", PROVOKED)
async def test_the_program_says_so(sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sentence.removesuffix("...").rstrip() in await PROVOKED[sentence](tmp_path, monkeypatch)
