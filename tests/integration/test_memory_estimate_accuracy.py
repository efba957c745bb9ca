"""What placement plans for a load against what the load really takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.backends.common.native_build import find_compiler
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.native.library import native_isa
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.devices import HostProbe, simulated_readings
from engine.engine import Engine
from engine.models.resolve import resolve
from engine.placement.load_history import LoadHistoryFile
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import RUNTIME_BYTES, Workload
from engine.placement.plan import Placement, place
from engine.snapshot import DeviceReading
from tests.fakes.engines import all_ready, ask, read
from tests.fakes.oracle import ignore_progress, never
from tests.fakes.quantised_folders import make_twins
from tests.fakes.tiny_models import make_tiny_model

WORKLOAD = Workload(max_prompts=4, step_tokens=64)
PROCESS_FACTOR = 1.35
"""How far a worker process may be from what was planned for it, either way."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "vocab_size": 3000},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "num_key_value_heads": 1},
    "experts": {"architecture": "Qwen2MoeForCausalLM", "mlp_only_layers": [1]},
    "bfloat16": {"dtype": "bfloat16"},
}


def planned(folder: Path, devices: tuple[DeviceReading, ...], **settings: Any) -> tuple[Placement, ModelSpec]:
    spec = ModelSpec(path=folder, name="m", backend="torch", **settings)
    [placement] = place(1, read_facts(spec), devices, spec, WORKLOAD)
    return placement, spec


def load(spec: ModelSpec) -> tuple[TorchBackend, Any]:
    backend = TorchBackend()
    model = backend.load(
        spec,
        max_prompts=WORKLOAD.max_prompts,
        step_tokens=WORKLOAD.step_tokens,
        page_tokens=WORKLOAD.page_tokens,
        report=ignore_progress,
        cancelled=never,
    )
    return backend, model


def with_placement(spec: ModelSpec, placement: Placement) -> ModelSpec:
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return ModelSpec(
        **fields | {"shares": placement.shares, "kv_cache_tokens": placement.kv_tokens, "device": placement.device}
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_kv_pages_are_foretold_to_the_byte(tmp_path: Path, shape: str, dtype: str) -> None:
    folder = make_tiny_model(tmp_path, num_hidden_layers=3, **SHAPES[shape])
    for devices in (tuple(HostProbe().read()), simulated_readings((2,)), simulated_readings((0.07, 0.5))):
        placement, spec = planned(folder, devices, dtype=dtype)
        backend, model = load(with_placement(spec, placement))
        for share, used in zip(placement.shares, model.shares, strict=True):
            assert (share.device, share.layers) == (used.device, used.layers)
            assert (share.weights_bytes, share.kv_bytes) == (used.weights_bytes, used.kv_bytes)
            assert used.working_bytes <= share.working_bytes
        assert model.kv_tokens == placement.kv_tokens
        backend.unload()


@pytest.mark.parametrize("tie", [False, True])
def test_a_draft_model_is_foretold_to_the_byte(tmp_path: Path, tie: bool) -> None:
    folder = make_tiny_model(tmp_path / "main", num_hidden_layers=3)
    draft = make_tiny_model(tmp_path / "draft", num_hidden_layers=1, num_key_value_heads=1, tie=tie)
    for devices in (tuple(HostProbe().read()), simulated_readings((2,)), simulated_readings((0.07, 0.5))):
        placement, spec = planned(folder, devices, dtype="float32", draft_model=draft)
        backend, model = load(with_placement(spec, placement))
        for share, used in zip(placement.shares, model.shares, strict=True):
            assert (share.weights_bytes, share.kv_bytes) == (used.weights_bytes, used.kv_bytes)
            assert used.working_bytes <= share.working_bytes
        assert model.kv_bytes == sum(share.kv_bytes for share in model.shares)
        backend.unload()


@pytest.mark.parametrize("bits", [8, 4])
def test_pages_of_few_bits_are_foretold_to_the_byte(tmp_path: Path, bits: int) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16", num_hidden_layers=3, head_dim=64)
    for devices in (tuple(HostProbe().read()), simulated_readings((2,))):
        placement, spec = planned(folder, devices, cache_bits=bits)
        backend, model = load(with_placement(spec, placement))
        for share, used in zip(placement.shares, model.shares, strict=True):
            assert share.kv_bytes == used.kv_bytes
            assert used.working_bytes <= share.working_bytes
        assert model.kv_bytes == model.kv_tokens * 3 * 2 * 2 * {8: 66, 4: 36}[bits]
        backend.unload()


@pytest.mark.skipif(native_isa() is None or not find_compiler(), reason="no compiler, or a CPU without AVX2")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_of_few_bits_are_foretold_to_the_byte(tmp_path: Path, shape: str, weights: str) -> None:
    folder = make_tiny_model(tmp_path, num_hidden_layers=3, **SHAPES[shape])
    placement, spec = planned(folder, tuple(HostProbe().read()), weights=weights, dtype="bfloat16")
    backend, model = load(with_placement(spec, placement))
    for share, used in zip(placement.shares, model.shares, strict=True):
        assert (share.weights_bytes, share.kv_bytes) == (used.weights_bytes, used.kv_bytes)
        assert used.working_bytes <= share.working_bytes
    plain, _ = planned(folder, tuple(HostProbe().read()), dtype="bfloat16")
    assert placement.shares[0].weights_bytes < plain.shares[0].weights_bytes
    assert model.linear.endswith(weights)
    backend.unload()


@pytest.mark.parametrize("method", ["exl2", "exl3", "gptq", "awq", "fp8", "fp8-channel"])
def test_quantised_weights_are_foretold_as_torch_unpacks_them(tmp_path: Path, method: str) -> None:
    unpadded = {"hidden_size": 128, "head_dim": 128, "vocab_size": 384} if method == "exl3" else {}
    folder = make_twins(tmp_path, method, num_hidden_layers=2, **unpadded).quantised
    placement, spec = planned(folder, simulated_readings((2,)), dtype="float32")
    backend, model = load(with_placement(spec, placement))
    assert placement.shares[0].weights_bytes == pytest.approx(model.weights_bytes, rel=0.1)  # EXL2 is padded
    assert placement.shares[0].weights_bytes >= model.weights_bytes
    backend.unload()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["demo", "wide"])
async def test_a_worker_process_takes_what_was_planned_for_it_within_a_factor(tmp_path: Path, model: str) -> None:
    if model == "demo":
        folder = resolve("demo", ())
    else:
        folder = make_tiny_model(
            tmp_path / "wide", dtype="bfloat16", hidden_size=768, intermediate_size=3072, num_hidden_layers=8
        )
    spec = ModelSpec(path=folder, name="m", backend="torch", threads=1)
    engine = Engine(EngineConfig(max_prompts=8, worker_host="process"))
    await engine.start()
    try:
        loaded = await engine.load(spec)
        await all_ready(engine)
        for stream in [
            engine.submit(ask([5 + number] * 300, params=SamplingParams(max_tokens=8, ignore_eos=True)))
            for number in range(8)
        ]:
            await read(stream)
        [worker] = engine.publish().workers
        assert worker.pid is not None
        resident = psutil.Process(worker.pid).memory_info().rss
        [placement] = place(1, read_facts(spec), HostProbe().read(), spec, Workload(max_prompts=8))
    finally:
        await engine.close(drain_s=0.0)
    expected = placement.shares[0].total_bytes
    assert expected / PROCESS_FACTOR < resident < expected * PROCESS_FACTOR
    assert resident - loaded.weights_bytes - loaded.kv_bytes > RUNTIME_BYTES["cpu"] / PROCESS_FACTOR
    ledger = LoadHistoryFile(tmp_path / "state")
    ledger.note(placement, loaded.shares, resident)
    assert ledger.read().correction(placement.identity).loads == 1
