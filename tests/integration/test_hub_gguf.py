"""Fetching single GGUF models from a hub on loopback, and finding them in the cache afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download

from console.runtime.loading import choose_model, find_model
from console.settings.schema import Settings
from engine.backends.base import LoadProgress
from engine.cluster.models import fetch, lacks, path_on_node, place_of, require
from engine.config import ModelSpec
from engine.errors import LoadCancelled, ModelLoadFailed, ModelNotFound
from engine.models.discover import discover
from engine.models.resolve import resolve, resolve_local
from tests.fakes.gguf_headers import WHOLE
from tests.fakes.hub import FakeHub, FakeRepo, serve_hub, use_hub
from tests.fakes.model_folders import write_model

REPO = "org/name-GGUF"
SPLIT = ("BF16/name-BF16-00001-of-00002.gguf", "BF16/name-BF16-00002-of-00002.gguf")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty hub that HF_ENDPOINT points to, and an empty cache."""
    with serve_hub() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def repo(hub: FakeHub) -> FakeRepo:
    """A repository of GGUF files only, with what else publishers put there."""
    files = {
        "README.md": b"# read me",
        "config.json": b"{}",
        "mmproj-F16.gguf": b"no model of text",
        "name-Q4_K_M.gguf": WHOLE,
        "name-Q8_0.gguf": WHOLE + bytes(64),
        "name-UD-Q4_K_XL.gguf": WHOLE + bytes(32),
        SPLIT[0]: WHOLE,
        SPLIT[1]: WHOLE + bytes(96),
    }
    hub.repos[REPO] = FakeRepo(files)
    return hub.repos[REPO]


def go_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the hub is neither asked nor reached."""
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (f"{REPO}:q8_0", ("name-Q8_0.gguf",)),
        (f"{REPO}:UD-Q4_K_XL", ("name-UD-Q4_K_XL.gguf",)),
        (f"hf.co/{REPO}:Q4_K_M", ("name-Q4_K_M.gguf",)),
        (f"{REPO}/name-Q8_0.gguf", ("name-Q8_0.gguf",)),
        (REPO, ("name-Q4_K_M.gguf",)),
        (f"{REPO}:BF16@main", SPLIT),
        (f"{REPO}/{SPLIT[1]}", SPLIT),
    ],
)
def test_one_gguf_model_is_fetched_with_all_its_parts_and_nothing_besides(
    hub: FakeHub, repo: FakeRepo, name: str, files: tuple[str, ...]
) -> None:
    reports: list[LoadProgress] = []
    path = resolve(name, [], report=reports.append)
    snapshot = path.parents[len(Path(files[0]).parts) - 1]
    assert path == snapshot / files[0]
    assert {file: (snapshot / file).read_bytes() for file in files} == {file: repo.files[file] for file in files}
    assert sorted(hub.fetched()) == sorted(files)
    assert reports[-1].done == reports[-1].total == sum(len(repo.files[file]) for file in files)


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        (f"{REPO}:Q8_0", f"{REPO}/name-Q8_0"),
        (f"{REPO}:q8_0", f"{REPO}/name-Q8_0"),
        (f"{REPO}/name-Q8_0.gguf", f"{REPO}/name-Q8_0"),
        (f"{REPO}:BF16", f"{REPO}/BF16/name-BF16"),
        (REPO, f"{REPO}/name-Q4_K_M"),
    ],
)
def test_a_fetched_gguf_model_is_found_again_without_the_hub(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch, name: str, listed: str
) -> None:
    path = resolve(name, [])
    go_offline(hub, monkeypatch)
    assert resolve(name, []) == resolve(f"{name}@main", []) == resolve(listed, []) == path
    assert resolve_local(f"{name}@{repo.commit}", []) == path
    assert [(entry.name, entry.unfinished) for entry in discover([]) if entry.path == path] == [(listed, "")]
    assert hub.requests == []


def test_huggingface_hub_finds_what_was_fetched(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = resolve(f"{REPO}:Q8_0", [])
    assert path.is_symlink() and path.resolve().parent.name == "blobs"
    found = hf_hub_download(REPO, "name-Q8_0.gguf", cache_dir=tmp_path / "cache", local_files_only=True)
    assert Path(found) == path


def test_a_model_of_an_earlier_commit_stays_known(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = resolve(f"{REPO}:Q8_0", [])
    repo.commit = "d" * 40
    new = resolve(f"{REPO}:Q4_K_M", [])
    go_offline(hub, monkeypatch)
    assert old.parent != new.parent
    assert (resolve(f"{REPO}:Q8_0", []), resolve(f"{REPO}:Q4_K_M", [])) == (old, new)
    assert {old, new} <= {entry.path for entry in discover([])}


def test_another_quantisation_of_a_cached_repository_is_fetched(hub: FakeHub, repo: FakeRepo) -> None:
    resolve(f"{REPO}:Q8_0", [])
    hub.requests.clear()
    assert resolve(f"{REPO}:Q4_K_M", []).name == "name-Q4_K_M.gguf"
    assert hub.fetched() == ["name-Q4_K_M.gguf"]


def test_a_folder_in_the_same_repository_is_another_model(hub: FakeHub, repo: FakeRepo, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "made")
    hub.repos["org/both"] = FakeRepo(repo.files | {file.name: file.read_bytes() for file in folder.iterdir()})
    file = resolve("org/both:Q4_K_M", [])
    assert resolve_local("org/both", []) is None
    snapshot = resolve("org/both", [])
    assert snapshot == file.parent and (snapshot / "model.safetensors").is_file()
    assert resolve_local("org/both:Q4_K_M", []) == file
    assert resolve_local("org/both", []) == snapshot


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (f"{REPO}:Q3_K", "has no GGUF model of Q3_K; it has Q4_K_M (0 MiB), UD-Q4_K_XL (0 MiB), Q8_0"),
        (f"{REPO}/none.gguf", "has no GGUF model none.gguf; it has Q4_K_M"),
        ("org/plain:Q8_0", "org/plain has no GGUF model"),
        ("org/none:Q8_0", "has no model org/none, or it is private and HF_TOKEN has no access"),
        (f"{REPO}:Q8_0@v9", "org/name-GGUF has no revision v9"),
    ],
)
def test_what_a_repository_lacks_is_one_sentence_and_nothing_is_fetched(
    hub: FakeHub, repo: FakeRepo, name: str, sentence: str
) -> None:
    hub.repos["org/plain"] = FakeRepo({"config.json": b"{}", "model.safetensors": b""})
    with pytest.raises(ModelNotFound) as caught:
        resolve(name, [])
    assert sentence in caught.value.message
    assert hub.fetched() == []


def test_a_repository_of_several_models_without_q4_k_m_lists_them(hub: FakeHub, repo: FakeRepo) -> None:
    del repo.files["name-Q4_K_M.gguf"]
    with pytest.raises(ModelNotFound, match=r"no GGUF model of Q4_K_M: name another as org/name-GGUF:TAG .*it has UD-"):
        resolve(REPO, [])
    assert hub.fetched() == []


def test_a_gated_gguf_model_says_how_to_get_it(repo: FakeRepo) -> None:
    repo.gated = True
    with pytest.raises(ModelLoadFailed, match=r"org/name-GGUF is gated: accept its licence .* HF_TOKEN"):
        resolve(f"{REPO}:Q8_0", [])


@pytest.mark.parametrize("name", [f"{REPO}:Q8_0", f"{REPO}/name-Q8_0.gguf"])
def test_a_model_that_was_never_fetched_is_said_to_be_missing_offline(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    resolve(f"{REPO}:Q4_K_M", [])
    go_offline(hub, monkeypatch)
    with pytest.raises(ModelNotFound, match=f"^{name} is not in the hub cache .* HF_HUB_OFFLINE is set$"):
        resolve(name, [])
    assert hub.requests == []


def test_a_look_up_by_name_downloads_nothing(hub: FakeHub, repo: FakeRepo) -> None:
    settings = Settings(model=f"{REPO}:Q8_0")
    assert resolve_local(settings.model, []) is None
    assert choose_model(settings).spec is None
    assert hub.requests == []


def test_a_fetched_gguf_model_is_served_under_the_name_that_it_was_asked_for_by(
    hub: FakeHub, repo: FakeRepo, tmp_path: Path
) -> None:
    name = f"{REPO}:Q8_0"
    spec = find_model(Settings(model=name), name, lambda progress: None, lambda: False)
    assert (spec.name, spec.path.name) == (name, "name-Q8_0.gguf")
    choice = choose_model(Settings(model=name))
    assert choice.spec is not None and choice.spec.path == spec.path


def stop_half_way(hub: FakeHub, name: str, held: str) -> None:
    """A download of `name` that is cancelled once half of the file `held` is out."""
    hub.hold = held
    seen: list[int] = []
    size = len(hub.repos[REPO].files[held])
    rest = size - size // 2

    def report(progress: LoadProgress) -> None:
        if progress.total and progress.done >= progress.total - rest:
            seen.append(progress.done)

    with pytest.raises(LoadCancelled, match="the next download continues there"):
        resolve(name, [], report=report, cancelled=lambda: bool(seen))
    hub.release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("hub "):
            thread.join()
    hub.hold = None
    hub.requests.clear()


@pytest.mark.parametrize(
    ("name", "held", "listed", "unfinished"),
    [
        (f"{REPO}:Q8_0", "name-Q8_0.gguf", f"{REPO}/name-Q8_0", f"{REPO}/name-Q8_0.gguf"),
        (f"{REPO}:BF16", SPLIT[1], f"{REPO}/BF16/name-BF16", f"{REPO}/{SPLIT[0]}"),
        (f"{REPO}:BF16", SPLIT[0], f"{REPO}/BF16/name-BF16", f"{REPO}/{SPLIT[0]}"),
    ],
)
def test_a_stopped_download_is_listed_and_loading_it_continues_there(
    hub: FakeHub, repo: FakeRepo, name: str, held: str, listed: str, unfinished: str
) -> None:
    stop_half_way(hub, name, held)
    (entry,) = (entry for entry in discover([]) if entry.name == listed)
    assert entry.unfinished == unfinished
    assert entry.kept_bytes >= len(repo.files[held]) // 2
    assert "its download stopped" in entry.problem
    assert resolve_local(name, []) is None
    with pytest.raises(ModelNotFound, match=f"the download of {listed} is unfinished; loading {unfinished} continues"):
        resolve(listed, [])
    resolve(entry.unfinished, [])
    assert hub.resumed == [len(repo.files[held]) // 2]
    (entry,) = (entry for entry in discover([]) if entry.name == listed)
    assert entry.unfinished == ""


def test_a_node_fetches_the_file_of_the_very_commit(
    hub: FakeHub, repo: FakeRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = place_of(ModelSpec(path=resolve(f"{REPO}:BF16", []), name="m"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "node"))
    (tmp_path / "cache").rename(tmp_path / "away")
    assert lacks(place)
    hub.requests.clear()
    fetch(place, report=lambda progress: None, cancelled=lambda: False)
    assert sorted(hub.fetched()) == list(SPLIT)
    assert not lacks(place)
    assert path_on_node(place).is_relative_to(tmp_path / "node")
    require(place, "box")
