"""What a model folder is, from its config and headers, and why it cannot be loaded if it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.inspect import inspect
from tests.fakes.model_folders import LLAMA, write_model, write_safetensors

COMPRESSED_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


def test_a_plain_model_is_described_by_its_files(tmp_path: Path) -> None:
    entry = inspect(write_model(tmp_path / "small"))
    assert (entry.name, entry.path, entry.problem) == ("small", tmp_path / "small", "")
    assert (entry.architecture, entry.quantisation, entry.dtype) == ("LlamaForCausalLM", "", "bfloat16")
    assert (entry.parameters, entry.context_tokens) == (203, 2048)
    assert entry.weights_bytes == (tmp_path / "small" / "model.safetensors").stat().st_size


def test_shards_are_counted_together_and_only_those_of_the_index(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model-1.safetensors", {"a": ("F16", (5,))})
    write_safetensors(folder / "model-2.safetensors", {"b": ("F16", (7,))})
    write_safetensors(folder / "consolidated.safetensors", {"c": ("F16", (100,))})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    entry = inspect(folder)
    assert (entry.parameters, entry.problem) == (12, "")
    (folder / "model-2.safetensors").unlink()
    assert inspect(folder).problem == "1 of 2 weight files are missing, model-2.safetensors first"


@pytest.mark.parametrize(
    ("tensors", "quantization", "label", "parameters"),
    [
        (
            {
                "l.q_weight": ("I32", (20, 32)),
                "l.q_invperm": ("I32", (128,)),
                "l.q_scale": ("I32", (4, 4)),
                "l.q_scale_max": ("F16", (4,)),
                "l.q_groups": ("I16", (8,)),
                "norm.weight": ("F16", (128,)),
            },
            {"quant_method": "exl2", "bits": 5.0},
            "exl2 5.0 bpw",
            128 * 32 + 128,
        ),
        (
            {
                "l.trellis": ("I16", (8, 16, 48)),
                "l.suh": ("F16", (128,)),
                "l.svh": ("F16", (256,)),
                "l.mcg": ("I32", ()),
                "m.trellis": ("I16", (8, 8, 96)),
                "m.su": ("I16", (8,)),
                "m.sv": ("I16", (8,)),
                "m.mul1": ("I32", ()),
                "norm.weight": ("F16", (128,)),
            },
            {"quant_method": "exl3", "bits": 4.03, "head_bits": 6},
            "exl3 4.0 bpw",
            128 * 256 + 128 * 128 + 128,
        ),
        (
            {
                "l.qweight": ("I32", (16, 32)),
                "l.qzeros": ("I32", (1, 4)),
                "l.scales": ("F16", (1, 32)),
                "l.g_idx": ("I32", (128,)),
            },
            {"quant_method": "gptq", "bits": 4},
            "gptq 4-bit",
            128 * 32,
        ),
        (
            {"l.qweight": ("I32", (128, 4)), "l.qzeros": ("I32", (1, 4)), "l.scales": ("F16", (1, 32))},
            {"quant_method": "awq", "bits": 4, "version": "gemm"},
            "awq 4-bit",
            128 * 32,
        ),
        (
            {"l.weight": ("F8_E4M3", (256, 130)), "l.weight_scale_inv": ("F32", (2, 2)), "n": ("BF16", (2,))},
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "fp8",
            256 * 130 + 2,
        ),
        (
            {"l.weight": ("F8_E4M3", (8, 16)), "l.weight_scale": ("BF16", (8, 1)), "l.input_scale": ("F32", ())},
            COMPRESSED_FP8,
            "fp8",
            8 * 16,
        ),
        (
            {"l.weight": ("U8", (2048, 1)), "l.weight.absmax": ("F32", (64,))},
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "bitsandbytes 4-bit",
            4096,
        ),
    ],
    ids=["exl2", "exl3", "gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes"],
)
def test_packed_weights_are_named_and_their_parameters_counted(
    tmp_path: Path, tensors: dict[str, Any], quantization: dict[str, Any], label: str, parameters: int
) -> None:
    entry = inspect(write_model(tmp_path, tensors, quantization_config=quantization))
    assert (entry.quantisation, entry.parameters) == (label, parameters)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "exl2", "bits": 5.0},
        {"quant_method": "exl3", "bits": 3.5},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8"},
    ],
)
def test_packed_weights_that_can_be_read_are_no_problem(tmp_path: Path, quantization: dict[str, Any]) -> None:
    entry = inspect(write_model(tmp_path, {"norm.weight": ("F16", (8,))}, quantization_config=quantization))
    assert (entry.problem, entry.dtype) == ("", "float16")


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "aqlm", "bits": 2}, "aqlm"),
        ({"quant_method": "gptq", "bits": 8}, "gptq of 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in the version gemv"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "the format pack-quantized"),
    ],
)
def test_packed_weights_that_are_not_read_are_refused_by_name(
    tmp_path: Path, quantization: dict[str, Any], named: str
) -> None:
    assert named in inspect(write_model(tmp_path, quantization_config=quantization)).problem


@pytest.mark.parametrize(
    ("tensors", "method"),
    [
        ({"l.q_weight": ("I32", (20, 32))}, "exl2"),
        ({"l.trellis": ("I16", (8, 8, 64))}, "exl3"),
        ({"l.trellis": ("I16", ())}, "exl3"),
        ({"l.qweight": ("I32", (20, 32))}, "gptq"),
        ({"l.qweight": ("I32", (16, 32)), "l.scales": ("F16", (1, 32))}, "gptq"),
        ({"l.qweight": ("I32", (128, 4)), "l.scales": ("F16", (1, 32))}, "awq"),
        ({"l.weight": ("F8_E4M3", (20, 32)), "l.weight_scale_inv": ("F32", (1, 1))}, "fp8"),
        ({"l.qweight": ("I32", ())}, "gptq"),
    ],
)
def test_packed_weights_are_known_by_their_tensors_too(tmp_path: Path, tensors: dict[str, Any], method: str) -> None:
    entry = inspect(write_model(tmp_path, tensors | {"n": ("F16", (1,))}))
    assert (entry.quantisation, entry.problem) == (method, "")


def test_exl3_is_refused_by_name_where_exllamav2_was_asked_for(tmp_path: Path) -> None:
    folder = write_model(tmp_path, quantization_config={"quant_method": "exl3", "bits": 4.0})
    entry = inspect(folder, lambda quantisation, path: "exllamav2")
    assert entry.problem == "the weights are exl3; exllamav2 reads EXL2, 4-bit GPTQ and floats"


def test_exllamav3_takes_exl3_and_floats_of_its_architectures(tmp_path: Path) -> None:
    packed = write_model(tmp_path / "a", quantization_config={"quant_method": "exl3", "bits": 4.0})
    entry = inspect(packed, lambda quantisation, path: "exllamav3")
    assert (entry.backend, entry.problem, entry.quantisation) == ("exllamav3", "", "exl3 4.0 bpw")
    assert inspect(write_model(tmp_path / "b"), lambda quantisation, path: "exllamav3").problem == ""
    exl2 = write_model(tmp_path / "c", quantization_config={"quant_method": "exl2", "bits": 4.0})
    problem = inspect(exl2, lambda quantisation, path: "exllamav3").problem
    assert problem == "the weights are exl2; exllamav3 reads EXL3 and floats"
    unknown = write_model(tmp_path / "d", architectures=["DbrxForCausalLM"])
    problem = inspect(unknown, lambda quantisation, path: "exllamav3").problem
    assert problem.endswith("unsupported architecture: DbrxForCausalLM (exllamav3)")


def test_8_bit_floats_without_scales_are_refused(tmp_path: Path) -> None:
    entry = inspect(write_model(tmp_path, {"l.weight": ("F8_E4M3", (20, 32)), "n.weight": ("F16", (1,))}))
    assert entry.problem == "the weights are float8_e4m3; bfloat16, float16, float32 can be read"


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    entry = inspect(write_model(tmp_path, architectures=["MambaForCausalLM"]))
    assert entry.architecture == "MambaForCausalLM"
    assert "MambaForCausalLM" in entry.problem
    assert entry.parameters == 203


def test_the_context_length_of_an_unknown_architecture_is_still_shown(tmp_path: Path) -> None:
    config = {"architectures": ["X"], "max_position_embeddings": None, "text_config": {"max_position_embeddings": 99}}
    assert inspect(write_model(tmp_path, **config)).context_tokens == 99


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert inspect(folder).problem.startswith("pytorch_model.bin is a pickle")


def test_a_missing_tokenizer_is_a_problem(tmp_path: Path) -> None:
    assert "tokenizer.json" in inspect(write_model(tmp_path, tokenizer=False)).problem


def test_an_unreadable_dtype_is_named(tmp_path: Path) -> None:
    assert "float64" in inspect(write_model(tmp_path, {"w": ("F64", (2,))})).problem


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "does not begin with a safetensors header"),
        (b"\xff" * 100, "does not begin with a safetensors header"),
        (b"\x05" + bytes(7) + b"{oops", "its header is not valid"),
        (b"\x02" + bytes(7) + b"[]", "its header is not valid"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    ],
    ids=["empty", "noise", "broken json", "other json", "lfs pointer"],
)
def test_a_damaged_weight_file_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    (write_model(tmp_path) / "model.safetensors").write_bytes(content)
    found = inspect(tmp_path).problem
    assert found.startswith("model.safetensors is")
    assert problem in found


def test_a_weight_file_cut_short_says_by_how_much(tmp_path: Path) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert f"has {len(whole) - 10} bytes, {len(whole)} expected" in inspect(tmp_path).problem


@pytest.mark.parametrize("content", ["{broken", "[]", "\xff"])
def test_a_broken_config_is_a_problem_and_no_exception(tmp_path: Path, content: str) -> None:
    (write_model(tmp_path) / "config.json").write_text(content, encoding="latin-1")
    entry = inspect(tmp_path)
    assert "config.json" in entry.problem
    assert entry.parameters == 203


def test_a_folder_that_is_not_there_is_a_problem_and_no_exception(tmp_path: Path) -> None:
    assert "cannot be read" in inspect(tmp_path / "gone").problem


@pytest.mark.parametrize(
    "bad", [{"num_attention_heads": "four"}, {"quantization_config": "exl2"}, {"architectures": 3}]
)
def test_config_values_of_the_wrong_type_are_a_problem_and_no_exception(tmp_path: Path, bad: dict[str, Any]) -> None:
    assert inspect(write_model(tmp_path, **bad)).problem


def test_the_config_of_the_tests_can_be_loaded(tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path, **LLAMA)).problem == ""


def test_what_is_wrong_is_said_by_the_backend_that_would_compute_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "g", architectures=["CohereForCausalLM"])
    asked: list[str] = []
    entry = inspect(folder, lambda quantisation, path: asked.append(quantisation) or "exllamav2")
    assert (entry.backend, entry.problem, entry.context_tokens, asked) == ("exllamav2", "", 2048, [""])
    assert "CohereForCausalLM" in inspect(folder).problem
    unknown = write_model(tmp_path / "m", architectures=["MambaForCausalLM"])
    assert (
        "unsupported architecture: MambaForCausalLM (exllamav2)"
        in inspect(unknown, lambda quantisation, path: "exllamav2").problem
    )
