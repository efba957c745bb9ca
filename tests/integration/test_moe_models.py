"""Mixtures of experts in our own model: as transformers computes them, however they are stored and batched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.backends.checkpoints import checkpoint as checkpoints
from engine.backends.torch.weights import model_loader
from engine.config import AdapterSpec
from engine.errors import EngineError, InvalidRequest, ModelLoadFailed, UnsupportedModel
from tests.fakes.adapters import ATTENTION, make_adapter, merge_by_hand
from tests.fakes.oracle import Driver, Running, load_runner, reference_greedy, reference_logits
from tests.fakes.quantised_folders import Method, make_twins
from tests.fakes.tiny_models import MIXTURES, make_tiny_model

PROMPT = [7 * position % 300 + 3 for position in range(45)]
OTHERS = [[11 * position % 300 + 5 for position in range(length)] for length in (3, 70, 21)]
LONG = 200
LAYOUTS = {
    "mixtral": ("MixtralForCausalLM", {}),
    "mixtral-window": ("MixtralForCausalLM", {"sliding_window": 16}),
    "mixtral-gelu": ("MixtralForCausalLM", {"hidden_act": "gelu"}),
    "mixtral-all": ("MixtralForCausalLM", {"num_experts_per_tok": 8}),
    "qwen2-some-dense": ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    "qwen2-normalised": ("Qwen2MoeForCausalLM", {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2-windows": (
        "Qwen2MoeForCausalLM",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2, "num_hidden_layers": 4},
    ),
    "qwen3": ("Qwen3MoeForCausalLM", {"tie": True}),
    "qwen3-plain-weights": ("Qwen3MoeForCausalLM", {"norm_topk_prob": False, "mlp_only_layers": [0]}),
    "qwen3-window": ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 9}),
}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("mixture"), request.param, with_tokenizer=False)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("mixtral"), "MixtralForCausalLM", with_tokenizer=False)


def every_logit(folder: Path, **spec: Any) -> torch.Tensor:
    """Our logits at each position of the prompt, fed in chunks of several sizes."""
    driver = Driver(load_runner(folder, **spec))
    sequence = driver.add(PROMPT)
    driver.feed((sequence, 1))
    driver.feed((sequence, 30))
    while sequence.computed < len(PROMPT):
        driver.feed((sequence, 1))
    return torch.stack(sequence.logits)


def at(logits: torch.Tensor) -> torch.Tensor:
    """The rows that `every_logit` has."""
    return torch.cat((logits[:1], logits[30:]))


@pytest.mark.parametrize(("architecture", "overrides"), LAYOUTS.values(), ids=LAYOUTS)
def test_logits_are_those_of_transformers(tmp_path: Path, architecture: str, overrides: dict[str, Any]) -> None:
    folder = make_tiny_model(tmp_path, architecture, with_tokenizer=False, **overrides)
    torch.testing.assert_close(every_logit(folder), at(reference_logits(folder, PROMPT)), atol=2e-4, rtol=1e-4)


def test_greedy_tokens_are_those_of_transformers_over_200_steps(mixture: Path) -> None:
    driver = Driver(load_runner(mixture))
    running = driver.add(PROMPT, room=LONG)
    driver.greedy([running], LONG)
    assert running.tokens == reference_greedy(mixture, PROMPT, LONG)


def test_a_mixed_batch_gives_each_what_it_gets_alone(mixture: Path) -> None:
    runner = load_runner(mixture)
    prompts = [PROMPT, *OTHERS]

    def alone(prompt: list[int]) -> Running:
        driver = Driver(runner)
        sequence = driver.add(prompt)
        driver.greedy([sequence], 20)
        return sequence

    together = Driver(runner)
    sequences = [together.add(prompt) for prompt in prompts]
    together.feed((sequences[0], 17), (sequences[2], 33))
    together.greedy(sequences, 20)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        expected = alone(prompt)
        assert sequence.tokens == expected.tokens
        torch.testing.assert_close(
            torch.stack(sequence.logits[-20:]), torch.stack(expected.logits), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("original", [True, False], ids=["by expert", "fused"])
def test_folders_that_transformers_saves_are_read_in_either_layout(
    mixture: Path, tmp_path: Path, original: bool
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=original)
    fused = [name for name in load_file(tmp_path / "model.safetensors") if name.endswith("experts.gate_up_proj")]
    assert bool(fused) is not original
    assert torch.equal(every_logit(tmp_path), every_logit(mixture))


def test_the_file_of_many_experts_is_opened_for_many_of_them_at_once(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counted(file: str, **settings: Any) -> Any:
        opened.append(file)
        return safe_open(file, **settings)

    monkeypatch.setattr(checkpoints, "safe_open", counted)
    expected = every_logit(mixtral)
    assert len(opened) == 1, "for all of its tensors"
    monkeypatch.setattr(checkpoints, "REOPEN_BYTES", 100_000)
    assert torch.equal(every_logit(mixtral), expected)
    assert 1 + 2 < len(opened) < 1 + 20


def test_a_fused_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "Qwen3MoeForCausalLM", with_tokenizer=False, num_hidden_layers=1)
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "exp" not in name}
    prefix = "model.layers.0.mlp.experts"

    def saved(gate_up: torch.Tensor) -> Path:
        fused = {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": torch.zeros(8, 64, 40)}
        save_file(tensors | fused, folder / "model.safetensors")
        return folder

    with pytest.raises(ModelLoadFailed, match=r"experts\.gate_up_proj in model\.safetensors is 8 x 80, which is not"):
        load_runner(saved(torch.zeros(8, 80)))
    with pytest.raises(ModelLoadFailed, match=r"experts\.0\.gate_proj\.weight in model\.safetensors is 30 x 64; conf"):
        load_runner(saved(torch.zeros(8, 60, 64)))
    with pytest.raises(ModelLoadFailed, match=r"lack the tensor model\.layers\.0\.mlp\.experts\.7\.gate_proj\.weight"):
        load_runner(saved(torch.zeros(7, 80, 64)))


def test_num_experts_is_how_many_a_token_goes_to(mixtral: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, "MixtralForCausalLM", with_tokenizer=False, num_experts_per_tok=5)
    torch.testing.assert_close(
        every_logit(mixtral, num_experts=5), at(reference_logits(other, PROMPT)), atol=2e-4, rtol=1e-4
    )
    assert not torch.allclose(every_logit(mixtral, num_experts=5), every_logit(mixtral), atol=1e-2)


@pytest.mark.parametrize("number", [0, 9])
def test_more_experts_than_there_are_or_none_are_refused_with_their_number(mixtral: Path, number: int) -> None:
    with pytest.raises(InvalidRequest, match=f"num_experts is {number}; this model has 8 experts in a layer"):
        load_runner(mixtral, num_experts=number)


def test_num_experts_of_a_model_without_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="num_experts is 2; this model is not a mixture of experts"):
        load_runner(make_tiny_model(tmp_path, with_tokenizer=False), num_experts=2)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9; a layer has 8 experts"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"num_local_experts": "8"}, "num_local_experts"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_in_a_sentence(
    mixtral: Path, tmp_path: Path, overrides: dict[str, Any], sentence: str
) -> None:
    config = json.loads((mixtral / "config.json").read_text()) | overrides
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=sentence):
        model_loader.read_model_config(tmp_path)


def test_bfloat16_stays_as_close_to_float32_as_transformers_does(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "Qwen2MoeForCausalLM", dtype="bfloat16", hidden_size=128, with_tokenizer=False)
    exact, theirs = (at(reference_logits(folder, PROMPT, dtype)) for dtype in (torch.float32, torch.bfloat16))
    ours = every_logit(folder, dtype="bfloat16")
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize("method", ["exl2", "exl3", "gptq", "awq", "fp8"])
def test_quantised_experts_compute_what_the_weights_compute_that_they_stand_for(tmp_path: Path, method: Method) -> None:
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1, "with_tokenizer": False}
    twins = make_twins(tmp_path, method, "MixtralForCausalLM", **sizes)
    assert torch.equal(every_logit(twins.quantised), every_logit(twins.plain))


def test_adapters_of_attention_are_honoured_beside_experts(mixture: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", mixture, targets=ATTENTION)
    merged = merge_by_hand(mixture, adapter, tmp_path / "merged")
    runner = load_runner(mixture)
    runner.adapters.attach(AdapterSpec(name="a", path=adapter.folder))
    driver = Driver(runner)
    plain, adapted = driver.add(PROMPT), driver.add(PROMPT, adapter="a")
    logits = driver.feed((plain, None), (adapted, None))
    expected = torch.stack([reference_logits(folder, PROMPT)[-1] for folder in (mixture, merged)])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_adapters_of_experts_are_refused_in_one_sentence(mixtral: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path, mixtral, targets=("experts.3.w1",))
    with pytest.raises(EngineError) as refused:
        load_runner(mixtral).adapters.attach(AdapterSpec(name="a", path=adapter.folder))
    assert refused.value.message == (
        "the adapter changes model.layers.0.block_sparse_moe.experts.3.w1; in this model, the projections of "
        "attention, and of no experts, in 2 layers can be adapted"
    )


def test_a_token_is_computed_with_its_own_experts_alone(mixtral: Path) -> None:
    config = json.loads((mixtral / "config.json").read_text())
    idle = config["num_local_experts"] - config["num_experts_per_tok"]
    runner = load_runner(mixtral)
    expert = 3 * config["hidden_size"] * config["intermediate_size"]
    assert runner.parameters - runner.active_parameters == config["num_hidden_layers"] * idle * expert > 0
