"""Quantised model folders whose layers compute from their codes with the Triton kernels: as on CUDA, interpreted on a
CPU."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.checkpoints.checkpoint import Checkpoint
from engine.backends.common.gguf_codes import CodedTensors
from engine.backends.common.model_config import ModelConfig, read_model_config
from engine.backends.torch.cuda.coded_linear import CodedKernels, CodedLinear, CodedMatrix, tile_for
from engine.backends.torch.cuda.layer_ops import LayerOps
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.model import linear
from engine.backends.torch.model.decoder import Decoder
from engine.backends.torch.model.linear import Linear, PlainLinear, linear_kind
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp
from engine.backends.torch.weights import model_loader
from engine.backends.torch.weights.model_loader import LoadedDecoder, load_decoder
from engine.backends.torch.weights.store import OwnWeights
from engine.config import AdapterSpec, DeviceShare, DtypeName, ModelSpec
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import Workload, costs_of
from tests.fakes.adapters import make_adapter
from tests.fakes.oracle import Driver, ignore_progress, load_runner, never
from tests.fakes.quantised_folders import Method, Twins, edit_weights, make_twins
from tests.fakes.recording import NoReads

pytestmark = pytest.mark.long
pytest.importorskip("triton")

PROMPT = [5, 9, 3, 17, 44, 2, 90]
FLOAT16: DtypeName = "float16"
SIZES: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 96, "with_tokenizer": False}


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads on the CPU take the way of loads on CUDA."""
    choose = model_loader._cuda_codes

    def codes(
        spec: ModelSpec, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, devices: Any, *more: Any
    ) -> CodedTensors:
        return choose(spec, config, checkpoint, dtype, [torch.device("cuda:0")], *more)

    monkeypatch.setattr(model_loader, "_cuda_codes", codes)
    monkeypatch.setattr(model_loader, "packed_kernels_problem", lambda *arguments: "")
    monkeypatch.setattr(model_loader, "weight_store", lambda *arguments: nullcontext(OwnWeights()))
    monkeypatch.setattr(linear, "packing_pays", lambda weight: False)  # CPUs with AVX512-FP16 or AMX would pack float16


def load(folder: Path, *memories: DeviceMemory, **settings: Any) -> LoadedDecoder:
    spec = ModelSpec(path=folder, name="m", device="cpu", dtype=FLOAT16, native=False, **settings)
    return load_decoder(folder, spec, report=ignore_progress, cancelled=never, devices=memories)


def planned(folder: Path, **settings: Any) -> Any:
    spec = ModelSpec(path=folder, name="m", dtype=FLOAT16, **settings)
    return costs_of(read_facts(spec), spec, "cuda", Workload(), bfloat16=True)


def linears(decoder: Decoder) -> list[Linear]:
    (block,) = decoder.stages[0].blocks
    assert isinstance(block.mlp, GatedMlp)
    return [block.qkv, block.o, block.mlp.gate_up, block.mlp.down, decoder.head]


def logits(folder: Path, *, adapter: Path | None = None, **settings: Any) -> torch.Tensor:
    runner = load_runner(folder, **settings)
    if adapter is not None:
        runner.adapters.attach(AdapterSpec(name="it", path=adapter))
    driver = Driver(runner)
    return driver.feed((driver.add(PROMPT, adapter="it" if adapter else ""), None))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() < 0.02 * expected.std()


def twins(tmp_path: Path, method: Method, architecture: str = "LlamaForCausalLM", **config: Any) -> Twins:
    return make_twins(tmp_path, method, architecture, **(SIZES | config))


@pytest.mark.parametrize(
    ("method", "architecture"),
    [("gptq", "LlamaForCausalLM"), ("awq", "Qwen2ForCausalLM"), ("fp8-channel", "Qwen3ForCausalLM")],
)
def test_a_folder_answers_from_codes_as_decoded_and_takes_what_was_planned(
    tmp_path: Path, as_on_cuda: None, method: Method, architecture: str
) -> None:
    folders = twins(tmp_path, method, architecture)
    loaded = load(folders.quantised)
    coded = [each for each in linears(loaded.decoder) if isinstance(each, CodedLinear)]
    assert len(coded) == 5
    assert {linear_kind(each) for each in coded} == {"triton from the file's codes"}
    held = loaded.layout.first.weights_bytes
    assert planned(folders.quantised).weights_bytes == held
    assert held < planned(folders.plain).weights_bytes
    embedding = loaded.decoder.embedding
    assert isinstance(embedding, torch.Tensor)
    assert held == pytest.approx(sum(each.nbytes for each in coded) + embedding.nbytes, rel=0.05)
    assert_close(logits(folders.quantised, dtype=FLOAT16, native=False), logits(folders.plain, native=False))


def test_no_kernel_of_a_layer_is_compiled_while_serving(
    tmp_path: Path, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[int, int, int]] = set()
    multiply = CodedKernels.multiply

    def recorded(self: CodedKernels, x: torch.Tensor, matrix: CodedMatrix, *more: Any) -> None:
        seen.add((matrix.rows, matrix.inputs, tile_for(len(x)).block_m))
        multiply(self, x, matrix, *more)

    monkeypatch.setattr(CodedKernels, "multiply", recorded)
    loaded = load(twins(tmp_path, "gptq").quantised)
    parts = [part for each in linears(loaded.decoder) if isinstance(each, CodedLinear) for part in each.parts]
    assert seen == {(part.rows, part.inputs, size) for part in parts for size in (16, 32, 64)}


def test_layers_that_are_stored_as_floats_stay_so(tmp_path: Path, as_on_cuda: None) -> None:
    folders = twins(tmp_path, "awq", plain_head=True, tie=True)
    loaded = load(folders.quantised)
    *layers, head = linears(loaded.decoder)
    assert all(isinstance(each, CodedLinear) for each in layers)
    assert not isinstance(head, CodedLinear)
    assert planned(folders.quantised).weights_bytes == loaded.layout.first.weights_bytes


def test_blocks_that_the_kernels_do_not_take_are_decoded_and_counted_so(tmp_path: Path, as_on_cuda: None) -> None:
    folders = twins(tmp_path, "fp8")  # in blocks of 48 x 40
    loaded = load(folders.quantised)
    assert not any(isinstance(each, CodedLinear) for each in linears(loaded.decoder))
    assert planned(folders.quantised).weights_bytes == loaded.layout.first.weights_bytes


def test_a_layer_whose_groups_are_not_what_headers_promise_is_decoded_with_a_warning(
    tmp_path: Path, as_on_cuda: None, caplog: pytest.LogCaptureFixture
) -> None:
    folders = twins(tmp_path, "gptq")
    uneven = torch.tensor([0] * 24 + [1] * 40, dtype=torch.int32)
    edit_weights(folders.quantised, **{"model.layers.0.self_attn.o_proj.g_idx": uneven})
    with caplog.at_level(logging.WARNING):
        loaded = load(folders.quantised)
    assert isinstance(linears(loaded.decoder)[1], PlainLinear)
    assert caplog.messages == [
        "model.layers.0.self_attn.o_proj.weight: decoded at load, as its groups or numbers are of no kind that kernels "
        "take"
    ]
    more = 2 * 64 * 64 - (64 * 64 // 2 + 2 * 64 * 3 + 64 * 4)
    assert loaded.layout.first.weights_bytes == planned(folders.quantised).weights_bytes + more


def test_layers_on_several_devices_compute_from_codes_and_are_counted_there(tmp_path: Path, as_on_cuda: None) -> None:
    folders = twins(tmp_path, "gptq", num_hidden_layers=2)
    memories = tuple(DeviceMemory(name, torch.device("cpu")) for name in ("one", "other"))
    shares = tuple(DeviceShare(device=each.name, layers=1) for each in memories)
    loaded = load(folders.quantised, *memories, shares=shares)
    assert isinstance(loaded.decoder.head, CodedLinear)
    costs = planned(folders.quantised)
    assert [each.weights_bytes for each in memories] == [costs.weights_of(0, 1), costs.weights_of(1, 2)]


def test_an_adapter_of_a_request_is_added_to_products_with_codes(tmp_path: Path, as_on_cuda: None) -> None:
    folders = twins(tmp_path, "gptq")
    adapter = make_adapter(tmp_path / "adapter", folders.plain).folder
    found = logits(folders.quantised, adapter=adapter, dtype=FLOAT16, native=False)
    expected = logits(folders.plain, adapter=adapter, native=False)
    assert (expected - logits(folders.plain, native=False)).abs().max() > 0.1 * expected.std()
    assert_close(found, expected)


def test_an_adapter_that_is_merged_is_in_weights_that_are_decoded(tmp_path: Path, as_on_cuda: None) -> None:
    folders = twins(tmp_path, "awq")
    adapter = make_adapter(tmp_path / "adapter", folders.plain).folder
    loaded = load(folders.quantised, lora=adapter)
    assert not any(isinstance(each, CodedLinear) for each in linears(loaded.decoder))
    found = logits(folders.quantised, lora=adapter, dtype=FLOAT16, native=False)
    assert_close(found, logits(folders.plain, lora=adapter, native=False))


@pytest.mark.parametrize(
    ("architecture", "sizes"), [("MixtralForCausalLM", {}), ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 64})]
)
def test_experts_compute_from_codes_and_are_counted_so(
    tmp_path: Path, as_on_cuda: None, architecture: str, sizes: dict[str, int]
) -> None:
    folders = twins(tmp_path, "awq", architecture, **sizes)
    loaded = load(folders.quantised)
    assert loaded.layout.first.weights_bytes == planned(folders.quantised).weights_bytes
    assert planned(folders.quantised).layer_bytes[0] < 0.5 * planned(folders.plain).layer_bytes[0]
    assert_close(logits(folders.quantised, dtype=FLOAT16, native=False), logits(folders.plain, native=False))


def test_experts_in_codes_are_computed_in_few_launches_and_neither_read_nor_waited_for(
    tmp_path: Path, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = twins(tmp_path, "gptq", "MixtralForCausalLM")  # with inputs in the order of groups
    expected = logits(folders.plain, native=False)
    monkeypatch.setattr(
        model_loader, "_layer_ops", lambda config, dtype, devices, report: {each: LayerOps(each) for each in devices}
    )
    loaded = load(folders.quantised)
    (block,) = loaded.decoder.stages[0].blocks
    assert isinstance(block.mlp, MixtureMlp) and block.mlp.grouped is not None
    assert not loaded.decoder.needs_host
    with NoReads():
        block.mlp(torch.zeros(3, 64, dtype=torch.float16), 0)
    assert_close(logits(folders.quantised, dtype=FLOAT16, native=False), expected)


@pytest.mark.parametrize(
    ("settings", "from_codes"),
    [({}, True), ({"dtype": "bfloat16"}, True), ({"dtype": "float32"}, False), ({"lora": Path("adapter")}, False)],
    ids=["auto", "bfloat16", "float32", "merged adapter"],
)
def test_the_estimate_of_a_gpu_counts_codes_where_they_are_computed_from(
    tmp_path: Path, settings: dict[str, Any], from_codes: bool
) -> None:
    folder = twins(tmp_path, "awq").quantised
    facts = read_facts(ModelSpec(path=folder, name="m"))
    spec = ModelSpec(**{"path": folder, "name": "m"} | settings)
    costs = costs_of(facts, spec, "cuda", Workload(), bfloat16=True)
    assert (costs.layer_bytes[0] < facts.parts.layers[0].elements) is from_codes


def test_the_estimate_of_a_cpu_and_of_a_machine_without_triton_counts_decoded_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = twins(tmp_path, "awq").quantised
    spec = ModelSpec(path=folder, name="m", dtype=FLOAT16)
    facts = read_facts(spec)
    assert costs_of(facts, spec, "cpu", Workload(), bfloat16=True).layer_bytes[0] >= 2 * facts.parts.layers[0].elements
    monkeypatch.setattr("engine.placement.model_facts.triton_problem", lambda: "triton is not installed")
    assert planned(folder).layer_bytes[0] >= 2 * facts.parts.layers[0].elements


def test_a_multimodal_folder_is_counted_by_its_language_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = twins(tmp_path, "awq").quantised
    before = planned(folder).layer_bytes
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}, file)
    assert planned(folder).layer_bytes == before


def test_what_cannot_be_computed_from_codes_is_decoded_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_loader, "packed_kernels_problem", lambda *arguments: "triton is not installed")
    folder = twins(tmp_path, "gptq").quantised
    spec = ModelSpec(path=folder, name="m", dtype=FLOAT16)
    with caplog.at_level(logging.WARNING):
        coded = model_loader._cuda_codes(
            spec,
            read_model_config(folder),
            Checkpoint.open(folder),
            torch.float16,
            [torch.device("cuda:0")],
            ignore_progress,
            never,
        )
    assert not coded
    assert caplog.messages == [
        "weights are decoded at load, not computed from the codes of their files: triton is not installed"
    ]
