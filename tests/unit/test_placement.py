"""Where workers go, and why they cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import ModelSpec
from engine.demand import MemoryDemand, kv_bytes_per_token, read_demand
from engine.errors import InsufficientMemory, InvalidRequest, UnsafeWeights, UnsupportedModel
from engine.placement import place
from engine.snapshot import DeviceReading

MIB = 2**20
DEMAND = MemoryDemand(weights_bytes=1000 * MIB, kv_bytes=400 * MIB, working_bytes=100 * MIB)


def device(name: str, free_mib: int) -> DeviceReading:
    kind = "cpu" if name == "cpu" else "cuda"
    return DeviceReading(
        id=name, name=name, kind=kind, utilisation=None, total_bytes=10**5 * MIB, free_bytes=free_mib * MIB
    )


def spec(**fields: object) -> ModelSpec:
    return ModelSpec(path=Path("/models/m"), name="m", **fields)  # type: ignore[arg-type]


def devices_of(workers: int, *devices: DeviceReading, model: ModelSpec | None = None) -> list[str]:
    return [each.device for each in place(workers, DEMAND, devices, model or spec())]


def test_each_worker_goes_where_most_memory_is_left() -> None:
    assert devices_of(3, device("cuda:0", 4000), device("cuda:1", 5000)) == ["cuda:1", "cuda:0", "cuda:1"]


def test_gpus_are_preferred_to_the_cpu() -> None:
    assert devices_of(1, device("cuda:0", 2000), device("cpu", 90000)) == ["cuda:0"]


def test_a_named_device_is_used_alone() -> None:
    every = (device("cuda:0", 9000), device("cuda:1", 4000), device("cpu", 9000))
    assert devices_of(2, *every, model=spec(device="cuda:1")) == ["cuda:1", "cuda:1"]
    assert devices_of(1, *every, model=spec(device="cpu")) == ["cpu"]


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest, match="no device cuda:7 here; there are cuda:0, cpu"):
        devices_of(1, device("cuda:0", 9000), device("cpu", 9000), model=spec(device="cuda:7"))


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(InsufficientMemory) as refused:
        devices_of(2, device("cpu", 2000))
    assert "worker 2 of 2 with m needs 1500 MiB on cpu" in refused.value.message
    assert "short by 1000 MiB" in refused.value.message
    assert refused.value.details == {
        "device": "cpu",
        "needed_bytes": 1500 * MIB,
        "free_bytes": 500 * MIB,
        "short_bytes": 1000 * MIB,
    }


EXL2 = spec(backend="exllamav2")


def test_an_exllamav2_worker_spans_the_gpus_where_no_single_one_holds_it() -> None:
    assert devices_of(1, device("cuda:0", 1000), device("cuda:1", 800), model=EXL2) == ["auto"]
    assert devices_of(1, device("cuda:0", 1000), device("cuda:1", 1500), model=EXL2) == ["cuda:1"]
    with pytest.raises(InsufficientMemory, match=r"on cuda:1 .* short by 1000 MiB"):
        devices_of(2, device("cuda:0", 1000), device("cuda:1", 1000), model=EXL2)


def test_a_torch_worker_spans_nothing() -> None:
    with pytest.raises(InsufficientMemory):
        devices_of(1, device("cuda:0", 1000), device("cuda:1", 800))


def test_a_gpu_split_is_checked_card_by_card() -> None:
    split = spec(backend="exllamav2", gpu_split_gb=(1.0, 0.5))
    assert devices_of(1, device("cuda:0", 1024), device("cuda:1", 600), model=split) == ["auto"]
    with pytest.raises(InsufficientMemory, match=r"512 MiB on cuda:1 \(its share of 1500 MiB\) and 500 MiB are free"):
        devices_of(1, device("cuda:0", 1024), device("cuda:1", 500), model=split)
    with pytest.raises(InvalidRequest, match="gpu_split names 2 GPUs; this machine has 1: cuda:0"):
        devices_of(1, device("cuda:0", 9000), model=split)


def test_tensor_parallelism_takes_an_equal_share_of_each_card() -> None:
    parallel = spec(backend="exllamav2", tensor_parallel=True)
    assert devices_of(1, device("cuda:0", 750), device("cuda:1", 750), model=parallel) == ["auto"]
    with pytest.raises(InsufficientMemory, match="750 MiB on cuda:1"):
        devices_of(1, device("cuda:0", 9000), device("cuda:1", 749), model=parallel)


def model_folder(folder: Path, weights_bytes: int, **config: object) -> Path:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps({**shape, **config}))
    (folder / "model.safetensors").write_bytes(bytes(weights_bytes))
    return folder


def test_demand_comes_from_the_files_and_the_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, 1000, torch_dtype="bfloat16")
    demand = read_demand(ModelSpec(path=folder, name="m", kv_cache_tokens=10))
    assert demand.weights_bytes == 1000
    assert demand.kv_bytes == 10 * 2 * 2 * 2 * 16 * 2


def test_kv_pages_must_hold_one_request_but_no_more_than_the_context(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, 1000, torch_dtype="bfloat16", max_position_embeddings=100)
    per_token = 2 * 2 * 2 * 16 * 2
    assert read_demand(ModelSpec(path=folder, name="m")).kv_bytes == 100 * per_token
    assert read_demand(ModelSpec(path=folder, name="m", max_model_len=40)).kv_bytes == 40 * per_token


def test_a_wider_dtype_needs_more(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, 1000, torch_dtype="bfloat16")
    assert read_demand(ModelSpec(path=folder, name="m", dtype="float32")).weights_bytes == 2000


def test_kv_bytes_count_every_layers_keys_and_values() -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 32, "hidden_size": 64}
    assert kv_bytes_per_token(config, 2) == 2 * 3 * 8 * 32 * 2
    assert kv_bytes_per_token({}, 2) == 0


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not a folder"):
        read_demand(ModelSpec(path=tmp_path / "missing", name="m"))
    with pytest.raises(UnsupportedModel, match=r"has no config\.json"):
        read_demand(ModelSpec(path=tmp_path, name="m"))


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsafeWeights, match=r"pytorch_model\.bin"):
        read_demand(ModelSpec(path=tmp_path, name="m"))
