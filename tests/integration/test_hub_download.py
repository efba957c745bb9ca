"""Fetching models from a hub on loopback: what is fetched, progress, stopping, going on, and what can go wrong."""

from __future__ import annotations

import errno
import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.backends.base import LoadProgress
from engine.errors import LoadCancelled, ModelLoadFailed, ModelNotFound, UnsafeWeights, UnsupportedModel
from engine.models.discover import discover
from engine.models.hub_cache import part_file
from engine.models.inspect import inspect
from engine.models.resolve import resolve
from tests.fakes.hub import FakeHub, FakeRepo, serve_hub, use_hub
from tests.fakes.model_folders import write_model

EXTRAS = {
    "README.md": b"# read me",
    "pytorch_model.bin": bytes(5000),
    "consolidated.safetensors": bytes(5000),
    "onnx/model.safetensors": bytes(5000),
    "tokenizer.model": bytes(100),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty hub that HF_ENDPOINT points to, and an empty cache."""
    with serve_hub() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


@pytest.fixture
def model_files(tmp_path: Path) -> dict[str, bytes]:
    """The files of a model that can be loaded, with weights of some chunks."""
    folder = write_model(tmp_path / "made", {"w": ("BF16", (100, 100))})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def repo(hub: FakeHub, model_files: dict[str, bytes]) -> FakeRepo:
    """org/name on the hub: the model, and files that nobody needs."""
    hub.repos["org/name"] = FakeRepo(model_files | EXTRAS)
    return hub.repos["org/name"]


def cancel_when_half_sent(hub: FakeHub) -> Callable[[], bool]:
    """A `cancelled` that turns true while the held file is under way, and lets the hub go on then."""

    def cancelled() -> bool:
        if hub.half_sent.is_set():
            hub.release.set()
            return True
        return False

    return cancelled


def test_a_hub_id_is_fetched_whole_and_nothing_besides(hub: FakeHub, repo: FakeRepo, model_files: dict) -> None:
    folder = resolve("org/name", [])
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == model_files
    assert sorted(hub.fetched()) == sorted(model_files)
    assert hub.fetched()[-1] == "model.safetensors"
    assert inspect(folder).problem == ""


def test_progress_counts_the_bytes_of_all_files(repo: FakeRepo, model_files: dict) -> None:
    reports: list[LoadProgress] = []
    resolve("org/name", [], report=reports.append)
    total = sum(map(len, model_files.values()))
    done = [report.done for report in reports]
    assert reports[0].total == 0  # the hub is being asked
    assert {(report.phase, report.unit, report.total) for report in reports[1:]} == {("download", "bytes", total)}
    assert done == sorted(done)
    assert done[-1] == total


def test_progress_moves_within_a_file(hub: FakeHub, repo: FakeRepo, model_files: dict) -> None:
    hub.hold = "model.safetensors"
    total = sum(map(len, model_files.values()))
    partly: list[int] = []

    def report(progress: LoadProgress) -> None:
        if total - len(model_files["model.safetensors"]) < progress.done < total:
            partly.append(progress.done)
            hub.release.set()

    resolve("org/name", [], report=report)
    assert partly


def test_a_fetched_model_is_found_again_without_the_hub(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve("org/name", [])
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve("org/name", []) == folder
    assert resolve("org/name@main", []) == folder
    assert resolve(f"org/name@{repo.commit}", []) == folder
    assert ("org/name", folder) in [(entry.name, entry.path) for entry in discover([])]
    assert hub.requests == []


def test_a_cancelled_download_stops_within_a_file_and_is_no_model(hub: FakeHub, repo: FakeRepo) -> None:
    hub.hold = "model.safetensors"
    with pytest.raises(LoadCancelled, match="downloading org/name was cancelled"):
        resolve("org/name", [], cancelled=cancel_when_half_sent(hub))
    assert "org/name" not in [entry.name for entry in discover([]) if not entry.problem]


def test_a_download_goes_on_with_the_files_that_are_missing(hub: FakeHub, repo: FakeRepo, model_files: dict) -> None:
    hub.hold = "model.safetensors"
    with pytest.raises(LoadCancelled):
        resolve("org/name", [], cancelled=cancel_when_half_sent(hub))
    hub.requests.clear()
    reports: list[LoadProgress] = []
    folder = resolve("org/name", [], report=reports.append)
    assert hub.fetched() == ["model.safetensors"]
    assert reports[1].done >= sum(map(len, model_files.values())) - len(model_files["model.safetensors"])
    assert inspect(folder).problem == ""


@pytest.fixture
def stopped_half_way(hub: FakeHub, repo: FakeRepo, model_files: dict) -> Path:
    """The part of the weights that a cancelled download of org/name left behind."""
    hub.hold = "model.safetensors"
    small = sum(map(len, model_files.values())) - len(model_files[hub.hold])
    halves: list[int] = []

    def report(progress: LoadProgress) -> None:
        if progress.done > small:
            halves.append(progress.done)

    with pytest.raises(LoadCancelled):
        resolve("org/name", [], report=report, cancelled=lambda: bool(halves))
    hub.release.set()  # who still waits for the hub has been told to stop
    for thread in threading.enumerate():
        if thread.name.startswith("hub "):
            thread.join()
    return part_file("org/name", repo.commit, hub.hold)


def test_a_cancelled_download_does_not_wait_for_a_hub_that_sends_nothing(hub: FakeHub, repo: FakeRepo) -> None:
    hub.hold = "model.safetensors"
    with pytest.raises(LoadCancelled):
        resolve("org/name", [], cancelled=hub.half_sent.is_set)
    assert not hub.release.is_set()


def test_a_download_goes_on_within_a_file_from_where_it_stopped(
    hub: FakeHub, stopped_half_way: Path, model_files: dict
) -> None:
    kept = stopped_half_way.stat().st_size
    assert 0 < kept < len(model_files["model.safetensors"])
    reports: list[LoadProgress] = []
    folder = resolve("org/name", [], report=reports.append)
    assert hub.resumed == [kept]
    assert min(report.done for report in reports[1:]) >= kept
    assert reports[-1].done == reports[-1].total == sum(map(len, model_files.values()))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == model_files
    assert not list(folder.parent.parent.glob("blobs/*.part"))


def test_a_hub_that_sends_files_only_whole_is_taken_at_its_word(
    hub: FakeHub, stopped_half_way: Path, model_files: dict
) -> None:
    hub.ranges = False
    reports: list[LoadProgress] = []
    folder = resolve("org/name", [], report=reports.append)
    assert (folder / "model.safetensors").read_bytes() == model_files["model.safetensors"]
    assert reports[-1].done == reports[-1].total
    assert max(report.done for report in reports) == reports[-1].total


def test_a_part_that_is_too_long_is_fetched_anew(stopped_half_way: Path, model_files: dict) -> None:
    stopped_half_way.write_bytes(bytes(10**6))
    folder = resolve("org/name", [])
    assert (folder / "model.safetensors").read_bytes() == model_files["model.safetensors"]


def test_a_cancelled_download_says_what_is_kept(hub: FakeHub, repo: FakeRepo, model_files: dict) -> None:
    hub.hold = "model.safetensors"
    with pytest.raises(LoadCancelled, match=r"cancelled; 0\.0 of 0\.0 MiB are saved; the next download continues"):
        resolve("org/name", [], cancelled=cancel_when_half_sent(hub))


def test_a_download_that_stopped_is_listed_with_what_is_there(stopped_half_way: Path) -> None:
    entry = next(entry for entry in discover([]) if entry.name == "org/name")
    assert entry.unfinished == "org/name"
    assert entry.kept_bytes > stopped_half_way.stat().st_size
    assert "download stopped" in entry.problem
    resolve(entry.unfinished, [])
    entry = next(entry for entry in discover([]) if entry.name == "org/name")
    assert (entry.unfinished, entry.problem) == ("", "")


def test_a_file_that_somebody_else_fetches_is_left_to_them(stopped_half_way: Path) -> None:
    with stopped_half_way.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelLoadFailed, match=r"model\.safetensors is already being downloaded"):
            resolve("org/name", [])


def test_nothing_is_asked_of_the_hub_once_cancelled(hub: FakeHub, repo: FakeRepo) -> None:
    with pytest.raises(LoadCancelled):
        resolve("org/name", [], cancelled=lambda: True)
    assert hub.requests == []


def test_a_branch_is_brought_up_to_date_when_asked_for(repo: FakeRepo) -> None:
    old = resolve("org/name", [])
    repo.commit, repo.files["chat_template.jinja"] = "d" * 40, b"new"
    assert resolve("org/name", []) == old
    new = resolve("org/name@main", [])
    assert (new / "chat_template.jinja").read_bytes() == b"new"
    assert resolve("org/name", []) == new


def test_a_model_that_the_hub_lacks_is_named(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match=f"the hub at {hub.url} has no model org/name") as caught:
        resolve("org/name", [])
    assert caught.value.details["model"] == "org/name"


def test_a_revision_that_the_hub_lacks_is_named(repo: FakeRepo) -> None:
    with pytest.raises(ModelNotFound, match="org/name has no revision v9"):
        resolve("org/name@v9", [])


def test_a_gated_model_says_how_to_get_it(repo: FakeRepo) -> None:
    repo.gated = True
    with pytest.raises(ModelLoadFailed, match=r"gated: accept its licence .* HF_TOKEN"):
        resolve("org/name", [])


@pytest.mark.parametrize(
    ("removed", "error", "reason"),
    [
        (["model.safetensors", "consolidated.safetensors"], UnsafeWeights, r"only pickles \(pytorch_model\.bin\)"),
        (["config.json"], UnsupportedModel, r"no config\.json"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_it_is_fetched(
    hub: FakeHub, repo: FakeRepo, removed: list[str], error: type[Exception], reason: str
) -> None:
    for name in removed:
        del repo.files[name]
    with pytest.raises(error, match=reason):
        resolve("org/name", [])
    assert hub.fetched() == []


def test_a_disk_too_small_is_told_with_the_numbers(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    with pytest.raises(ModelLoadFailed, match="GiB are free") as caught:
        resolve("org/name", [])
    assert caught.value.details["free_bytes"] == 10
    assert hub.fetched() == []


def test_a_hub_in_trouble_is_told_with_its_answer(hub: FakeHub) -> None:
    hub.status = 500
    with pytest.raises(ModelLoadFailed, match="answered 500 for org/name"):
        resolve("org/name", [])


def test_a_hub_out_of_reach_is_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelLoadFailed, match=r"could not be downloaded from the hub at http://127\.0\.0\.1:1: "):
        resolve("org/name", [])


def test_a_download_leaves_the_screen_alone(
    repo: FakeRepo, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        resolve("org/name", [])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), "the hub cache cannot be written: /cache"),
    ],
)
def test_a_cache_that_cannot_be_written_is_told(
    repo: FakeRepo, monkeypatch: pytest.MonkeyPatch, error: OSError, sentence: str
) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr("engine.models.hub_download.fetch_file", fail)
    with pytest.raises(ModelLoadFailed, match=sentence):
        resolve("org/name", [])
