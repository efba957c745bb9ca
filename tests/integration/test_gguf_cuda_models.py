"""Models of a GGUF file whose layers compute from codes with the Triton kernels: as on CUDA, interpreted on a CPU."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.backends.common.gguf_codes import CodedTensors
from engine.backends.common.model_config import read_model_config
from engine.backends.torch.cuda.coded_linear import CodedLinear, GgufEmbedding
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.model.linear import linear_kind
from engine.backends.torch.model.mlp import GatedMlp
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights import model_loader
from engine.backends.torch.weights.model_loader import load_decoder
from engine.backends.torch.weights.store import OwnWeights
from engine.config import DeviceShare, DtypeName, ModelSpec
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import Workload, costs_of
from engine.placement.plan import plan
from engine.snapshot import DeviceReading
from tests.fakes.gguf_models import write_gguf
from tests.fakes.oracle import Driver, ignore_progress, load_runner, never
from tests.fakes.recording import NoReads
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long
pytest.importorskip("triton")

PROMPT = [5, 9, 3, 17, 44, 2, 90]
FLOAT16: DtypeName = "float16"


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads on the CPU take the way of loads on CUDA."""

    def codes(spec: ModelSpec, config: Any, checkpoint: Any, *more: Any) -> CodedTensors:
        return CodedTensors.of(checkpoint.pieces(), "cuda")

    monkeypatch.setattr(model_loader, "_cuda_codes", codes)
    monkeypatch.setattr(model_loader, "weight_store", lambda *arguments: nullcontext(OwnWeights()))


def gguf(tmp_path: Path, architecture: str = "LlamaForCausalLM", *, kind: str = "Q8_0", **settings: Any) -> Path:
    folder = make_tiny_model(tmp_path / "folder", architecture, num_hidden_layers=1, vocab_size=96, **settings)
    return write_gguf(folder, tmp_path / "model.gguf", kind=kind)


def logits(runner: ModelRunner) -> torch.Tensor:
    driver = Driver(runner)
    return driver.feed((driver.add(PROMPT), None))


@pytest.mark.parametrize("tie", [False, True], ids=["with a head", "tied"])
@pytest.mark.parametrize(
    ("architecture", "kind"), [("LlamaForCausalLM", "Q8_0"), ("Qwen2ForCausalLM", "Q4_1")], ids=["llama", "qwen2"]
)
def test_a_model_answers_from_codes_as_decoded_and_takes_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_on_cuda: None, architecture: str, kind: str, tie: bool
) -> None:
    file = gguf(tmp_path, architecture, kind=kind, tie=tie, with_tokenizer=False)
    spec = ModelSpec(path=file, name="m", device="cpu", dtype=FLOAT16, native=False)
    loaded = load_decoder(file, spec, report=ignore_progress, cancelled=never)
    decoder = loaded.decoder
    assert isinstance(decoder.embedding, GgufEmbedding)
    (block,) = decoder.stages[0].blocks
    assert isinstance(block.mlp, GatedMlp)
    linears = [block.qkv, block.o, block.mlp.gate_up, block.mlp.down, decoder.head, decoder.embedding.layer]
    assert {linear_kind(each) for each in linears} == {"triton from the file's codes"}
    assert (decoder.head is decoder.embedding.layer) == tie
    planned = costs_of(read_facts(spec), spec, "cuda", Workload(), bfloat16=True)
    assert planned.weights_bytes == loaded.layout.first.weights_bytes
    codes = {id(each): each.nbytes for each in linears if isinstance(each, CodedLinear)}
    assert loaded.layout.first.weights_bytes == pytest.approx(sum(codes.values()), rel=0.05)
    found = logits(load_runner(file, dtype=FLOAT16, native=False))
    monkeypatch.undo()
    expected = logits(load_runner(file, native=False))
    assert (found - expected).abs().max() < 0.02 * expected.std()


def test_a_tied_head_on_another_device_is_a_copy_of_the_codes_that_is_counted_there(
    tmp_path: Path, as_on_cuda: None
) -> None:
    folder = make_tiny_model(tmp_path / "folder", num_hidden_layers=2, vocab_size=96, tie=True, with_tokenizer=False)
    file = write_gguf(folder, tmp_path / "model.gguf", kind="Q8_0")
    memories = tuple(DeviceMemory(name, torch.device("cpu")) for name in ("one", "other"))
    shares = tuple(DeviceShare(device=each.name, layers=1) for each in memories)
    spec = ModelSpec(path=file, name="m", device="cpu", dtype=FLOAT16, native=False, shares=shares)
    loaded = load_decoder(file, spec, report=ignore_progress, cancelled=never, devices=memories)
    embedding, head = loaded.decoder.embedding, loaded.decoder.head
    assert isinstance(embedding, GgufEmbedding) and isinstance(head, CodedLinear)
    assert head is not embedding.layer
    assert torch.equal(head.parts[0].low, embedding.layer.parts[0].low)
    planned = costs_of(read_facts(spec), spec, "cuda", Workload(), bfloat16=True)
    assert [each.weights_bytes for each in memories] == [planned.weights_of(0, 1), planned.weights_of(1, 2)]


def test_steps_can_be_recorded(tmp_path: Path, as_on_cuda: None) -> None:
    file = gguf(tmp_path, with_tokenizer=False)
    spec = ModelSpec(path=file, name="m", device="cpu", dtype=FLOAT16, native=False)
    decoder = load_decoder(file, spec, report=ignore_progress, cancelled=never).decoder
    assert isinstance(decoder.embedding, GgufEmbedding)
    for rows in (3, 65):
        ids = torch.arange(rows)
        with NoReads():
            decoder.stages[0].blocks[0].o(decoder.embedding(ids))


@pytest.mark.parametrize(
    ("settings", "from_codes"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float32"}, False),
        ({"lora": Path("adapter")}, False),
    ],
    ids=["auto", "bfloat16", "float32", "merged adapter"],
)
def test_the_estimate_of_a_gpu_counts_codes_where_they_are_computed_from(
    tmp_path: Path, settings: dict[str, Any], from_codes: bool
) -> None:
    file = gguf(tmp_path, dtype="float16", with_tokenizer=False)
    facts = read_facts(ModelSpec(path=file, name="m"))
    spec = ModelSpec(**{"path": file, "name": "m"} | settings)
    costs = costs_of(facts, spec, "cuda", Workload(), bfloat16=True)
    # 8.5 bits, beside 16 or 32 and norms.
    assert (costs.layer_bytes[0] < 1.1 * facts.parts.layers[0].elements) is from_codes


@pytest.mark.parametrize(
    ("capabilities", "from_codes"),
    [([(8, 0)], True), ([None], True), ([(7, 5)], False), ([(9, 0), (7, 5)], False)],
    ids=["Ampere", "unknown", "Turing", "Hopper beside Turing"],
)
def test_the_plan_counts_decoded_weights_for_a_card_before_ampere(
    tmp_path: Path, capabilities: list[tuple[int, int] | None], from_codes: bool
) -> None:
    file = gguf(tmp_path, dtype="float16", with_tokenizer=False)
    spec = ModelSpec(path=file, name="m", draft_model=file)
    devices = [
        DeviceReading(
            id=f"cuda:{number}",
            name="card",
            kind="cuda",
            utilisation=None,
            total_bytes=8 << 30,
            free_bytes=8 << 30,
            capability=capability,
        )
        for number, capability in enumerate(capabilities)
    ]
    facts = read_facts(spec)
    costs = plan(1, facts, devices, spec, Workload()).costs
    assert (costs.layer_bytes[0] < 1.1 * facts.parts.layers[0].elements) is from_codes
    assert ("|codes|" in costs.identity) is from_codes
    alone = plan(1, facts, devices, msgspec.structs.replace(spec, draft_model=None), Workload()).costs
    assert costs.first_bytes >= alone.first_bytes


def test_the_estimate_counts_decoded_weights_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.placement.model_facts.triton_problem", lambda: "triton is not installed")
    file = gguf(tmp_path, dtype="float16", with_tokenizer=False)
    spec = ModelSpec(path=file, name="m")
    costs = costs_of(read_facts(spec), spec, "cuda", Workload(), bfloat16=True)
    assert costs.layer_bytes[0] >= 2 * 0.99 * read_facts(spec).parts.layers[0].elements


def test_what_cannot_be_computed_from_codes_is_decoded_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_loader, "gguf_kernels_problem", lambda *arguments: "triton is not installed")
    file = gguf(tmp_path, with_tokenizer=False)
    checkpoint, config = model_loader.Checkpoint.open(file), read_model_config(file)
    spec = ModelSpec(path=file, name="m", dtype=FLOAT16)
    with caplog.at_level(logging.WARNING):
        coded = model_loader._cuda_codes(
            spec, config, checkpoint, torch.float16, [torch.device("cuda:0")], ignore_progress, never
        )
    assert not coded
    assert caplog.messages == [
        "weights are decoded at load, not computed from the codes of their files: triton is not installed"
    ]
