"""config.json and the settings of a load become one checked value, or one sentence naming what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.backends.common.families import architectures
from engine.backends.common.model_config import ModelConfig, read_model_config
from engine.backends.common.torch_load_settings import apply_settings, refuse_settings
from engine.config import ModelSpec
from engine.errors import InvalidRequest, UnsupportedModel
from tests.fakes.tiny_models import tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
    "original_max_position_embeddings": 128,
}


def read(folder: Path, architecture: str = "LlamaForCausalLM", **overrides: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(tiny_config(architecture, **overrides)))
    return read_model_config(folder)


def spec(**settings: Any) -> ModelSpec:
    return ModelSpec(path=Path("model"), name="model", **settings)


def test_an_unknown_architecture_is_refused_by_name_with_those_that_are_known_in_the_details(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="unsupported architecture: GPT2LMHeadModel") as refusal:
        read(tmp_path, "GPT2LMHeadModel")
    assert refusal.value.details["supported"] == ", ".join(architectures())


@pytest.mark.parametrize("method", ["aqlm", "bitsandbytes", "hqq", "modelopt"])
def test_quantised_weights_that_are_not_read_are_refused_by_the_name_of_their_method(
    tmp_path: Path, method: str
) -> None:
    with pytest.raises(UnsupportedModel, match=method) as refusal:
        read(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    assert "exl2, exl3, gptq and awq of 4 bits, fp8 and unquantised" in refusal.value.message


@pytest.mark.parametrize("declared", ["exl2", [], {}, {"quant_method": None}])
def test_a_quantisation_that_is_not_named_is_refused(tmp_path: Path, declared: object) -> None:
    with pytest.raises(UnsupportedModel, match="unknown"):
        read(tmp_path, quantization_config=declared)


@pytest.mark.parametrize("method", ["exl2", "exl3", "gptq", "awq", "fp8"])
def test_quantised_weights_that_are_read_are_known_by_their_method(tmp_path: Path, method: str) -> None:
    config = read(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    assert config.quantisation is not None
    assert config.quantisation.method == method


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 15}, "heads of 15 elements"),
        ({"hidden_act": "relu"}, "relu"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor"),
        ({"rope_scaling": YARN | {"beta_fast": 0}}, "beta_fast"),
        ({"rope_scaling": YARN | {"beta_slow": -1}}, "beta_slow"),
        ({"rope_scaling": YARN | {"rope_theta": 1.0}}, "rope_theta = 1"),
        ({"rope_scaling": YARN | {"factor": math.e, "mscale": 1, "mscale_all_dim": -10}}, "mscale_all_dim = -10"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 1}}, "high_freq_factor"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7 + [0]}}, "long_factor"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_by_what_is_wrong(
    tmp_path: Path, overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        read(tmp_path, **overrides)
    assert named in refusal.value.message


@pytest.mark.parametrize(
    "published",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 16.0, "finetuned": True, "original_max_position_embeddings": 8192}},
        {"rope_scaling": YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0}},
        {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "attention_factor": None}},
        {"rope_scaling": LONGROPE | {"type": "su", "long_factor": [1.08, 1.1, 1.2, 2, 8, 32, 63.5, 64]}},
        {"rope_scaling": {"type": "dynamic", "factor": 2}, "max_position_embeddings": 10**9},
        {"rope_scaling": None, "rope_theta": 10_000_000, "head_dim": None, "pad_token_id": None, "rms_norm_eps": 1e-8},
    ],
)
def test_what_published_configs_say_is_taken(tmp_path: Path, published: dict[str, Any]) -> None:
    assert read(tmp_path, **published).max_model_len >= 512


def test_a_folder_without_config_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_config_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_single_end_token_and_a_list_of_them_are_both_read(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=7).eos_token_ids == (7,)
    assert read(tmp_path, eos_token_id=[7, 9]).eos_token_ids == (7, 9)
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()


def test_a_null_window_of_mistral_and_an_unused_one_of_qwen_mean_no_window(tmp_path: Path) -> None:
    assert read(tmp_path, "MistralForCausalLM", sliding_window=None).traits.windows == (None,) * 2
    assert read(tmp_path, "Qwen2ForCausalLM", sliding_window=32, use_sliding_window=False).traits.windows == (None,) * 2
    assert read(tmp_path, "MistralForCausalLM", sliding_window=32).traits.windows == (32,) * 2


def test_qwens_first_layers_have_no_window(tmp_path: Path) -> None:
    config = read(tmp_path, "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    assert config.traits.windows == (None, 32)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
    ],
)
def test_the_context_is_as_long_as_the_scaling_makes_it(
    tmp_path: Path, scaling: dict[str, Any] | None, expected: int
) -> None:
    assert apply_settings(read(tmp_path, rope_scaling=scaling), spec()).max_model_len == expected


def test_a_context_whose_scaling_spares_layers_with_a_window_is_given_as_it_is(tmp_path: Path) -> None:
    """As Gemma 3's are, from 4B on: max_position_embeddings has the factor in it."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert read(tmp_path, rope_scaling=scaling, rope_local_base_freq=10_000.0).max_model_len == 512


def test_alpha_value_and_compress_pos_emb_stretch_the_context(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert apply_settings(config, spec(alpha_value=2.0)).max_model_len == 1024
    assert apply_settings(config, spec(compress_pos_emb=3.0)).max_model_len == 1536
    assert apply_settings(config, spec(alpha_value=2.0, max_model_len=600)).max_model_len == 600


def test_a_context_longer_than_the_model_takes_is_refused_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="600") as refusal:
        apply_settings(read(tmp_path), spec(max_model_len=600))
    assert refusal.value.details["param"] == "max_model_len"
    assert refusal.value.details["limit"] == 512


@pytest.mark.parametrize("param", ["alpha_value", "compress_pos_emb"])
@pytest.mark.parametrize("value", [0.5, 0.0, -1.0, 1e300, float("nan"), float("inf")])
def test_a_stretch_below_one_or_beyond_reason_is_refused_by_its_name(tmp_path: Path, param: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=param):
        apply_settings(read(tmp_path), spec(**{param: value}))


@pytest.mark.parametrize(
    ("param", "settings"),
    [
        ("gpu_split", {"gpu_split_gb": (8.0,)}),
        ("gpu_balance", {"gpu_balance": True}),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_its_name(param: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        refuse_settings(spec(**settings), on_cpu=True)
    assert refusal.value.details["param"] == param
    assert param in refusal.value.message


def test_balancing_workers_over_gpus_is_not_the_backends_to_refuse() -> None:
    refuse_settings(spec(gpu_balance=True), on_cpu=False)
