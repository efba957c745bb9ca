"""A model folder that somebody else made is one row with its reason, at little cost; nothing outside of it is read."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from engine.config import BackendKind, ModelSpec
from engine.errors import EngineError, ModelLoadFailed, UnsupportedModel
from engine.models import discover as discovering
from engine.models import inspect as inspecting
from engine.models.discover import discover
from engine.models.files import MAX_FILES, MAX_JSON_BYTES, is_file, open_file, read_file, read_json_object
from engine.models.headers import MAX_TENSORS, read_header, read_headers
from engine.models.inspect import inspect
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import Workload, costs_of
from engine.text.tokenizer_config import TokenizerFolder
from tests.fakes.bounds import outcome, within_bounds
from tests.fakes.hostile_folders import FOLDERS, HEADERS, Spoil, bytes_of, many
from tests.fakes.model_folders import write_model

pytestmark = pytest.mark.long

SECRET = "sk-of-the-operator"


@pytest.mark.parametrize(("spoil", "problem"), FOLDERS.values(), ids=FOLDERS)
def test_a_hostile_folder_is_one_row_with_its_reason_at_little_cost(
    tmp_path: Path, spoil: Spoil, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    folder = write_model(tmp_path / "models" / "hostile")
    write_model(tmp_path / "models" / "mild")
    spoil(folder)
    with within_bounds(bytes_of(folder)):
        entry = inspect(folder)
    assert problem in entry.problem
    assert entry.problem.isprintable()
    assert len(entry.problem) < 1000
    rows = {row.name: row for row in discover([tmp_path / "models"])}
    assert rows["hostile"].problem == entry.problem
    assert rows["mild"].problem == ""


@pytest.mark.parametrize(("spoil", "problem"), FOLDERS.values(), ids=FOLDERS)
def test_what_a_hostile_folder_would_take_is_a_sentence_at_little_cost(
    tmp_path: Path, spoil: Spoil, problem: str
) -> None:
    folder = write_model(tmp_path / "hostile")
    spoil(folder)
    spec = ModelSpec(path=folder, name="hostile", weights="int8")

    def plan() -> str:
        return costs_of(read_facts(spec), spec, "cpu", Workload(), bfloat16=True).name

    assert outcome(plan, bytes_of(folder), EngineError)


def test_weights_and_adapters_behind_links_to_nothing_are_a_sentence(tmp_path: Path) -> None:
    folder, adapter = write_model(tmp_path / "model"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "more.safetensors").symlink_to("nothing")
    spec = ModelSpec(path=folder, name="model", lora=adapter)
    assert read_facts(spec).adapter_bytes == 0
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nothing")
    with pytest.raises(UnsupportedModel, match=f"{folder} cannot be read: No such file"):
        read_facts(spec)


@pytest.mark.parametrize(("content", "problem"), HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_is_refused_in_one_sentence(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert problem in outcome(lambda: str(read_header(file)), len(content), ModelLoadFailed)


def test_as_many_tensors_as_a_model_may_have_are_read_within_bounds(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").write_bytes(many(MAX_TENSORS // 2))
    (folder / "model-2.safetensors").write_bytes(many(MAX_TENSORS // 2).replace(b"model", b"other"))
    with within_bounds(bytes_of(folder)):
        assert len(read_headers([folder / "model.safetensors", folder / "model-2.safetensors"])) == MAX_TENSORS
    with within_bounds(bytes_of(folder)):
        assert inspect(folder).problem.startswith("the weights are no floats")
    with within_bounds(bytes_of(folder)):
        assert len(read_facts(ModelSpec(path=folder, name="m")).parts.layers) == 2


@pytest.mark.parametrize("backend", ["torch", "exllamav2"])
def test_a_folder_at_every_limit_at_once_is_read_within_bounds(tmp_path: Path, backend: BackendKind) -> None:
    folder = write_model(tmp_path, junk=[f"{i:05x}" for i in range(90_000)])
    objects = b",".join([b'{"a":1}'] * 33_000)
    for name in ("generation_config.json", "chat_template.json"):
        (folder / name).write_bytes(b'{"junk":[' + objects + b"]}")
    templates = b",".join(b'{"name":"%d","template":"x"}' % i for i in range(16_000))
    (folder / "tokenizer_config.json").write_bytes(
        b'{"junk":[' + b"[]," * 2 * 2**20 + b'1],"chat_template":[' + templates + b"]}"
    )
    (folder / "model.safetensors").write_bytes(many(MAX_TENSORS // 2))
    (folder / "other.safetensors").write_bytes(many(MAX_TENSORS // 2).replace(b"model", b"other"))
    files = {f"{i:06}": ("model", "other")[i % 2] + ".safetensors" for i in range(MAX_TENSORS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with within_bounds(bytes_of(folder)):
        found = inspect(folder, lambda quantisation, path: backend)
    assert (found.chat_template, found.context_tokens) == ("own", 2048)


def test_layers_and_experts_without_weights_are_counted_and_not_gone_through(tmp_path: Path) -> None:
    mixture: Any = {"num_experts": 10_000, "num_experts_per_tok": 2, "moe_intermediate_size": 2**10}
    folder = write_model(tmp_path, architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=10_000, **mixture)
    (folder / "model.safetensors").unlink()
    spec = ModelSpec(path=folder, name="m", weights="int8")
    with within_bounds():
        found = costs_of(read_facts(spec), spec, "cpu", Workload(), bfloat16=True)
    assert len(found.layer_bytes) == 10_000
    assert min(found.layer_bytes) > 10_000 * 3 * 64 * 2**10


def test_a_model_that_no_machine_could_hold_is_refused_by_what_is_too_much(tmp_path: Path) -> None:
    folder = write_model(tmp_path, num_hidden_layers=10_000, hidden_size=2**24, intermediate_size=2**24)
    (folder / "model.safetensors").unlink()
    with within_bounds(), pytest.raises(UnsupportedModel, match=r"whose weights are \d\.\de\+\d+ numbers"):
        read_facts(ModelSpec(path=folder, name="m"))
    write_model(tmp_path, num_key_value_heads=2**22, num_attention_heads=2**22, head_dim=2**22)
    with within_bounds(), pytest.raises(UnsupportedModel, match="keys and values of a context are"):
        read_facts(ModelSpec(path=folder, name="m"))


def test_a_layer_number_of_thousands_of_digits_comes_after_the_layers(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path, {f"model.layers.{'9' * 5000}.w.weight": ("F16", (3,)), "lm_head.weight": ("F16", (2,))}
    )
    with within_bounds():
        parts = read_facts(ModelSpec(path=folder, name="m")).parts
    assert (parts.norm.elements, parts.head.elements) == (3, 2)


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("too deep"), ValueError("\x1b[31m"), KeyError("x")])
def test_whatever_reading_a_folder_brings_about_is_that_folders_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    folder = write_model(tmp_path / "model")
    for name in ("read_model_config", "read_headers", "chat_template_form", "read_json_object", "_quantisation"):
        with monkeypatch.context() as patch:
            patch.setattr(inspecting, name, fail)
            problem = inspect(folder).problem
        assert problem.startswith(f"{folder} cannot be read: {type(error).__name__}")
        assert problem.isprintable()


# -- files -------------------------------------------------------------------------------------------------------------


def secret(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text(json.dumps({"chat_template": SECRET, "key": SECRET}))
    return file


FOREIGN = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


@pytest.mark.parametrize("name", [*FOREIGN, "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_that_leaves_the_folder_is_not_followed(tmp_path: Path, name: str, absolute: bool) -> None:
    folder = write_model(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret(tmp_path) if absolute else Path("..") / secret(tmp_path).name)
    entry = inspect(folder)
    assert f"{name} in {folder} is a link that leads out of the folder" in entry.problem
    assert SECRET not in str(entry)
    with pytest.raises(UnsupportedModel, match="leads out of the folder"):
        open_file(folder / name)


def test_templates_behind_a_folder_that_is_a_link_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "notes.jinja").write_text(SECRET)
    folder = write_model(tmp_path / "model")
    (folder / "additional_chat_templates").symlink_to("../private")
    with pytest.raises(UnsupportedModel, match="leads out of the folder"):
        TokenizerFolder.read(folder)


def test_links_within_the_folder_and_a_folder_that_is_a_link_are_followed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (tmp_path / "alias").symlink_to(folder)
    assert inspect(tmp_path / "alias").problem == ""


@pytest.mark.parametrize("own", [True, False])
def test_links_to_blobs_of_a_hub_cache_are_followed_and_to_nothing_else_beside_them(tmp_path: Path, own: bool) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    folder = repo / "snapshots" / ("c" * 40) if own else tmp_path / "local"
    write_model(folder)
    for name, blob in (("config.json", "a" * 40), ("model.safetensors", "b" * 64)):
        (repo / "blobs").mkdir(parents=True, exist_ok=True)
        (folder / name).rename(repo / "blobs" / blob)
        (folder / name).symlink_to(repo / "blobs" / blob)
    assert inspect(folder).problem == ""
    (repo / "blobs" / "private.json").write_text("{}")
    (folder / "generation_config.json").symlink_to(repo / "blobs" / "private.json")
    with pytest.raises(UnsupportedModel, match="leads out of the folder"):
        read_json_object(folder / "generation_config.json")


def test_a_file_that_is_swapped_for_a_link_after_it_was_looked_at_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model")
    file, really = folder / "config.json", os.open

    def swapped(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if Path(path) == file and not file.is_symlink():
            file.unlink()
            file.symlink_to(secret(tmp_path))
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(UnsupportedModel, match="leads out of the folder"):
        read_json_object(file)
    assert file.is_symlink()


@pytest.mark.parametrize("name", FOREIGN[:-1])
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder"])
def test_what_is_no_plain_file_is_neither_waited_for_nor_read(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_model(tmp_path / "m")
    file = folder / name
    file.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(file))
        case "device":
            file.symlink_to("/dev/zero")
        case "folder":
            file.mkdir()
    with within_bounds():
        assert inspect(folder).problem == f"{name} in {folder} is not a plain file"


def test_a_fifo_that_takes_a_files_place_while_it_is_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, really = write_model(tmp_path) / "config.json", os.open

    def swapped(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        file.unlink()
        os.mkfifo(file)
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(UnsupportedModel, match="is not a plain file"):
        read_json_object(file)


def test_a_pipe_in_place_of_a_hub_caches_branch_is_not_waited_for(tmp_path: Path) -> None:
    repo = tmp_path / "models" / "models--org--piped"
    write_model(repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    os.mkfifo(repo / "refs" / "main")
    assert [model.name for model in discover([tmp_path / "models"], hub_cache=False)][1:] == ["org/piped"]


def test_no_more_of_a_file_is_read_than_its_reader_can_afford(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(2**40)  # a hole
    with within_bounds(), pytest.raises(UnsupportedModel, match="is larger than 4 MiB"):
        read_json_object(file)
    file.write_bytes(b"{}".ljust(MAX_JSON_BYTES))
    assert read_json_object(file) == {}
    assert read_file(file, MAX_JSON_BYTES) == b"{}".ljust(MAX_JSON_BYTES)


def test_a_folder_of_more_files_than_any_model_has_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    for number in range(MAX_FILES):
        (folder / f"{number}.safetensors").touch()
    with within_bounds():
        assert f"it has more than {MAX_FILES:,} files" in inspect(folder).problem


def test_a_link_to_itself_or_a_name_that_is_no_text_hides_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    models = tmp_path / "models"
    write_model(models / "good")
    (models / "loop").symlink_to("loop")
    write_model(Path(os.fsdecode(os.fsencode(models) + b"/bad\xff")))
    assert [entry.name for entry in discover([models]) if entry.origin != "demo"] == ["good"]


def test_a_folder_that_becomes_a_link_to_itself_while_it_is_looked_at_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mild, fickle = write_model(tmp_path / "models" / "mild"), write_model(tmp_path / "models" / "fickle")

    def swap(file: Path) -> bool:
        found = is_file(file)
        if file.parent == fickle:
            shutil.rmtree(fickle)
            fickle.symlink_to(fickle.name)
        return found

    monkeypatch.setattr(discovering, "is_file", swap)
    assert [model.path for model in discover([tmp_path / "models"], hub_cache=False)][1:] == [mild]


def test_a_folder_whose_config_and_weights_are_both_broken_is_still_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    folder = write_model(tmp_path / "models" / "broken")
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"nothing of use")
    (entry,) = [entry for entry in discover([tmp_path / "models"]) if entry.origin != "demo"]
    assert (entry.name, entry.weights_bytes) == ("broken", 14)
    assert "config.json" in entry.problem
