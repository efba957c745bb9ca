"""`python -m tools.exl2_writer`: what it makes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.models.inspect import inspect
from tests.fakes import exl2_tensors
from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model
from tests.integration.quantize.written import TENSORS, nothing_but, stored_bits, weights
from tools.exl2_writer.__main__ import main
from tools.exl2_writer.quantize import QuantizeProgress, quantize_folder


@pytest.mark.parametrize("bits", [4.65, 8.0])
def test_the_demo_model_is_made_at_the_bits_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: float
) -> None:
    target = tmp_path / "demo-exl2"
    assert main(["demo", str(target), "--bits", str(bits)]) == 0
    tensors = weights(target)
    assert bits - 0.02 <= stored_bits(tensors) <= bits
    assert nothing_but(
        target, "config.json", "generation_config.json", "output.safetensors", "tokenizer.json", "tokenizer_config.json"
    )
    told = capsys.readouterr()
    assert f"{stored_bits(tensors):.3f} bits per weight" in told.out
    assert "rounded to nearest" in told.out
    assert "Nothing was calibrated" in told.out
    assert "worst layer  " in told.out
    assert "measuring" in told.err
    assert "writing 100%" in told.err


def test_the_config_declares_what_exllamav2_expects_and_that_nothing_was_calibrated(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    quantize_folder(tiny, target, bits=5.0, head_bits=8)
    config = json.loads((target / "config.json").read_text())
    declared = config.pop("quantization_config")
    assert (declared["quant_method"], declared["bits"], declared["head_bits"]) == ("exl2", 5.0, 8)
    assert declared["calibration"]["rows"] == 0
    assert config == json.loads((tiny / "config.json").read_text())
    assert inspect(target).quantisation == "exl2 5.0 bpw"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_decoded_to_nearly_its_weights(tmp_path: Path, architecture: str) -> None:
    source = make_tiny_model(tmp_path / "source", architecture, num_hidden_layers=1)
    quantize_folder(source, tmp_path / "out", bits=7.9, head_bits=8)
    original, made = weights(source), weights(tmp_path / "out")
    for name, weight in original.items():
        key, _, kind = name.rpartition(".")
        if f"{key}.q_weight" not in made:
            assert torch.equal(made[name], weight.half())
        elif kind == "bias":
            assert torch.equal(made[name][: len(weight)], weight.half())
        else:
            parts = {part: made[f"{key}.{part}"] for part in TENSORS}
            decoded = exl2_tensors.dequantise_by_rules(parts, len(weight)).t().float()
            assert (decoded - weight).norm() < 0.03 * weight.norm()


def test_a_tied_model_gets_a_head_of_its_own_unless_it_is_to_keep_it(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", tie=True, num_hidden_layers=1)
    quantize_folder(source, tmp_path / "six", bits=5.0)
    quantize_folder(source, tmp_path / "kept", bits=5.0, head_bits=16)
    six, kept = weights(tmp_path / "six"), weights(tmp_path / "kept")
    assert set(six["lm_head.q_groups"][::2].tolist()) == {6}
    assert not any(name.startswith("lm_head") for name in kept)


def test_a_head_that_is_kept_is_stored_in_half_precision(tiny: Path, tmp_path: Path) -> None:
    quantize_folder(tiny, tmp_path / "out", bits=5.0, head_bits=16)
    assert torch.equal(weights(tmp_path / "out")["lm_head.weight"], weights(tiny)["lm_head.weight"].half())


def test_shards_hold_the_same_as_one_file_under_the_librarys_names(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", shards=3)
    quantize_folder(source, tmp_path / "one", bits=5.0)
    summary = quantize_folder(source, tmp_path / "many", bits=5.0, shard_bytes=60_000)
    names = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert len(names) > 1
    assert names == [f"output-{number + 1:05}-of-{len(names):05}.safetensors" for number in range(len(names))]
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert not (tmp_path / "many" / "model.safetensors.index.json").exists()
    assert summary.file_bytes == sum(file.stat().st_size for file in (tmp_path / "many").glob("*.safetensors"))


def test_the_summary_counts_every_weight_once(tiny: Path, tmp_path: Path) -> None:
    summary = quantize_folder(tiny, tmp_path / "out", bits=4.0)
    matrices = [weight for name, weight in weights(tiny).items() if weight.dim() == 2 and "embed" not in name]
    assert sum(summary.width_weights.values()) == sum(weight.numel() for weight in matrices)
    assert all(more > less for more, less in pairwise(summary.width_errors.values()))


def test_progress_ends_at_all_weights_in_both_phases(tiny: Path, tmp_path: Path) -> None:
    seen: list[QuantizeProgress] = []
    quantize_folder(tiny, tmp_path / "out", bits=4.0, report=seen.append)
    for phase in ("measure", "write"):
        done = [progress.done for progress in seen if progress.phase == phase]
        assert done == sorted(done)
        assert done[-1] == next(progress.total for progress in seen if progress.phase == phase)
