"""What is refused before anything is started, because the model asked for cannot be loaded as asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from console.runtime.loading import choose_model
from console.settings.schema import Settings
from engine.errors import EngineError, InvalidRequest, ModelNotFound
from tests.fakes.model_folders import write_model
from tests.fakes.tiny_models import make_tiny_model


def settings(model: Path | str, **fields: object) -> Settings:
    return Settings(model=str(model), **fields)  # type: ignore[arg-type]


def test_a_context_longer_than_the_model_takes_is_refused_before_the_start(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    with pytest.raises(InvalidRequest, match="max_model_len is 513; this model takes from 1 to 512"):
        choose_model(settings(model, max_model_len=513))
    assert choose_model(settings(model, max_model_len=1024, alpha_value=2.0)).spec is not None


def test_a_home_folder_that_does_not_exist_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no folder ~no-such-user/m"):
        choose_model(settings("~no-such-user/m", models_dir=(tmp_path,)))


@pytest.mark.parametrize("document", [{"weight_map": 5}, {"metadata": {}}])
def test_an_index_that_names_no_files_is_refused_by_its_name(tmp_path: Path, document: dict[str, object]) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    (model / "model.safetensors.index.json").write_text(json.dumps(document))
    with pytest.raises(
        EngineError, match=r"model\.safetensors\.index\.json .* (does not say which files|has invalid content)"
    ) as caught:
        choose_model(settings(model))
    assert caught.value.http_status == 400


DBRX_EXL2 = {
    "architectures": ["DbrxForCausalLM"],
    "quantization_config": {"quant_method": "exl2", "bits": 4.0},
}


def test_a_model_that_only_exllamav2_knows_is_loaded_by_it_with_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker_process.factory.library_lacks", lambda backend: None)
    folder = write_model(tmp_path / "dbrx", **DBRX_EXL2)
    spec = choose_model(settings(folder, num_experts=3, cache_bits=8)).spec
    assert spec is not None
    assert (spec.backend, spec.num_experts, spec.cache_bits) == ("exllamav2", 3, 8)


@pytest.mark.parametrize("flags", [{"num_experts": 2}, {"alpha_value": 2.0}, {"attention": "triton"}])
def test_a_flag_that_exllamav3_does_not_honour_is_refused_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]
) -> None:
    monkeypatch.setattr("engine.worker_process.factory.library_lacks", lambda backend: None)
    folder = write_model(tmp_path / "exl3", quantization_config={"quant_method": "exl3", "bits": 4.0})
    spec = choose_model(settings(folder, cache_bits=6)).spec
    assert spec is not None
    assert (spec.backend, spec.cache_bits) == ("exllamav3", 6)
    [name] = flags
    with pytest.raises(EngineError, match=f"--{name} requires --backend torch"):
        choose_model(settings(folder, **flags))


def test_a_gptq_model_is_loaded_by_exllamav2_and_by_torch_where_it_is_asked_for_or_devices_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker_process.factory.library_lacks", lambda backend: None)
    folder = write_model(tmp_path / "gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    asked: list[dict[str, Any]] = [{"cache_bits": 6}, {"backend": "torch"}, {"devices": "sim:24"}]
    chosen = [choose_model(settings(folder, **flags)).spec for flags in asked]
    assert [spec.backend for spec in chosen if spec is not None] == ["exllamav2", "torch", "torch"]


def test_such_a_model_is_refused_by_torch_where_exllamav2_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker_process.factory.library_lacks", lambda backend: "no GPU was found")
    with pytest.raises(EngineError, match="unsupported architecture: DbrxForCausalLM"):
        choose_model(settings(write_model(tmp_path / "dbrx", **DBRX_EXL2)))
