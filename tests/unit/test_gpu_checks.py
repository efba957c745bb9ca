"""What the GPU checks compute can be tried on a CPU: models, readers, comparisons, and both sides of each verdict."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from engine.backends.base import LoadedModel
from engine.backends.common.families.experts import Experts
from engine.backends.paged_attention import gathered
from engine.backends.paged_attention.choose import Choice
from engine.backends.torch.model.mlp import GatedMlp
from engine.backends.torch.model.norms import RmsNorm
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec
from engine.errors import ContextLengthExceeded, InvalidRequest
from tests.fakes import queued
from tests.fakes.backend import FakeBackend
from tests.fakes.cuda import FakeCuda, FakeStream
from tests.fakes.exl3_tensors import random_exl3
from tests.fakes.model import fake_spec
from tests.fakes.paged import Case
from tests.fakes.recording import FakeRecorder, use
from tests.gpu import (
    check_ahead,
    check_exl3,
    check_gguf,
    check_graphs,
    check_layers,
    check_life,
    check_parity,
    check_tokens,
)
from tests.gpu.answers import Answers, Step, agreement, ask, prompts
from tests.gpu.check_attention import deviation
from tests.gpu.check_throughput import Rates
from tests.gpu.check_weights import ODD, compare_matrix, layer, packed_keys
from tests.gpu.exl2_random import WIDTHS, Group, plan_groups, random_exl2
from tests.gpu.models import TINY, Shape, exl2_model, plain_model
from tests.gpu.place import Place
from tests.gpu.witness import main as witness
from tests.gpu.witness import read_answers, save_spec

_GATHERED = Choice("gathered", "the test wants it")
_MODEL = LoadedModel(
    backend="torch",
    architecture="LlamaForCausalLM",
    dtype="float32",
    devices=("cpu",),
    vocab_size=320,
    max_model_len=64,
    kv_tokens=64,
    page_tokens=16,
    weights_bytes=1,
    kv_bytes=1,
    parameters=1,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("gpu"))


# --- models ---------------------------------------------------------------------------------------------------------


def test_groups_share_the_rows_out_from_the_widest_to_the_narrowest() -> None:
    assert plan_groups(256, WIDTHS, 32) == [Group(bits, 32) for bits in (8, 8, 6, 5, 4, 4, 3, 2)]
    assert plan_groups(544, (4, 5), 128)[-1] == Group(4, 32)
    with pytest.raises(ValueError, match="fewer than the 6 widths"):
        plan_groups(64, WIDTHS, 32)
    with pytest.raises(ValueError, match="multiples of 32"):
        plan_groups(100, (4,), 32)


def test_random_matrices_have_the_deviation_that_was_asked_for() -> None:
    groups = plan_groups(512, WIDTHS, 64)
    generator = torch.Generator().manual_seed(3)
    tensors = random_exl2(512, 96, groups, std=0.05, generator=generator)
    weight = layer({f"x.{name}": tensor for name, tensor in tensors.items()}, "x").dequantise().float()
    assert weight.std().item() == pytest.approx(0.05, rel=0.1)


def test_the_torch_backend_answers_from_the_random_exl2_model(place: Place) -> None:
    spec = ModelSpec(path=exl2_model(place, TINY), name="tiny", backend="torch", device="cpu", kv_cache_tokens=4096)
    answers = ask(spec, prompts(2, TINY.vocab), 4)
    assert [len(steps) for steps in answers.answers] == [4, 4]


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [TINY, ODD], ids=["tiny", "odd"])
def test_a_weight_that_differs_in_one_bit_is_counted_under_its_width(place: Place, shape: Shape) -> None:
    stored = load_file(exl2_model(place, shape) / "output.safetensors")
    widths: Counter[int] = Counter()
    for key in packed_keys(stored):
        packed = layer(stored, key)
        theirs = packed.dequantise()
        compared, wrong = compare_matrix(packed, theirs)
        assert wrong.total() == 0
        widths += compared
        row = int((packed.q_invperm == 0).nonzero())  # the first packed row has the widest values
        theirs.view(torch.int16)[row, 1] ^= 1
        assert compare_matrix(packed, theirs)[1] == Counter({max(compared): 1}) | wrong
    assert set(widths) == set(WIDTHS)


def test_an_exl3_weight_that_differs_in_one_bit_fails_against_the_library_and_is_a_tie_against_the_cpu() -> None:
    tensors = random_exl3(check_exl3.ROWS, check_exl3.COLUMNS, 3, codebook="mcg")
    ours = check_exl3.decoded(tensors, torch.device("cpu"))
    theirs = ours.clone()
    assert check_exl3.against_library("equal", ours, theirs).verdict == "passed"
    theirs.view(torch.int16)[5, 7] ^= 1
    assert check_exl3.against_library("equal", ours, theirs).verdict == "failed"
    assert check_exl3.against_cpu("near", ours, theirs).verdict == "passed"
    assert check_exl3.against_cpu("near", ours, theirs.neg()).verdict == "failed"


def test_exl3_is_compared_in_every_width_and_codebook() -> None:
    assert {codebook for _, codebook in check_exl3.WIDTHS} == {"plain", "mcg", "mul1"}
    assert {bits for bits, _ in check_exl3.WIDTHS} == {*range(1, 9), 1.5, 2.5, 3.5}


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_gguf_products_pass_and_those_of_other_weights_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    device = torch.device("cpu")
    assert check_gguf.decoded_row(name, 20, 256, device).verdict == "passed"
    assert check_gguf.product_row(name, 20, 256, torch.float16, device, (1, 65)).verdict == "passed"
    dequantise = check_gguf.dequantise
    monkeypatch.setattr(check_gguf, "dequantise", lambda raw, name: dequantise(raw, name) * 1.01)
    assert check_gguf.decoded_row(name, 20, 256, device).verdict == "failed"
    assert check_gguf.product_row(name, 20, 256, torch.float16, device, (1,)).verdict == "failed"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernels_of_a_layer_pass_and_wrong_ones_fail(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def verdicts() -> list[str]:
        layer = check_layers.Layer(3, dtype, torch.device("cpu"), width=64, inner=48, heads=(4, 2, 16))
        return [row.verdict for row in check_layers.equal("small", layer)]

    assert verdicts() == ["passed"] * 3
    whole = check_layers.mixture(Experts((True,), count=4, per_token=2, inner=24), 32, dtype, torch.device("cpu"))
    assert [row.verdict for row in check_layers.equal_experts(whole, (1, 9))] == ["passed"] * 4
    monkeypatch.setattr(GatedMlp, "activate_gate", lambda mlp, both: both.chunk(2, dim=-1)[0])
    monkeypatch.setattr(RmsNorm, "__call__", lambda norm, x: x)
    monkeypatch.setattr(check_layers, "rotate_", lambda *arguments: None)
    assert verdicts() == ["failed"] * 3
    assert [row.verdict for row in check_layers.equal_experts(whole, (9,))] == ["passed", "failed"]


# --- answers --------------------------------------------------------------------------------------------------------


def _answers(*tokens: tuple[int, float], top: tuple[tuple[int, float], ...] = ()) -> Answers:
    return Answers(model=_MODEL, answers=[[Step(token_id=id_, logprob=logprob, top=top) for id_, logprob in tokens]])


def test_equal_answers_agree_as_far_as_their_log_probabilities() -> None:
    found = agreement(_answers((5, -1.0), (6, -1.0)), _answers((5, -1.0), (6, -1.03)))
    assert (found.compared, found.longest, found.parted, found.worst_gap) == (2, 2, 0, 0.0)
    assert found.within(0.05) and not found.within(0.02)


def test_answers_may_part_where_two_tokens_are_nearly_equal() -> None:
    reference = _answers((5, -1.0), (6, -1.0), top=((6, -1.0), (7, -1.01)))
    found = agreement(reference, _answers((5, -1.0), (7, -1.0)))
    assert (found.compared, found.parted) == (1, 1)
    assert found.worst_gap == pytest.approx(0.01)
    assert found.within(0.05)
    assert not found.within(0.05, steps=2)


def test_answers_that_part_for_no_good_reason_do_not_agree() -> None:
    found = agreement(_answers((5, -1.0), (6, -1.0), top=((6, -1.0),)), _answers((5, -1.0), (9, -1.0)))
    assert not found.within(1e9)


def test_a_witness_of_its_own_says_what_the_backend_says_here(place: Place, tmp_path: Path) -> None:
    spec = ModelSpec(
        path=plain_model(place, TINY, "float32"),
        name="tiny",
        backend="torch",
        device="cpu",
        dtype="float32",
        kv_cache_tokens=4096,
    )
    save_spec(spec, tmp_path / "spec")
    witness([str(tmp_path / "spec"), str(tmp_path / "answers"), "5", "3"])
    found = agreement(ask(spec, prompts(3, TINY.vocab), 5), read_answers(tmp_path / "answers"))
    assert (found.compared, found.parted, found.worst_difference) == (15, 0, 0.0)


def test_every_variant_is_named_once_and_flash_comes_where_it_is_installed() -> None:
    bare = [variant.name for variant in check_tokens.variants(has_flash=False, has_varlen=False)]
    assert len(set(bare)) == len(bare)
    full = [variant.name for variant in check_tokens.variants(has_flash=True, has_varlen=True)]
    assert set(full) - set(bare) == {"torch, varlen", "exllamav2, varlen", "exllamav2, flash"}


def test_tokens_are_told_of_as_soon_as_both_sides_of_a_row_are_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()

    def witness(place: Place, variant: check_tokens.Variant, folder: Path, count: int) -> Answers:
        if variant.name == "torch, triton":
            never.wait()
        if variant.name == "exllamav2, gathered":
            raise RuntimeError("it ended with 7")
        return _answers(*[(5, -1.0)] * check_tokens.TOKENS)

    monkeypatch.setattr(check_tokens, "_witness", witness)
    monkeypatch.setattr(check_tokens, "_has_varlen", lambda: False)
    rows = iter(check_tokens.checks(place))
    found = {row.name: row.verdict for row in itertools.islice(rows, 4)}
    never.set()
    assert found == {
        "exllamav2, triton": "passed",
        "exllamav2, gathered": "error",
        "exllamav2, triton, no graphs": "passed",
        "graphs off against on": "passed",
    }
    assert [row.name for row in rows] == ["torch, triton", "flash against triton"]


# --- life -----------------------------------------------------------------------------------------------------------


def test_an_error_of_the_right_kind_is_a_promise_held_and_another_is_broken() -> None:
    def raise_(error: Exception) -> None:
        raise error

    held = check_life.raises("a", ContextLengthExceeded, lambda: raise_(ContextLengthExceeded("too long")))
    other = check_life.raises("a", ContextLengthExceeded, lambda: raise_(InvalidRequest("no")))
    crash = check_life.raises("a", ContextLengthExceeded, lambda: raise_(ValueError("no")))
    nothing = check_life.raises("a", ContextLengthExceeded, lambda: None)
    assert [row.verdict for row in (held, other, crash, nothing)] == ["passed", "failed", "failed", "failed"]
    assert "ValueError instead of ContextLengthExceeded" in crash.detail


def test_the_life_of_a_torch_backend_is_checked_as_it_would_be_on_a_gpu(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the device's memory, of which a CPU has none."""
    for name, value in (("mem_get_info", (1, 1)), ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    folder = plain_model(place, TINY, "float32")
    spec = ModelSpec(
        path=folder, name="tiny", backend="torch", device="cpu", max_model_len=64, kv_cache_tokens=1024, dtype="float32"
    )
    rows = list(check_life.backend_checks(spec))
    assert {row.name: row.detail for row in rows if row.verdict not in ("passed", "measured")} == {}
    assert len(rows) == 10


@pytest.mark.parametrize(("stays", "verdict"), [(0, "passed"), (60, "passed"), (70, "failed")])
def test_what_a_backend_leaves_on_a_hopper_is_counted_once_and_without_cublas_workspaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: int, verdict: str
) -> None:
    cuda = FakeCuda().install(monkeypatch)

    class Leaving(FakeBackend):
        """Multiplies on two streams, and leaves some MiB with torch."""

        def unload(self) -> None:
            for stream in (0, 1):
                with torch.cuda.stream(FakeStream(stream)):  # type: ignore[arg-type]
                    cuda.multiply()
            cuda.other_bytes = stays << 20
            super().unload()

    monkeypatch.setattr(check_life, "create_backend", lambda spec: Leaving())
    (row,) = check_life._unload(fake_spec(tmp_path))
    assert (row.verdict, row.value) == (verdict, stays)


# --- numbers --------------------------------------------------------------------------------------------------------


def test_parity_finds_a_model_equal_to_itself_and_another_dtype_near(place: Place) -> None:
    folder = plain_model(place, TINY, "float32")
    exact, again, half = (
        list(check_parity.logits(folder, "cpu", dtype)) for dtype in ("float32", "float32", "float16")
    )
    assert all(torch.equal(one, other) for one, other in zip(exact, again, strict=True))
    assert check_parity.row("float16", exact, half).verdict == "passed"
    assert check_parity.row("float32", exact, half).verdict == "failed"


def test_a_recording_that_lacks_is_found_however_many_others_there_are(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeRecorder(fails_from=2))
    monkeypatch.setattr(ModelRunner, "pick_attention", lambda *given: (_GATHERED, gathered.paged_attention))
    (row,) = check_graphs.recorded(plain_model(place, TINY, "float16"), "cpu", 3)
    assert (row.verdict, row.detail) == ("failed", "no recording of 3 sequences; attention: the test wants it")


def test_recorded_decodes_are_held_against_launched_ones(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plain_model(place, TINY, "float16")
    assert [row.verdict for row in check_graphs.recorded(folder, "cpu", 3)] == ["failed"]
    recorder = use(monkeypatch, FakeRecorder())
    monkeypatch.setattr(ModelRunner, "pick_attention", lambda *given: (_GATHERED, gathered.paged_attention))
    rows = check_graphs.recorded(folder, "cpu", 3)
    assert [row.verdict for row in rows] == ["passed", "measured", "measured"]
    assert recorder.replayed > check_graphs._STEPS


def test_answers_of_steps_planned_ahead_are_held_against_those_of_steps_that_are_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain_model(place, TINY, "float32")
    assert [row.verdict for row in check_ahead.alike(folder, "cpu", 3)] == ["failed", "passed"]
    queued.use(monkeypatch)
    assert [row.verdict for row in check_ahead.alike(folder, "cpu", 3)] == ["passed", "passed"]


def test_answers_with_a_draft_model_are_held_against_those_without(place: Place) -> None:
    rows = check_graphs.guessed(plain_model(place, TINY, "float32"), "cpu")
    assert rows[0].verdict == "passed"


def test_an_attention_is_off_by_nothing_or_by_much() -> None:
    case = Case("decode", (0, 17), heads=2, kv_heads=1, head_dim=8)
    off, clean = deviation(case, gathered.paged_attention, torch.float32, "cpu")
    assert clean and off < 1e-5

    def blind(*args: object, **options: object) -> torch.Tensor:
        return torch.zeros_like(args[0])  # type: ignore[arg-type]

    off, clean = deviation(case, blind, torch.float32, "cpu")
    assert off > 0.05 and not clean


def test_the_ratio_is_of_medians() -> None:
    rows = Rates(ours=[90.0, 100.0, 500.0], theirs=[100.0, 101.0, 1.0]).rows(8, "1B")
    assert [row.value for row in rows] == [100.0, 100.0, 1.0]
    assert rows[-1].verdict == "passed"
    assert Rates(ours=[96.0], theirs=[100.0]).rows(8, "")[-1].verdict == "missed"


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    spec = check_tokens.REFERENCE.spec(tmp_path)
    save_spec(spec, tmp_path / "spec")
    restored = msgspec.json.decode(
        (tmp_path / "spec").read_bytes(), type=ModelSpec, dec_hook=lambda kind, value: kind(value)
    )
    assert restored == spec
