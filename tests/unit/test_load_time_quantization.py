"""`--weights int8|int4`: made at load, from whatever the checkpoint has, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.common import native_build
from engine.backends.common.native_build import SWITCH, find_compiler
from engine.backends.common.torch_load_settings import refuse_settings
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.model.linear import LinearFactory, linear_kind
from engine.backends.torch.model.mlp import MixtureMlp
from engine.backends.torch.native import library as kernels
from engine.backends.torch.native.layer import INTEGER_SETS, NativeLinear, bits_of
from engine.backends.torch.native.library import native_isa
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec, WeightsName
from engine.demo import model_path
from engine.errors import InvalidRequest, ModelLoadFailed
from tests.fakes.quantised_folders import edit_weights, make_twins
from tests.fakes.tiny_models import make_tiny_model
from tools.performance.perplexity import held_out, outcome, with_pages

PROMPT = [3 + 7 * number for number in range(20)]
WEIGHTS: tuple[WeightsName, ...] = ("int8", "int4")

runs = pytest.mark.skipif(native_isa() is None or not find_compiler(), reason="no compiler, or a CPU without AVX2")


def load(folder: Path, weights: WeightsName, **settings: Any) -> ModelRunner:
    spec = ModelSpec(path=folder, name="tiny", weights=weights, **{"device": "cpu", "dtype": "bfloat16", **settings})
    return ModelRunner.load(folder, spec, report=lambda progress: None, cancelled=lambda: False)


def predicted(runner: ModelRunner) -> torch.Tensor:
    runner.allocate_kv(8, 8, report=lambda progress: None)
    return runner.forward([ChunkInput(PROMPT, 0, [0, 1, 2], sample=True)]).log_softmax(-1)


def divergence(runner: ModelRunner, exact: ModelRunner) -> float:
    expected = predicted(exact)
    return float((expected.exp() * (expected - predicted(runner))).sum(-1).mean())


@runs
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("weights", "most"), [("int8", 2e-2), ("int4", 0.3)])
def test_a_model_says_about_the_same_with_quantised_weights(
    tmp_path: Path, weights: WeightsName, most: float, dtype: str, tie: bool
) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16", tie=tie, with_tokenizer=False)
    runner = load(folder, weights, dtype=dtype)
    isa = native_isa()
    assert isa is not None
    assert runner.linear == f"native {INTEGER_SETS[isa]} {weights}"
    assert 0 < divergence(runner, load(folder, "auto", dtype="float32")) < most


@runs
@pytest.mark.parametrize(("weights", "most"), [("int8", 1e-3), ("int4", 2e-2)])
def test_the_demo_model_answers_as_with_its_own_weights(weights: WeightsName, most: float) -> None:
    examples = held_out(4, 96)
    folder = model_path()
    exact, found = (outcome(with_pages(load(folder, each), examples), examples) for each in ("auto", weights))
    assert float((exact.predicted.exp() * (exact.predicted - found.predicted)).sum(-1).mean()) < most
    assert float((exact.predicted.argmax(-1) == found.predicted.argmax(-1)).float().mean()) > 0.99


@runs
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_head_has_8_bits_and_the_embedding_16(tmp_path: Path, weights: WeightsName) -> None:
    decoder = load(make_tiny_model(tmp_path, dtype="bfloat16", tie=True, with_tokenizer=False), weights)._decoder
    assert decoder is not None
    assert isinstance(decoder.head, NativeLinear)
    assert bits_of(decoder.head.format) == 8
    assert decoder.embedding.dtype is torch.bfloat16


@runs
@pytest.mark.parametrize("weights", WEIGHTS)
def test_experts_are_quantised_and_what_routes_to_them_is_not(tmp_path: Path, weights: WeightsName) -> None:
    folder = make_tiny_model(tmp_path, "Qwen2MoeForCausalLM", dtype="bfloat16", with_tokenizer=False)
    runner = load(folder, weights)
    assert runner._decoder is not None
    blocks = [block for stage in runner._decoder.stages for block in stage.blocks]
    mixtures = [block.mlp for block in blocks if isinstance(block.mlp, MixtureMlp)]
    assert mixtures
    for mixture in mixtures:
        assert weights not in linear_kind(mixture.router)
        assert all(weights in linear_kind(part) for each in mixture.experts for part in (each.gate_up, each.down))
        assert mixture.shared is not None
        assert weights not in linear_kind(mixture.shared.gate)
        assert weights in linear_kind(mixture.shared.mlp.down)
    assert divergence(runner, load(folder, "auto", dtype="float32")) < 0.3


@runs
@pytest.mark.parametrize("method", ["exl2", "exl3", "gptq", "awq", "fp8"])
def test_packed_checkpoints_are_read_first_and_then_made_anew(tmp_path: Path, method: str) -> None:
    folder = make_twins(tmp_path, method, num_hidden_layers=2).quantised
    assert divergence(load(folder, "int8"), load(folder, "auto", dtype="float32")) < 5e-2


@runs
def test_two_workers_have_quantised_weights_once_and_others_have_their_own(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16", with_tokenizer=False)
    first, second, other = load(folder, "int4"), load(folder, "int4"), load(folder, "int8")
    assert first.shared_bytes == second.shared_bytes >= first.weights_bytes
    assert second.linear == first.linear != other.linear
    assert torch.equal(predicted(first), predicted(second))


@runs
def test_a_kernel_that_does_not_multiply_as_it_must_ends_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.backends.torch.model.linear.matches_weight", lambda layer, weight, bits: False)
    with pytest.raises(ModelLoadFailed, match=r"int4 kernel with .* weights differ from torch"):
        load(make_tiny_model(tmp_path, dtype="bfloat16", with_tokenizer=False), "int4")


@runs
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_said_to_be_and_no_kernel_is_blamed(tmp_path: Path, value: float) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16", with_tokenizer=False)
    edit_weights(folder, **{"model.layers.0.mlp.down_proj.weight": torch.full((64, 128), value, dtype=torch.bfloat16)})
    with pytest.raises(ModelLoadFailed, match="a weight of 64 x 128 has numbers that are not finite"):
        load(folder, "int8")


@runs
def test_a_zero_weight_is_like_itself() -> None:
    library = kernels.find_kernels(torch.bfloat16, torch.device("cpu")).library
    factory = LinearFactory(torch.device("cpu"), torch.bfloat16, library)
    layer = factory.make(torch.zeros(48, 64).bfloat16(), bits=4)
    assert not layer(torch.ones(2, 64).bfloat16()).any()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_without_a_compiler_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: WeightsName
) -> None:
    folder = make_tiny_model(tmp_path / "model", dtype="bfloat16", with_tokenizer=False)
    monkeypatch.setattr(kernels, "native_isa", lambda: "avx2")
    monkeypatch.setattr(kernels, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(native_build, "_zig", lambda: "")  # that of a package is found without PATH
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InvalidRequest, match=rf"weights is {weights}: .*: no C\+\+ compiler is on PATH") as refused:
        load(folder, weights)
    assert refused.value.details["param"] == "weights"


def test_kernels_that_are_kept_off_or_cannot_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16", with_tokenizer=False)
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(InvalidRequest, match=r"weights is int8: .* AVX2, and that ERICLLM_NATIVE is not 0"):
        load(folder, "int8")


def test_other_numbers_and_devices_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16", with_tokenizer=False)
    with pytest.raises(InvalidRequest, match="for bfloat16 and float32 only, not for float16"):
        load(folder, "int8", dtype="float16")
    spec = ModelSpec(path=folder, name="tiny", weights="int8")
    for simulated in (True, False):
        with pytest.raises(InvalidRequest, match=r"weights is not .* quantizes weights on a CPU only"):
            refuse_settings(spec, on_cpu=simulated, simulated=simulated)
    refuse_settings(spec, on_cpu=True)
