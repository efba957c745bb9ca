"""`ericllm quantize`: an EXL2 folder from a plain one, whole or not there, that answers as its original does."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from console.cli import main
from engine.backends.base import BackendRequest
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.batch import ChunkInput
from engine.backends.torch.quant.quantize import QuantizeProgress, quantize_folder
from engine.config import ModelSpec, SamplingParams
from engine.demo import model_path
from engine.demo.corpus import make_corpus
from engine.errors import EngineError, LoadCancelled, UnsupportedModel
from engine.models.inspect import inspect
from engine.text.tokenizer import Tokenizer
from tests.fakes import exl2_tensors
from tests.fakes.oracle import PAGE_TOKENS, ignore_progress, load_runner, never
from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model

QUESTIONS = Path(__file__).resolve().parents[1] / "data" / "demo_questions.toml"
HELD_OUT_SEED = 987_654_321
"""No round of the demo model's training has it."""

ANSWER_TOKENS = 120
TENSORS = ("q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ERICLLM_CONFIG", raising=False)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", num_hidden_layers=1)


@pytest.fixture(scope="module")
def demo_at(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """The demo model at some widths."""
    folder = tmp_path_factory.mktemp("demo")
    made = {bits: folder / f"{bits:g}" for bits in (2.5, 4.0, 5.0, 6.0, 8.0)}
    for bits, target in made.items():
        quantize_folder(model_path(), target, bits=bits)
    return made


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def stored_bits(tensors: dict[str, Tensor]) -> float:
    """Bits per weight of all packed layers but the head, counted from the file."""
    keys = [name.removesuffix(".q_weight") for name in tensors if name.endswith(".q_weight") and "lm_head" not in name]
    bits = sum(8 * tensors[f"{key}.{part}"].nbytes for key in keys for part in TENSORS)
    return bits / sum(tensors[f"{key}.q_weight"].shape[1] * len(tensors[f"{key}.q_invperm"]) for key in keys)


def nothing_but(folder: Path, *names: str) -> bool:
    return {path.name for path in folder.iterdir()} == set(names)


# -- what it makes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4.65, 8.0])
def test_the_demo_model_is_made_at_the_bits_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: float
) -> None:
    target = tmp_path / "demo-exl2"
    assert main(["quantize", "demo", str(target), "--bits", str(bits)]) == 0
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


# -- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("demo", "OUT", "--bits", "9"), "bits must be between 2 and 8, not 9"),
        (("demo", "OUT", "--bits", "1.99"), "bits must be between 2 and 8, not 1.99"),
        (("demo", "OUT", "--bits", "nan"), "bits must be between 2 and 8, not nan"),
        (("demo", "OUT", "--bits", "2"), "2 bits per weight are too few"),
        (("demo", "OUT", "--bits", "4", "--head_bits", "7"), "head_bits must be one of 2, 3, 4, 5, 6, 8, 16, not 7"),
        (("demo", "OUT", "--bits", "4", "--group-size", "48"), "group_size must be one of 32, 64, 128, not 48"),
        (("demo", "OUT/deep", "--bits", "4"), "there is no folder"),
        (("no-such-model", "OUT", "--bits", "4"), "no model is called no-such-model"),
        (("some/model", "OUT", "--bits", "4"), "some/model is not on this machine"),
    ],
)
def test_a_bad_value_is_named_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert main(["quantize", *(value.replace("OUT", str(tmp_path / "out")) for value in argv)]) == 2
    assert said in capsys.readouterr().err
    assert nothing_but(tmp_path)


def test_arguments_that_are_missing_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["quantize", "demo"])
    assert ended.value.code == 2
    assert "DST, --bits" in capsys.readouterr().err


def test_a_folder_that_is_not_empty_is_not_touched(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(EngineError, match="exists and is not an empty folder"):
        quantize_folder(tiny, tmp_path / "out", bits=4.0)
    assert nothing_but(tmp_path / "out", "mine")


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

    monkeypatch.setattr("console.quantize.ProgressLine.show", strike)
    before = signal.getsignal(kind)
    assert main(["quantize", str(tiny), str(tmp_path / "out"), "--bits", "4"]) == 130
    assert nothing_but(tmp_path, "tiny")
    assert signal.getsignal(kind) is before


def test_a_disk_that_fills_up_meanwhile_ends_with_1_and_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: object, name: str, tensor: Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.backends.torch.quant.shards.ShardedWriter.write", full)
    assert main(["quantize", str(tiny), str(tmp_path / "out"), "--bits", "4"]) == 1
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert nothing_but(tmp_path, "tiny")


# -- what it is worth -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question of the demo model's examination, and the patterns that its answer must contain."""

    ask: str
    want: tuple[str, ...]

    def accepts(self, answer: str) -> bool:
        return all(re.search(pattern, answer, re.IGNORECASE) for pattern in self.want)


def examination(count: int) -> list[Question]:
    entries = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["question"][:count]
    return [Question(entry["ask"], tuple(entry["want"])) for entry in entries]


def greedy_answers(folder: Path, questions: list[Question]) -> list[str]:
    """What the torch backend answers, all in one batch."""
    backend, tokenizer = TorchBackend(), Tokenizer.from_folder(folder)
    spec = ModelSpec(path=folder, name="demo", backend="torch", device="cpu", dtype="float32", kv_cache_tokens=8192)
    backend.load(spec, max_prompts=64, step_tokens=512, page_tokens=16, report=ignore_progress, cancelled=never)
    answers: dict[str, list[int]] = {question.ask: [] for question in questions}
    for question in questions:
        text = tokenizer.apply_chat_template([{"role": "user", "content": question.ask}])
        backend.submit(
            BackendRequest(
                id=question.ask,
                prompt_ids=tokenizer.encode(text, add_special_tokens=False),
                params=SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, seed=0),
                end_token_ids=tokenizer.eos_token_ids,
            )
        )
    while backend.has_work():
        for event in backend.step():
            if event.token_id is not None:
                answers[event.request_id].append(event.token_id)
            if event.token_id in tokenizer.eos_token_ids or len(answers[event.request_id]) == ANSWER_TOKENS:
                backend.cancel(event.request_id)
    backend.unload()
    return [tokenizer.decode(answer) for answer in answers.values()]


@pytest.mark.slow
def test_the_demo_model_at_6_bits_knows_what_it_knew(demo_at: dict[float, Path]) -> None:
    questions = examination(12)
    known = [
        question
        for question, answer in zip(questions, greedy_answers(model_path(), questions), strict=True)
        if question.accepts(answer)
    ]
    assert len(known) >= 8
    answers = greedy_answers(demo_at[6.0], known)
    wrong = [f"{q.ask!r} -> {answer!r}" for q, answer in zip(known, answers, strict=True) if not q.accepts(answer)]
    assert len(wrong) <= 1, "\n".join(wrong)


def next_token_logprobs(folder: Path, prompts: list[list[int]]) -> Tensor:
    """Log-probabilities after each prompt, float32 [prompts, vocabulary]."""
    runner = load_runner(folder)
    pages = list(range(64))
    logits = [runner.forward([ChunkInput(prompt, 0, pages, sample=True)])[0] for prompt in prompts]
    return torch.stack(logits).log_softmax(dim=-1)


def held_out_prompts(count: int) -> list[list[int]]:
    """Beginnings of answers that the demo model was not trained on."""
    tokenizer = Tokenizer.from_folder(model_path())
    prompts = []
    for number, talk in enumerate(make_corpus(count, HELD_OUT_SEED)):
        asked, answered = talk.exchanges[0].question, talk.exchanges[0].answer
        chat: list[dict[str, Any]] = [{"role": "user", "content": asked}]
        text = tokenizer.apply_chat_template(chat) + answered[: 8 * (number % 5)]
        prompts.append(tokenizer.encode(text, add_special_tokens=False)[: 64 * PAGE_TOKENS])
    return prompts


@pytest.mark.slow
def test_more_bits_stray_less_from_the_original(demo_at: dict[float, Path]) -> None:
    """By the mean Kullback-Leibler divergence of the next token on held-out text."""
    prompts = held_out_prompts(120)
    original = next_token_logprobs(model_path(), prompts)
    strayed = {
        bits: float((original.exp() * (original - next_token_logprobs(folder, prompts))).sum(dim=-1).mean())
        for bits, folder in demo_at.items()
    }
    assert all(less > more for less, more in pairwise(strayed[bits] for bits in sorted(strayed)))
    assert strayed[8.0] < 1e-3
