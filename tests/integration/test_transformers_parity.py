"""Our model computes what transformers computes: logits and greedy tokens, in float32 on small random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.oracle import Driver, load_runner, reference_greedy, reference_logits
from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model

PROMPT = [7 * position % 300 + 3 for position in range(45)]
STEPS = 24


def assert_same_as_transformers(folder: Path, prompt: list[int] = PROMPT, **spec: Any) -> None:
    """Logits at every position of the prompt, fed in odd chunks, and greedy tokens after it."""
    runner = load_runner(folder, **spec)
    driver = Driver(runner)
    expected = reference_logits(folder, prompt)
    probe = driver.add(prompt)
    for _ in prompt:
        driver.feed((probe, 1))
    torch.testing.assert_close(torch.stack(probe.logits), expected, atol=2e-4, rtol=1e-4)
    whole = driver.add(prompt)
    torch.testing.assert_close(driver.feed((whole, None))[0], expected[-1], atol=2e-4, rtol=1e-4)
    running = driver.add(prompt)
    driver.greedy([running], STEPS)
    assert running.tokens == reference_greedy(folder, prompt, STEPS)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_computes_what_transformers_computes(tmp_path: Path, architecture: str, tie: bool) -> None:
    assert_same_as_transformers(make_tiny_model(tmp_path, architecture, tie=tie))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_any_grouping_of_query_heads_is_honoured(tmp_path: Path, kv_heads: int) -> None:
    assert_same_as_transformers(make_tiny_model(tmp_path, num_key_value_heads=kv_heads))


def test_biases_and_an_explicit_head_size_are_honoured(tmp_path: Path) -> None:
    assert_same_as_transformers(make_tiny_model(tmp_path, attention_bias=True, mlp_bias=True, head_dim=40))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("MistralForCausalLM", {"sliding_window": 16}),
        ("MistralForCausalLM", {"sliding_window": 13}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ],
    ids=["mistral", "mistral-odd", "qwen2-upper-layers", "qwen3-layer-types"],
)
def test_a_sliding_window_shorter_than_the_prompt_is_honoured(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    assert_same_as_transformers(make_tiny_model(tmp_path, architecture, **overrides))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "factor": 2.5},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.4},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=["linear", "linear-old", "llama3", "yarn", "yarn-exact", "yarn-factor", "yarn-mscale", "dynamic"],
)
def test_each_rope_scaling_is_honoured(tmp_path: Path, scaling: dict[str, Any]) -> None:
    assert_same_as_transformers(make_tiny_model(tmp_path, rope_scaling=scaling))


def test_rope_parameters_of_newer_folders_are_honoured(tmp_path: Path) -> None:
    parameters = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}
    assert_same_as_transformers(make_tiny_model(tmp_path, rope_parameters=parameters))


def test_alpha_value_stretches_the_base_as_ntk_aware_scaling_says(tmp_path: Path) -> None:
    head_dim, alpha = 16, 2.5
    stretched = 10_000.0 * alpha ** (head_dim / (head_dim - 2))
    ours = make_tiny_model(tmp_path / "ours", head_dim=head_dim)
    theirs = make_tiny_model(tmp_path / "theirs", head_dim=head_dim, rope_theta=stretched)
    assert_equal_logits(ours, theirs, alpha_value=alpha)


def test_compress_pos_emb_divides_positions(tmp_path: Path) -> None:
    ours = make_tiny_model(tmp_path / "ours")
    theirs = make_tiny_model(tmp_path / "theirs", rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert_equal_logits(ours, theirs, compress_pos_emb=4.0)


def test_a_context_longer_than_the_trained_one_is_exact_to_its_end(tmp_path: Path) -> None:
    prompt = [11 * position % 300 + 3 for position in range(300)]
    ours = make_tiny_model(tmp_path / "ours", max_position_embeddings=100)
    theirs = make_tiny_model(tmp_path / "theirs", rope_scaling={"rope_type": "linear", "factor": 3.0})
    assert_equal_logits(ours, theirs, prompt, compress_pos_emb=3.0)


def assert_equal_logits(ours: Path, theirs: Path, prompt: list[int] = PROMPT, **spec: Any) -> None:
    """Our logits for folder `ours` under `spec` are transformers' for folder `theirs`."""
    driver = Driver(load_runner(ours, **spec))
    logits = driver.feed((driver.add(prompt), None))[0]
    torch.testing.assert_close(logits, reference_logits(theirs, prompt)[-1], atol=2e-4, rtol=1e-4)


def test_a_sharded_folder_loads_like_a_single_file(tmp_path: Path) -> None:
    assert_same_as_transformers(make_tiny_model(tmp_path, shards=3))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_bfloat16_weights_computed_in_bfloat16_stay_close_to_float32(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_model(tmp_path, architecture, dtype="bfloat16", hidden_size=128, intermediate_size=512)
    runner = load_runner(folder, dtype="bfloat16")
    assert runner.dtype_name == "bfloat16"
    driver = Driver(runner)
    logits = driver.feed((driver.add(PROMPT), None))[0]
    exact = reference_logits(folder, PROMPT)[-1]
    theirs = reference_logits(folder, PROMPT, torch.bfloat16)[-1]
    assert (logits - exact).norm() < 1.5 * (theirs - exact).norm() + 1e-3


def test_bfloat16_weights_computed_in_float32_are_exact(tmp_path: Path) -> None:
    assert_same_as_transformers(make_tiny_model(tmp_path, dtype="bfloat16"))


def test_weights_large_enough_to_be_packed_compute_the_same(tmp_path: Path) -> None:
    assert_same_as_transformers(make_tiny_model(tmp_path, hidden_size=512, intermediate_size=640))
