"""On a machine that others use too, no cluster but our own is joined, and nothing of ours lies open to them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.cluster.driver import Ray
from engine.errors import ClusterUnavailable

OTHER = 65534


class FakeRay:
    """What is asked of Ray. found: whether there is a cluster on this machine."""

    def __init__(self, found: bool) -> None:
        self._found = found
        self.joined: list[tuple[str, dict[str, Any]]] = []

    def init(self, address: str, **settings: Any) -> None:
        if address == "auto" and not self._found:
            raise ConnectionError("there is no cluster")
        self.joined.append((address, settings))

    def shutdown(self) -> None:
        self.joined.clear()


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One on which Ray has left nothing; returns the folder in which it would."""
    (tmp_path / "tmp" / "ray").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / "tmp" / "ray"


def join(monkeypatch: pytest.MonkeyPatch, *owners: int) -> tuple[Ray, FakeRay]:
    """Join "auto" where processes of Ray run for these users."""
    running = [SimpleNamespace(info={"name": "raylet", "uids": SimpleNamespace(real=uid)}) for uid in owners]
    monkeypatch.setattr(psutil, "process_iter", lambda attributes: running)
    fake = FakeRay(found=bool(owners) or Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster").exists())
    imports = SimpleNamespace(import_module=lambda name: fake, util=SimpleNamespace(find_spec=lambda name: fake))
    monkeypatch.setattr("engine.cluster.driver.importlib", imports)
    return Ray("auto"), fake


def test_a_cluster_of_ones_own_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fake = join(monkeypatch, os.geteuid())
    assert [address for address, _ in fake.joined] == ["auto"]


def test_a_cluster_of_another_user_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, fake = join(monkeypatch, OTHER)
    assert [address for address, _ in fake.joined] == ["local"]
    ray.leave()


def test_a_file_that_another_user_planted_names_no_cluster_of_ours(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = machine / "ray_current_cluster"
    planted.write_text("203.0.113.1:6379")
    planted.chmod(0o666)
    ray, fake = join(monkeypatch)
    assert [address for address, _ in fake.joined] == ["local"]
    ray.leave()


def test_between_clusters_of_ours_and_of_others_a_person_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterUnavailable, match=r"clusters of other users; set RAY_ADDRESS=HOST:PORT"):
        join(monkeypatch, os.geteuid(), OTHER)


def test_what_ray_writes_of_a_cluster_that_is_started_here_is_in_a_folder_of_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray, fake = join(monkeypatch)
    ((_, settings),) = fake.joined
    folder = Path(settings["_temp_dir"])
    assert folder.parent.stat().st_mode & 0o077 == 0
    assert len(f"{folder}/session_2026-12-31_23-59-59_123456_1234567/sockets/plasma_store") < 100, "no socket's name"
    ray.leave()
    assert not folder.parent.exists()


def test_rays_token_is_taken_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.touch(0o644)
    join(monkeypatch, os.geteuid())
    assert token.stat().st_mode & 0o077 == 0
