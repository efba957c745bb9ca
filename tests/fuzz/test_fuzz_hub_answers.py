"""Answers of a hub that are changed at random: a download gives the model, or one sentence, and writes in its cache."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadFailed, ModelNotFound
from engine.models.hub_cache import repo_folder
from engine.models.resolve import resolve
from tests.fakes.bounds import outcome
from tests.fakes.hub import FakeHub, FakeRepo, Scripted, serve_hub, use_hub
from tests.fakes.model_folders import write_model
from tests.fakes.mutations import changed, damaged

pytestmark = pytest.mark.long

SEEDS = range(150)
HEADERS = [
    "", "0", "-1", "1e9", "9" * 40, "../../OUTSIDE", "/OUTSIDE", '"' + "a" * 64 + '"', 'W/"' + "b" * 40 + '"',
    "x" * 3000, "bytes 5-9/10", "gzip", "zstd, gzip", "file:///x", "//[", "/org/name/resolve/main/config.json",
    "\x80\xff",
]  # fmt: skip
HEADER_NAMES = [
    "ETag", "X-Linked-Etag", "X-Linked-Size", "Content-Length", "Content-Encoding", "Content-Range", "Location",
    "Transfer-Encoding", "X-Error-Code", "Retry-After", "X-Repo-Commit",
]  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has org/name, and a cache in a folder of its own."""
    folder = write_model(tmp_path / "made", {"w": ("BF16", (10, 10))})
    with serve_hub() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "place" / "cache")
        monkeypatch.setattr("engine.models.hub_download._RETRY_S", 0)
        monkeypatch.setattr("engine.models.hub_download.MAX_WAIT_S", 0)
        hub.repos["org/name"] = FakeRepo({file.name: file.read_bytes() for file in folder.iterdir()})
        yield hub


def script_of(dice: random.Random, repo: FakeRepo) -> Any:
    """Answers like the hub's own, of which some are changed."""

    def answer(method: str, path: str) -> Scripted | None:
        if dice.random() < 0.4:
            return None
        if path.startswith("/api/"):
            files = [{"rfilename": name, "size": len(body)} for name, body in repo.files.items()]
            document: Any = {"sha": repo.commit, "siblings": files}
            headers, status = {}, 200
            body = json.dumps(changed(document, dice, dice.randrange(3))).encode()
        else:
            body = repo.files.get(path.rpartition("/")[2], b"")
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "Content-Length": str(len(body))}
            status = dice.choice([200, 200, 200, 206, 302, 404, 416, 429, 500])
        if dice.random() < 0.3:
            headers[dice.choice(HEADER_NAMES)] = dice.choice(HEADERS)
        if dice.random() < 0.3:
            body = damaged(body, dice, dice.randrange(1, 4))
        return Scripted(status, headers, [body])

    return answer


@pytest.mark.parametrize("seed", SEEDS)
def test_any_answers_give_the_model_or_one_sentence(hub: FakeHub, tmp_path: Path, seed: int) -> None:
    repo = hub.repos["org/name"]
    hub.script = script_of(random.Random(seed), repo)
    found = outcome(lambda: resolve("org/name", []), 0, ModelLoadFailed, ModelNotFound)
    if isinstance(found, Path):
        assert found.is_relative_to(repo_folder("org/name"))
        served = set(repo.files.values())
        assert {file.read_bytes() for file in found.iterdir() if file.suffix == ".safetensors"} <= served
    beside = [path for path in tmp_path.rglob("*") if path.is_file()]
    allowed = (repo_folder("org/name"), tmp_path / "made")
    assert [path for path in beside if not any(map(path.is_relative_to, allowed))] == []
