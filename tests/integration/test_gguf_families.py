"""A GGUF file of each family computes what its model folder does: the same shape, logits and greedy tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.common.config_values import SOURCE
from engine.backends.common.model_config import read_model_config
from engine.backends.common.rope_config import RopeConfig
from engine.backends.torch.model.decoder import Block
from engine.backends.torch.model.linear import Linear, linear_kind
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp
from engine.backends.torch.native.layer import CodedEmbedding, NativeLinear
from engine.backends.torch.weights.model_loader import load_decoder
from engine.config import DeviceShare, ModelSpec
from engine.errors import UnsupportedModel
from engine.models.gguf.config import FAMILIES, config_of
from engine.models.gguf.file import GgufModel
from engine.models.gguf.header import FORMATS, GgufHeader, GgufTensor
from engine.models.inspect import inspect
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import Workload, costs_of
from tests.fakes.families import LLAMA3, make_family
from tests.fakes.gguf_models import write_gguf
from tests.fakes.oracle import Driver, ignore_progress, load_runner, never
from tests.fakes.tiny_models import make_tiny_model

PROMPT = [7 * position % 300 + 3 for position in range(75)]
STEPS = 30

_GEMMA = {"query_pre_attn_scalar": 32, "tie_word_embeddings": True, "attention_bias": False}

Make = Callable[[Path], Path]


def tiny(architecture: str, **overrides: Any) -> Make:
    return lambda folder: make_tiny_model(folder, architecture, **overrides)


def family(name: str, **overrides: Any) -> Make:
    return lambda folder: make_family(folder, name, **overrides)


MODELS: dict[str, tuple[Make, str]] = {
    "llama": (tiny("LlamaForCausalLM"), "llama"),
    "llama, tied and with biases": (tiny("LlamaForCausalLM", tie=True, attention_bias=True, mlp_bias=True), "llama"),
    "llama 3": (tiny("LlamaForCausalLM", rope_scaling=LLAMA3, rope_theta=500_000.0), "llama"),
    "llama, linear": (tiny("LlamaForCausalLM", rope_scaling={"rope_type": "linear", "factor": 4.0}), "llama"),
    "mistral, heads of their own size": (tiny("MistralForCausalLM", head_dim=24), "llama"),
    "mistral 3": (tiny("MistralForCausalLM", head_dim=24), "mistral3"),
    "mixtral": (tiny("MixtralForCausalLM"), "llama with experts"),
    "qwen2": (tiny("Qwen2ForCausalLM", rms_norm_eps=1e-5), "qwen2"),
    "qwen2, yarn": (
        tiny(
            "Qwen2ForCausalLM",
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 24.0,
                "beta_slow": 2.0,
            },
        ),
        "qwen2",
    ),
    "qwen2 moe": (tiny("Qwen2MoeForCausalLM"), "qwen2moe"),
    "qwen3": (tiny("Qwen3ForCausalLM", tie=True), "qwen3"),
    "qwen3 moe": (tiny("Qwen3MoeForCausalLM"), "qwen3moe"),
    "gemma2": (family("gemma2", **_GEMMA), "gemma2"),
    "gemma3": (family("gemma3", query_pre_attn_scalar=32), "gemma3"),
    "gemma3, linear": (
        family(
            "gemma3",
            query_pre_attn_scalar=32,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        ),
        "gemma3",
    ),
    "phi3": (family("phi3"), "phi3"),
    "phi3, no window": (family("phi3", sliding_window=None), "phi3"),
    "phi4 mini": (family("phi4 mini"), "phi3"),
    "granite": (family("granite"), "granite"),
    "olmo2": (family("olmo2", attention_bias=False, rope_scaling=None), "olmo2"),
    "smollm3": (family("smollm3"), "smollm3"),
    "stablelm": (family("stablelm"), "stablelm"),
    "stablelm 2": (family("stablelm 2"), "stablelm"),
}


def linears_of(block: Block) -> Iterator[Linear]:
    mlp = block.mlp
    experts = mlp.experts if isinstance(mlp, MixtureMlp) else (mlp,)
    yield from (block.qkv, block.o)
    for expert in experts:
        assert isinstance(expert, GatedMlp)
        yield from (expert.gate_up, expert.down)


def logits(path: Path) -> tuple[torch.Tensor, list[int]]:
    """At the ends of a prompt's chunks and of each greedy token's step, and all tokens."""
    driver = Driver(load_runner(path))
    running = driver.add(PROMPT, room=STEPS)
    driver.feed((running, 3))
    driver.feed((running, 40))
    driver.greedy([running], STEPS)
    return torch.stack(running.logits), running.tokens


_SCALED_OTHERWISE = ("llama 3", "phi4 mini")
"""What scales their RoPE is kept as factors of each frequency, or rounded to 32 bits."""


def shape(path: Path, model: str) -> str:
    """What the model is computed by; numbers as exact as 32-bit floats are."""
    config = replace(read_model_config(path), architecture="", eos_token_ids=())
    if model in _SCALED_OTHERWISE:
        config = replace(config, rope=RopeConfig())
    return re.sub(r"\d+\.\d*(e-?\d+)?|\d+e-?\d+", lambda found: f"{float(found[0]):.5g}", repr(config))


@pytest.mark.parametrize("model", MODELS)
def test_a_file_of_each_family_has_the_shape_and_the_logits_of_its_folder(tmp_path: Path, model: str) -> None:
    make, name = MODELS[model]
    folder = make(tmp_path / "folder")
    file = write_gguf(folder, tmp_path / "model.gguf", name=name.partition(" ")[0])
    assert shape(file, model) == shape(folder, model)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    lacking = "model.gguf has no tokenizer: it lacks tokenizer.ggml.model"
    assert inspect(file).problem == ("" if has_tokenizer else lacking)
    (expected, expected_tokens), (found, tokens) = logits(folder), logits(file)
    assert tokens == expected_tokens
    is_exact = model not in _SCALED_OTHERWISE
    torch.testing.assert_close(found, expected, atol=0.0 if is_exact else 5e-5, rtol=0.0)


@pytest.mark.parametrize("model", MODELS)
def test_a_tensor_that_a_file_lacks_goes_by_the_name_that_it_would_have_there(tmp_path: Path, model: str) -> None:
    make, name = MODELS[model]
    file = write_gguf(make(tmp_path / "folder"), tmp_path / "model.gguf", name=name.partition(" ")[0])
    whole, empty = GgufModel(file), GgufModel(file)
    vars(empty)["pieces"] = {}
    own = {place: whole.name_in_file(place) for place in whole.pieces}
    assert {whole.tensors[own[place]] for place in own} == {piece.tensor for piece in whole.pieces.values()}
    assert {place: empty.name_in_file(place) for place in own} == own


def test_a_file_with_fewer_experts_than_its_metadata_says_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder", "Qwen3MoeForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": config["num_experts"] + 1}))
    [weights] = folder.glob("*.safetensors")
    tensors = load_file(weights)
    routers = {name: tensor for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")}
    save_file(tensors | {name: torch.cat((tensor, tensor[:1])) for name, tensor in routers.items()}, weights)
    problem = inspect(write_gguf(folder, tmp_path / "model.gguf")).problem
    assert re.match(r"the tensor blk\.0\.ffn_gate_exps\.weight in model\.gguf is \d+x\d+x\d+, less than its", problem)


def test_every_family_is_computed_from_a_file_here() -> None:
    assert {name for _, name in MODELS.values()} == FAMILIES.keys()


def test_a_file_with_a_tensor_for_each_expert_is_read_as_one_with_all_in_one(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder", "MixtralForCausalLM")
    files = [write_gguf(folder, tmp_path / f"{apart}.gguf", apart=apart) for apart in (False, True)]
    (expected, _), (found, _) = map(logits, files)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "model", [tiny("Qwen2MoeForCausalLM", dtype="float16"), family("gemma2", dtype="float16", **_GEMMA)]
)
def test_16_bit_floats_are_read_exactly(tmp_path: Path, model: Make) -> None:
    folder = model(tmp_path / "folder")
    found, expected = logits(write_gguf(folder, tmp_path / "model.gguf", kind="F16")), logits(folder)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("native", [None, False], ids=["from codes", "decoded"])
def test_8_bit_blocks_give_about_the_same_logits(tmp_path: Path, native: bool | None) -> None:
    folder = make_tiny_model(tmp_path / "folder")
    file = write_gguf(folder, tmp_path / "model.gguf", kind="Q8_0")
    driver, exact = Driver(load_runner(file, native=native)), Driver(load_runner(folder))
    found, expected = driver.feed((driver.add(PROMPT), None)), exact.feed((exact.add(PROMPT), None))
    assert (found - expected).abs().mean() < 0.05 * expected.std()


NARROW = ("qwen2 moe", "qwen3 moe")
"""Their experts have fewer inputs than a block."""


APART = {"mixtral": 0.15, "phi4 mini": 0.08}
"""A token may go to other experts; and of random weights, those of phi4 make the most of a rounding: 0.066 seen."""


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("model", [model for model in MODELS if model not in NARROW])
def test_what_is_computed_from_codes_is_about_what_is_decoded_and_takes_what_was_planned(
    tmp_path: Path, model: str, kind: str
) -> None:
    make, name = MODELS[model]
    file = write_gguf(make(tmp_path / "folder"), tmp_path / "model.gguf", name=name.partition(" ")[0], kind=kind)
    spec = ModelSpec(path=file, name="m", device="cpu")
    loaded = load_decoder(file, spec, report=ignore_progress, cancelled=never)
    coded, decoded = Driver(load_runner(file)), Driver(load_runner(file, native=False))
    found, expected = coded.feed((coded.add(PROMPT), None)), decoded.feed((decoded.add(PROMPT), None))
    assert (found - expected).abs().mean() < APART.get(model, 0.05) * expected.std()
    linears = [each for block in loaded.decoder.stages[0].blocks for each in linears_of(block)]
    embedding = loaded.decoder.embedding
    assert isinstance(embedding, CodedEmbedding)
    assert (loaded.decoder.head is embedding.layer) == loaded.decoder.config.tie_embeddings
    linears += [loaded.decoder.head, embedding.layer]
    assert all(linear_kind(each).endswith("from the file's codes") for each in linears)
    planned = costs_of(read_facts(spec), spec, "cpu", Workload(), bfloat16=True)
    assert planned.weights_bytes == pytest.approx(loaded.layout.first.weights_bytes, rel=0.05)
    weights = {each.weight.data_ptr(): each.weight.nbytes for each in linears if isinstance(each, NativeLinear)}
    assert loaded.layout.first.weights_bytes == pytest.approx(sum(weights.values()), rel=0.05)


SIMULATED = (DeviceShare(device="sim:0", layers=2, weights_bytes=2**26, kv_bytes=2**20),)


@pytest.mark.parametrize(
    "settings",
    [{"weights": "int8"}, {"dtype": "float16"}, {"native": False}, {"device": "sim:0", "shares": SIMULATED}],
    ids=["int8", "float16", "without kernels", "simulated"],
)
def test_what_asks_for_decoded_weights_has_them(tmp_path: Path, settings: dict[str, Any]) -> None:
    file = write_gguf(make_tiny_model(tmp_path / "folder"), tmp_path / "model.gguf", kind="Q8_0")
    spec = ModelSpec(**{"path": file, "name": "m", "device": "cpu"} | settings)
    loaded = load_decoder(file, spec, report=ignore_progress, cancelled=never)
    assert "codes" not in linear_kind(loaded.decoder.stages[0].blocks[0].qkv)


@pytest.mark.parametrize("kinds", [{"attn_k": "Q4_0"}, {"attn_v": "F16"}, {"ffn_up": "Q5_1"}, {"attn_output": "F16"}])
def test_tensors_of_several_formats_give_about_the_same_logits(tmp_path: Path, kinds: dict[str, str]) -> None:
    folder = make_tiny_model(tmp_path / "folder")
    file = write_gguf(folder, tmp_path / "model.gguf", kind="Q8_0", kinds=kinds)
    driver, exact = Driver(load_runner(file)), Driver(load_runner(file, native=False))
    found, expected = driver.feed((driver.add(PROMPT), None)), exact.feed((exact.add(PROMPT), None))
    assert (found - expected).abs().mean() < 0.05 * expected.std()
    spec = ModelSpec(path=file, name="m", device="cpu")
    loaded = load_decoder(file, spec, report=ignore_progress, cancelled=never)
    planned = costs_of(read_facts(spec), spec, "cpu", Workload(), bfloat16=True)
    assert planned.weights_bytes == pytest.approx(loaded.layout.first.weights_bytes, rel=0.02)


_OLMO = {"general.architecture": "olmo2", "olmo2.attention.sliding_window": 4096}
_MISTRAL = {"general.architecture": "mistral3", "mistral3.attention.temperature_scale": 0.1}
_SCALED = {"general.architecture": "llama", "llama.rope.scaling.type": "another", "llama.rope.scaling.factor": 2.0}
_YARN = {"general.architecture": "llama", "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
_EXTRAPOLATED = _YARN | {"llama.rope.scaling.yarn_ext_factor": 0.5}
_ATTENDED = _YARN | {"llama.rope.scaling.attn_factor": 1.2}
_WITHOUT_FACTORS = {"general.architecture": "phi3", "phi3.rope.scaling.type": "longrope"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (_OLMO, "OLMo 3"),
        (_MISTRAL, "temperature_scale"),
        (_SCALED, "another"),
        (_EXTRAPOLATED, r"extrapolation \(llama\.rope\.scaling\.yarn_ext_factor\)"),
        (_EXTRAPOLATED | {"llama.rope.scaling.yarn_ext_factor": 0.0}, "yarn_ext_factor"),
        (_ATTENDED, r"attention \(llama\.rope\.scaling\.attn_factor\)"),
        (_WITHOUT_FACTORS, r"longrope \(phi3\.rope\.scaling\.type\); it lacks the factors"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        config_of(header_with(fields))


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": -1.0}
            | {"rope.scaling.yarn_attn_factor": 1.5},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.0}
            | {"rope.scaling.yarn_log_multiplier": 0.5},
            {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        ),
    ],
    ids=["linear of old files", "transformers' attention factor", "log multiplier"],
)
def test_constants_of_rope_are_those_of_the_metadata(fields: dict[str, object], scaling: dict[str, object]) -> None:
    named = {f"llama.{key}": value for key, value in fields.items()}
    config = config_of(header_with({"general.architecture": "llama"} | named))
    assert config["rope_scaling"] == scaling | {SOURCE: config[SOURCE]}


def header_with(fields: dict[str, object]) -> GgufHeader:
    """That of a file with one matrix."""
    name = fields["general.architecture"]
    sizes = {"block_count": 1, "embedding_length": 64, "attention.head_count": 4, "context_length": 64}
    file = Path("model.gguf")
    embedding = GgufTensor(file, (320, 64), FORMATS[0], 0)
    return GgufHeader(
        file, {**fields, **{f"{name}.{key}": size for key, size in sizes.items()}}, {"token_embd.weight": embedding}
    )
