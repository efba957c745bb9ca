"""What the GPU checks compute can be tried on a CPU: models, readers, comparisons, and both sides of each verdict."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from engine.backends.common import exllamav3_checkpoint
from engine.backends.common.families.experts import Experts
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.cuda.coded_linear import CodedMatrix
from engine.backends.torch.model.mlp import GatedMlp
from engine.backends.torch.model.norms import RmsNorm
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec, SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.snapshot import DeviceReading, ProcessMemory
from tests.fakes.backend import FakeBackend
from tests.fakes.cuda import FakeCuda, FakeStream
from tests.fakes.exl3_tensors import random_exl3
from tests.fakes.hosts import MODEL
from tests.fakes.model import fake_spec
from tests.gpu import (
    check_engine,
    check_exl3,
    check_formats,
    check_gguf,
    check_layers,
    check_life,
    check_packed,
    check_serving,
    check_tokens,
)
from tests.gpu.answers import Answers, Step, agreement, ask, prompts
from tests.gpu.check_tokens import read_answers, save_spec, witness
from tests.gpu.check_weights import ODD, compare_matrix, layer, packed_keys
from tests.gpu.exl2_random import WIDTHS, Group, plan_groups, random_exl2
from tests.gpu.load import as_they_come
from tests.gpu.models import TINY, Shape, exl2_model, exl3_model, plain_model
from tests.gpu.place import Place


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


def test_the_random_exl3_model_is_one_of_exllamav3s_and_the_torch_backend_answers_from_it(place: Place) -> None:
    folder = exl3_model(place, TINY)
    assert exllamav3_checkpoint.read_folder(folder).dtype == "exl3 4.0 bpw"
    spec = ModelSpec(path=folder, name="tiny", backend="torch", device="cpu", kv_cache_tokens=4096)
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
def test_gguf_products_pass_and_those_of_other_weights_fail(name: str) -> None:
    pytest.importorskip("triton")
    device = torch.device("cpu")
    assert_compared(name, *check_gguf.stored_matrix(name, 20, 256, device))


def assert_compared(title: str, matrix: CodedMatrix, weight: torch.Tensor) -> None:
    """Rows of the weight pass, those of another fail."""
    assert check_gguf.decoded_row(title, matrix, weight).verdict == "passed"
    assert check_gguf.product_row(title, matrix, weight, torch.float16, (1, 65)).verdict == "passed"
    assert check_gguf.decoded_row(title, matrix, weight * 1.01).verdict == "failed"
    assert check_gguf.product_row(title, matrix, weight * 1.01, torch.float16, (1,)).verdict == "failed"


@pytest.mark.parametrize("title", check_packed.KINDS)
def test_packed_products_pass_and_those_of_other_weights_fail(title: str) -> None:
    pytest.importorskip("triton")
    assert_compared(title, *check_packed.stored_matrix(title, 24, 256, torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernels_of_a_layer_pass_and_wrong_ones_fail(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def verdicts() -> list[str]:
        layer = check_layers.Layer(3, dtype, torch.device("cpu"), width=64, inner=48, heads=(4, 2, 16))
        return [row.verdict for row in check_layers.equal("small", layer)]

    assert verdicts() == ["passed"] * 3
    whole = check_layers.mixture(Experts((True,), count=4, per_token=2, inner=24), 32, dtype, torch.device("cpu"))
    assert [row.verdict for row in check_layers.equal_experts(whole, (1, 9))] == ["passed"] * 4
    coded = check_layers.coded_mixture(Experts((True,), count=4, per_token=2, inner=64), 64, dtype, torch.device("cpu"))
    assert [row.verdict for row in check_layers.equal_experts(coded, (1, 9))] == ["passed"] * 4
    monkeypatch.setattr(GatedMlp, "activate_gate", lambda mlp, both: both.chunk(2, dim=-1)[0])
    monkeypatch.setattr(RmsNorm, "__call__", lambda norm, x: x)
    monkeypatch.setattr(check_layers, "rotate_", lambda *arguments: None)
    assert verdicts() == ["failed"] * 3
    assert [row.verdict for row in check_layers.equal_experts(whole, (9,))] == ["passed", "failed"]


# --- answers --------------------------------------------------------------------------------------------------------


def _answers(*tokens: tuple[int, float], top: tuple[tuple[int, float], ...] = ()) -> Answers:
    return Answers(model=MODEL, answers=[[Step(token_id=id_, logprob=logprob, top=top) for id_, logprob in tokens]])


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


# --- formats, families, options -------------------------------------------------------------------------------------

_TITLES = (
    "torch, AWQ",
    "torch, mixtral, FP8",
    "torch, gemma 2",
    "torch, qwen3 moe",
    "torch, LoRA per request",
    "exllamav2, LoRA",
)


@pytest.mark.parametrize("name", [*_TITLES, "torch, draft model", "torch, KV of 8 bits"])
def test_a_format_or_an_option_agrees_with_the_cpu_s_answers_and_those_of_other_prompts_do_not(
    place: Place, name: str
) -> None:
    """By the torch backend in float16 on the CPU, in place of what would be on a GPU."""
    (case,) = [each for each in check_formats.CASES if check_formats.title(each) == name]
    here = replace(case, backend="torch", steps=3)
    rows = list(check_formats.rows(here, place, "cpu", count=2, tokens=4))
    assert [row.verdict for row in rows] == ["passed"] * (1 + case.drafts)
    spec = ModelSpec(path=case.folder(place), name="a", device="cpu", dtype="float16", kv_cache_tokens=1024)
    one, other = (ask(spec, [asked], 4) for asked in ([5, 6, 7], [70, 80, 90]))
    assert check_formats.agreed(here, one, other).verdict == "failed"


@pytest.mark.parametrize(("drafted", "verdict"), [(0, "failed"), (3, "passed")])
def test_a_draft_model_that_drafts_nothing_has_not_been_checked(
    place: Place, monkeypatch: pytest.MonkeyPatch, drafted: int, verdict: str
) -> None:
    answers = msgspec.structs.replace(_answers((5, -1.0)), drafted=drafted)
    monkeypatch.setattr(check_formats, "ask", lambda *given, **options: answers)
    for case in [each for each in check_formats.CASES if each.drafts]:
        _, drafts = check_formats.rows(case, place, "cpu")
        assert drafts.verdict == verdict


@pytest.mark.parametrize(("same", "changes", "verdicts"), [(5, 6, ["passed"] * 2), (6, 5, ["failed"] * 2)])
def test_guidance_against_the_prompt_itself_is_none_and_against_another_changes_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: int, changes: int, verdicts: list[str]
) -> None:
    def answers(spec: ModelSpec, asked: list[list[int]], tokens: int, params: Sequence[SamplingParams] = ()) -> Answers:
        negative = params[0].negative_prompt_ids if params else None
        token = 5 if negative is None else same if negative == tuple(asked[0]) else changes
        return _answers(*[(token, -1.0)] * tokens)

    monkeypatch.setattr(check_formats, "ask", answers)
    assert [row.verdict for row in check_formats.guided(fake_spec(tmp_path), [[7, 8, 9]])] == verdicts


@pytest.mark.parametrize(("token", "drafted", "verdicts"), [(5, 3, ["passed"] * 4), (6, 0, ["failed"] * 4)])
def test_drafts_of_exllamav3_must_be_made_and_change_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: int, drafted: int, verdicts: list[str]
) -> None:
    def answers(spec: ModelSpec, asked: list[list[int]], tokens: int) -> Answers:
        drafts = spec.ngram_draft or spec.draft_model is not None
        found = _answers(*[(token if drafts else 5, -1.0)] * tokens)
        return msgspec.structs.replace(found, drafted=drafted)

    monkeypatch.setattr(check_exl3, "ask", answers)
    assert [row.verdict for row in check_exl3.drafted(fake_spec(tmp_path))] == verdicts


def test_every_format_and_option_has_a_name_of_its_own() -> None:
    titles = [check_formats.title(case) for case in check_formats.CASES]
    assert len(set(titles)) == len(titles)


# --- serving --------------------------------------------------------------------------------------------------------


def test_graphs_that_are_recorded_and_kernels_that_are_compiled_while_serving_are_counted() -> None:
    compilation = check_serving._triton_compilation()
    begin, listener = torch.cuda.CUDAGraph.capture_begin, getattr(compilation, "listener", None)
    with check_serving.counted() as found:
        with pytest.raises((AttributeError, TypeError)):  # there is no graph, for there is no GPU
            torch.cuda.CUDAGraph.capture_begin(None)  # type: ignore[arg-type]
        if compilation is not None:
            compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=False)
    assert found == Counter(graphs=1, kernels=1) if compilation is not None else Counter(graphs=1)
    assert torch.cuda.CUDAGraph.capture_begin is begin
    assert getattr(compilation, "listener", None) is listener


@pytest.mark.parametrize(("recorded", "verdict"), [(0, "passed"), (1, "failed")])
def test_a_backend_that_records_while_it_serves_is_found(
    place: Place, monkeypatch: pytest.MonkeyPatch, recorded: int, verdict: str
) -> None:
    @contextmanager
    def counted() -> Iterator[Counter[str]]:
        yield Counter(graphs=recorded, kernels=recorded)

    monkeypatch.setattr(check_serving, "counted", counted)
    monkeypatch.setattr(check_serving, "_triton_compilation", lambda: object())
    spec = ModelSpec(
        path=plain_model(place, TINY, "float32"), name="tiny", device="cpu", dtype="float32", kv_cache_tokens=4096
    )
    assert [row.verdict for row in check_serving.undisturbed(spec, (5, 40, 90))] == [verdict] * 2


def test_answers_after_a_long_prompt_are_held_against_those_of_gathered_pages(place: Place) -> None:
    (row,) = check_serving.long_context(place, "torch", "cpu", 700, 4)
    assert row.verdict == "passed"
    asked = check_serving._prompt(30, 1)
    spec = ModelSpec(path=exl2_model(place, check_serving.LONG), name="a", device="cpu", kv_cache_tokens=1024)
    one, other = (ask(spec, [each], 4) for each in (asked, asked[:-1]))
    assert check_serving.alike("a", one, other, check_serving.HALF_NATS).verdict == "failed"


def test_preempted_answers_are_held_against_undisturbed_ones(place: Place) -> None:
    rows = check_serving.preempted(plain_model(place, TINY, "float32"), "cpu", 40)
    assert [row.verdict for row in rows] == ["passed", "passed"]


def test_sampled_tokens_are_held_against_those_of_the_cpu(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plain_model(place, TINY, "float32")
    (row,) = check_serving.sampled(folder, "cpu", 8)
    assert (row.verdict, row.value) == ("passed", 0)
    first = iter([True, False])
    heated = [msgspec.structs.replace(each, temperature=2.0) for each in check_serving.PARAMS]
    monkeypatch.setattr(
        check_serving,
        "ask",
        lambda *given, params, **options: ask(*given, params=params if next(first) else heated, **options),
    )
    (row,) = check_serving.sampled(folder, "cpu", 8)
    assert row.verdict == "failed"
    assert "typical_p" in row.detail and "repetition_penalty and min_p" not in row.detail


def test_log_probabilities_of_a_prompt_are_held_against_the_cpu_s(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain_model(place, TINY, "float32")
    (row,) = check_serving.prompt_logprobs(folder, "cpu", 40)
    assert row.verdict == "passed" and row.value and row.value < 0.05
    found = iter(([-1.0, -2.0], [-1.0, -2.5]))
    monkeypatch.setattr(check_serving, "_prompt_logprobs", lambda spec, length: next(found))
    (row,) = check_serving.prompt_logprobs(folder, "cpu", 40)
    assert row.verdict == "failed"


def test_a_step_out_of_memory_is_seen_to_be_repeated_and_answers_to_come_afterwards(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec(
        path=plain_model(place, TINY, "float32"), name="tiny", device="cpu", dtype="float32", kv_cache_tokens=4096
    )
    full = [False]

    def fill() -> Callable[[], None]:
        full[0] = True
        return lambda: full.__setitem__(0, False)

    forward = ModelRunner.forward

    def short(self: ModelRunner, chunks: Sequence[ChunkInput], *given: Any, **options: Any) -> torch.Tensor:
        if full[0] and sum(len(chunk.token_ids) for chunk in chunks) > 200:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, chunks, *given, **options)

    assert [row.verdict for row in check_serving.crowd(spec, fill, 3, 150)] == ["failed", "measured", "passed"]
    monkeypatch.setattr(ModelRunner, "forward", short)
    assert [row.verdict for row in check_serving.crowd(spec, fill, 3, 150)] == ["passed", "measured", "passed"]


# --- the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_is_checked_as_it_would_be_on_a_gpu(place: Place) -> None:
    """All but what NVML says."""
    rows = {row.name: row for row in as_they_come(check_engine.served(check_engine.spec(place, "torch", "cpu")))}
    assert {row.verdict for row in rows.values()} == {"passed", "measured"}
    assert set(rows) == {
        "torch: regex",
        "torch: json_schema",
        "torch: choice",
        "torch: memory on cpu",
        "torch: the answer of a killed worker goes on",
        "torch: until a worker is ready again",
    }


def test_a_text_of_another_format_does_not_pass_for_it() -> None:
    texts = ("123-4567", '{"yes": true}', "left")
    fits = [[fits(text) for text in texts] for _, fits in check_engine.GRAMMARS]
    assert fits == [[True, False, False], [False, True, False], [False, False, True]]


def _memory(free_gib: float, **fields: Any) -> DeviceReading:
    gib = 2**30
    return DeviceReading(
        id="cuda:0",
        name="GPU",
        kind="cuda",
        utilisation=None,
        total_bytes=80 * gib,
        free_bytes=int(free_gib * gib),
        **fields,
    )


def test_what_nvml_says_of_memory_is_held_against_cuda() -> None:
    mine = (ProcessMemory(pid=1, used_bytes=2**30),)
    before, after = _memory(78.0, own=mine), _memory(77.0, work_bytes=2**30, own=mine)
    assert [row.verdict for row in check_engine.memory_rows(before, after, 80 * 2**30)] == ["passed"] * 3
    hidden = _memory(77.0)
    assert [row.verdict for row in check_engine.memory_rows(_memory(78.0), hidden, 80 * 2**30)] == [
        "passed",
        "passed",
        "skipped",
    ]
    wrong = _memory(77.5, own=mine)
    assert [row.verdict for row in check_engine.memory_rows(before, wrong, 78 * 2**30)] == ["failed"] * 3


def test_answers_of_another_gpu_are_held_against_the_cpu_s(place: Place) -> None:
    assert check_engine.elsewhere("a", check_engine.spec(place, "torch", "cpu")).verdict == "passed"
    halves = check_engine.split(check_engine.spec(place, "torch"), "sim:0", "sim:1")
    assert check_engine.elsewhere("a", halves).verdict == "passed"
    assert [row.verdict for row in check_engine.second_gpu(place, "torch")] == ["skipped"]


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
