"""`python -m tools.exl2_writer`: what it refuses, and what is left where it is cancelled or fails: nothing."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.demo import model_path
from engine.errors import EngineError, LoadCancelled, UnsupportedModel
from tests.fakes.tiny_models import make_tiny_model
from tests.integration.quantize.written import nothing_but
from tools.exl2_writer.__main__ import main
from tools.exl2_writer.quantize import QuantizeProgress, quantize_folder


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("demo", "OUT", "--bits", "9"), "bits must be between 2 and 8, not 9"),
        (("demo", "OUT", "--bits", "1.99"), "bits must be between 2 and 8, not 1.99"),
        (("demo", "OUT", "--bits", "nan"), "bits must be between 2 and 8, not nan"),
        (("demo", "OUT", "--bits", "2"), "2 bits per weight are too few"),
        (("demo", "OUT", "--bits", "4", "--head-bits", "7"), "head_bits must be one of 2, 3, 4, 5, 6, 8, 16, not 7"),
        (("demo", "OUT", "--bits", "4", "--group-size", "48"), "group_size must be one of 32, 64, 128, not 48"),
        (("demo", "OUT/deep", "--bits", "4"), "there is no folder"),
        (("no-such-model", "OUT", "--bits", "4"), "no model is called no-such-model"),
        (("some/model", "OUT", "--bits", "4"), "some/model is not on this machine"),
    ],
)
def test_a_bad_value_is_named_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert main([*(value.replace("OUT", str(tmp_path / "out")) for value in argv)]) == 2
    assert said in capsys.readouterr().err
    assert nothing_but(tmp_path)


def test_arguments_that_are_missing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo"])
    assert ended.value.code == 2
    assert "DST, --bits" in capsys.readouterr().err


def test_a_folder_that_is_not_empty_is_not_touched(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(EngineError, match="exists and is not an empty folder"):
        quantize_folder(tiny, tmp_path / "out", bits=4.0)
    assert nothing_but(tmp_path / "out", "mine")


def test_a_folder_that_cannot_be_looked_into_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="there is no folder"):
        quantize_folder(tiny, tmp_path / ("n" * 300) / "out", bits=4.0)


def test_an_empty_folder_is_filled(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    quantize_folder(tiny, tmp_path / "out", bits=4.0)
    assert (tmp_path / "out" / "output.safetensors").is_file()
    assert nothing_but(tmp_path, "tiny", "out")


def test_a_disk_that_is_short_is_refused_with_numbers_before_the_work(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    measured: list[QuantizeProgress] = []
    with pytest.raises(EngineError, match=r"the disk is short: .* needs up to 0\.00 GB") as refusal:
        quantize_folder(tiny, tmp_path / "out", bits=4.0, report=measured.append)
    assert refusal.value.details["free_bytes"] == 1000
    assert measured == []


def test_the_space_asked_for_is_enough_and_not_much_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 10**6, 0))
    with pytest.raises(EngineError) as refusal:
        quantize_folder(model_path(), tmp_path / "out", bits=4.0)
    monkeypatch.undo()
    quantize_folder(model_path(), tmp_path / "out", bits=4.0)
    taken = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert taken <= int(str(refusal.value.details["needed_bytes"])) <= taken + 2**20 + 10_000


def test_what_is_quantised_already_is_refused(tiny: Path, tmp_path: Path) -> None:
    quantize_folder(tiny, tmp_path / "once", bits=4.0)
    with pytest.raises(UnsupportedModel, match=r"quantised already \(exl2\)"):
        quantize_folder(tmp_path / "once", tmp_path / "twice", bits=4.0)


@pytest.mark.parametrize("name", ["chat_template.jinja", "LICENSE", "model.safetensors"])
def test_a_file_from_outside_of_the_folder_is_not_copied(tiny: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (tiny / name).rename(outside) if (tiny / name).exists() else outside.write_text("sk-of-the-operator")
    (tiny / name).symlink_to("../outside")
    with pytest.raises(UnsupportedModel, match="is a link that leads out of the folder"):
        quantize_folder(tiny, tmp_path / "out", bits=4.0)
    assert nothing_but(tmp_path, "tiny", "outside")


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", num_local_experts=8)
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        quantize_folder(source, tmp_path / "out", bits=4.0)


def edited(source: Path, **changes: Tensor | None) -> Path:
    file = source / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return source


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.layers.0.self_attn.q_proj.weight": None}, "lack model.layers.0.self_attn.q_proj.weight"),
        ({"model.layers.0.attn.qkv.weight": torch.zeros(96, 64)}, "model.layers.0.attn.qkv.weight is no tensor"),
        ({"model.norm.weight": None}, "lack model.norm.weight"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "model.norm.weight is stored as I8"),
        ({"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 40)}, "input features in a multiple of 32"),
        ({"model.norm.weight": torch.full((64,), 1e9)}, "numbers that half precision cannot"),
        ({"model.layers.0.mlp.up_proj.weight": torch.full((64, 64), torch.nan)}, "numbers that half precision cannot"),
    ],
)
def test_a_source_that_cannot_be_quantised_is_refused_by_the_tensors_name(
    tiny: Path, tmp_path: Path, changes: dict[str, Tensor | None], said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        quantize_folder(edited(tiny, **changes), tmp_path / "out", bits=4.0)
    assert nothing_but(tmp_path, "tiny")


@pytest.mark.parametrize("phase", ["measure", "write"])
def test_cancelling_leaves_nothing(tiny: Path, tmp_path: Path, phase: str) -> None:
    seen: list[str] = []
    with pytest.raises(LoadCancelled, match="quantising was cancelled"):
        quantize_folder(
            tiny,
            tmp_path / "out",
            bits=4.0,
            report=lambda progress: seen.append(progress.phase),
            cancelled=lambda: seen[-1] == phase,
        )
    assert nothing_but(tmp_path, "tiny")


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_with_130_and_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    def strike(self: object, progress: QuantizeProgress) -> None:
        if progress.phase == "write":
            signal.raise_signal(kind)

    monkeypatch.setattr("tools.exl2_writer.__main__.ProgressLine.show", strike)
    before = signal.getsignal(kind)
    assert main([str(tiny), str(tmp_path / "out"), "--bits", "4"]) == 130
    assert nothing_but(tmp_path, "tiny")
    assert signal.getsignal(kind) is before


def test_a_disk_that_fills_up_meanwhile_ends_with_1_and_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: object, name: str, tensor: Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tools.exl2_writer.safetensors_writer.ShardedWriter.write", full)
    assert main([str(tiny), str(tmp_path / "out"), "--bits", "4"]) == 1
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert nothing_but(tmp_path, "tiny")
