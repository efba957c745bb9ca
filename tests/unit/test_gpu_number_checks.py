"""What the GPU checks measure, and what they hold against other steps, can be tried on a CPU, with both verdicts."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from engine.backends.base import TokenEvent
from engine.backends.paged_attention import gathered
from engine.backends.paged_attention.choose import Choice
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.model.parallel import ReducedLinear
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec
from engine.placement.model_facts import read_facts
from tests.fakes import queued
from tests.fakes.backend import FakeBackend
from tests.fakes.model import fake_spec
from tests.fakes.paged import Call, Case, VarlenCall
from tests.fakes.recording import FakeRecorder, use
from tests.gpu import (
    check_ahead,
    check_attention,
    check_big,
    check_graphs,
    check_parity,
    check_ranks,
    check_speed,
    check_tiers,
    check_tokens,
    load,
)
from tests.gpu.answers import ask, prompts
from tests.gpu.check_attention import deviation
from tests.gpu.check_throughput import Rates, kinds_for
from tests.gpu.check_tokens import save_spec
from tests.gpu.load import as_they_come
from tests.gpu.models import TINY, Method, Shape, packed_model, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, measured

_GATHERED = Choice("gathered", "the test wants it")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("gpu"))


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
    assert (row.verdict, row.detail) == (
        "failed",
        "no recording of 1, 2, 4, 8, 16, 24, 32 tokens; attention: the test wants it",
    )


def test_recorded_decodes_are_held_against_launched_ones(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plain_model(place, TINY, "float16")
    assert [row.verdict for row in check_graphs.recorded(folder, "cpu", 3)] == ["failed"]
    recorder = use(monkeypatch, FakeRecorder())
    monkeypatch.setattr(ModelRunner, "pick_attention", lambda *given: (_GATHERED, gathered.paged_attention))
    rows = check_graphs.recorded(folder, "cpu", 3)
    assert [row.verdict for row in rows] == ["passed"] * 3 + ["measured"] * 4
    assert recorder.replayed == check_graphs._STEPS * 3 // 2


def test_one_recording_is_held_against_launched_steps_of_short_and_long_contexts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain_model(place, TINY, "float16")
    monkeypatch.setattr(ModelRunner, "pick_attention", lambda *given: (_GATHERED, gathered.paged_attention))
    assert [row.verdict for row in check_graphs.contexts(folder, "cpu")] == ["failed"]
    use(monkeypatch, FakeRecorder())
    assert [row.verdict for row in check_graphs.contexts(folder, "cpu")] == ["passed"]


def test_answers_of_steps_planned_ahead_are_held_against_those_of_steps_that_are_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain_model(place, TINY, "float32")
    assert [row.verdict for row in check_ahead.alike(folder, "cpu", 3)] == ["failed", "passed"]
    queued.use(monkeypatch)
    assert [row.verdict for row in check_ahead.alike(folder, "cpu", 3)] == ["passed", "passed"]


def test_answers_with_restored_pages_are_held_against_computed_ones(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain_model(place, TINY, "float32")
    assert [row.verdict for row in check_tiers.alike(folder, "cpu", 3)] == ["passed", "passed"]
    with monkeypatch.context() as ahead:
        queued.use(ahead)
        assert [row.verdict for row in check_tiers.alike(folder, "cpu", 20)] == ["passed", "passed"]
    monkeypatch.setattr(KvPool, "write_pages", lambda pool, pages, contents: None)
    assert [row.verdict for row in check_tiers.alike(folder, "cpu", 3)] == ["passed", "failed"]


def test_answers_of_two_ranks_are_held_against_those_of_one_device(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain_model(place, TINY, "float32")
    assert [row.verdict for row in check_ranks.checks(place)] == ["skipped"]
    assert [row.verdict for row in check_ranks.alike(folder, "float32", "cpu", 2)] == ["passed"]
    monkeypatch.setattr(ReducedLinear, "__call__", lambda self, x: 2 * self.group.all_reduce(self.part(x)))
    assert [row.verdict for row in check_ranks.alike(folder, "float32", "cpu", 2)] == ["failed"]


def test_a_killed_rank_has_to_end_the_worker(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plain_model(place, TINY, "float32")
    assert [row.verdict for row in check_ranks.lost(folder, "cpu")] == ["passed"]
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    assert [row.verdict for row in check_ranks.lost(folder, "cpu")] == ["failed"]


def test_answers_with_a_draft_model_are_held_against_those_without(place: Place) -> None:
    rows = check_graphs.guessed(plain_model(place, TINY, "float32"), "cpu")
    assert rows[0].verdict == "passed"


def test_a_backend_is_timed_at_prompts_and_decodes_and_its_weights_set_against_the_steps(place: Place) -> None:
    spec = ModelSpec(
        path=plain_model(place, TINY, "float32"), name="tiny", device="cpu", dtype="float32", kv_cache_tokens=1024
    )
    rows = list(check_speed.backend_rows(spec, "torch", TINY, prefills=(40, 70), decodes=(1, 3), steps=2))
    assert [(row.name, row.unit) for row in rows] == [
        ("torch: prompt of 40", "tok/s"),
        ("torch: prompt of 70", "tok/s"),
        ("torch: step of 1", "ms"),
        ("torch: weights read, step of 1", "GB/s"),
        ("torch: step of 3", "ms"),
        ("torch: weights read, step of 3", "GB/s"),
        ("torch: step of 3, top_p", "ms"),
    ]
    assert all(row.value is not None and row.value > 0 for row in rows)


def test_bandwidth_is_a_share_of_what_the_card_has_where_that_is_known() -> None:
    assert check_speed.bandwidth_row("a", 2e12, 4e12).detail == "50% of the card's 4000"
    assert check_speed.bandwidth_row("a", 2e12, None).detail == "the card's peak is unknown"


def test_a_backend_that_fails_a_request_ends_its_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    monkeypatch.setattr(check_speed, "create_backend", lambda spec: backend)
    failed = TokenEvent(request_id="prompt", finish="error", message="the device is gone")
    monkeypatch.setattr(backend, "step", lambda: [failed])
    with pytest.raises(RuntimeError, match="request prompt failed: the device is gone"):
        list(check_speed.backend_rows(fake_spec(tmp_path), "fake", TINY, prefills=(4,)))


def test_the_whole_engine_is_timed_at_each_number_of_requests(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "OUTPUT_TOKENS", 3)
    spec = ModelSpec(
        path=plain_model(place, TINY, "float32"), name="tiny", device="cpu", dtype="float32", kv_cache_tokens=1024
    )
    hurried = Place(place.folder, quick=True, end_s=0.0)
    rows = list(as_they_come(check_speed.served(hurried, spec, (1, 2))))
    assert [row.name for row in rows] == ["auto float32, served: 1 requests", "auto float32, served: 2 requests"]
    assert all(re.match(r"first token \d+\.\d ms \(p50\), between tokens \d+\.\d ms", row.detail) for row in rows)


@pytest.mark.parametrize("method", ["gptq", "gptq-act-order", "awq", "fp8"])
def test_the_torch_backend_answers_from_random_packed_weights(place: Place, method: Method) -> None:
    folder = packed_model(place, TINY, method)
    stored = load_file(folder / "output.safetensors")
    assert sum(".q_proj.scales" in name or ".q_proj.weight_scale_inv" in name for name in stored) == TINY.layers
    spec = ModelSpec(path=folder, name="tiny", backend="torch", device="cpu", kv_cache_tokens=4096)
    (steps,) = ask(spec, prompts(1, TINY.vocab), 4).answers
    assert [len(each.top) for each in steps] == [20] * 4
    assert all(each.logprob > -4.0 for each in steps)  # of 320 tokens, equally likely ones have -5.8
    assert read_facts(spec).cuda_codes is not None


def test_the_large_models_are_timed_where_they_fit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(spec: ModelSpec, name: str, shape: Shape, **options: Any) -> list[Row]:
        return [measured(name, sum(file.stat().st_size for file in spec.path.iterdir()), "bytes")]

    async def served(*given: Any) -> AsyncGenerator[Row, None]:
        yield measured("served", 1.0, "tok/s")

    for module in (check_big, check_speed):
        monkeypatch.setattr(module, "backend_rows", timed)
    for name in ("served", "compared"):
        monkeypatch.setattr(check_big, name, served)
    monkeypatch.setattr(check_big, "EIGHT_BILLION", TINY)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (check_big.NEEDED_BYTES, 1))
    names = [row.name for row in check_big.checks(place)]
    assert names == ["exllamav2", "served", "torch bfloat16", "served", "torch gptq"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (check_big.NEEDED_BYTES - 1, 1))
    assert [row.verdict for row in check_big.checks(place)] == ["skipped"]


def test_attention_is_timed_as_the_torch_backend_calls_it() -> None:
    call = Call(Case("decode", (3, 17), heads=2, kv_heads=1, head_dim=8, given=False), torch.float32)
    found = check_speed.in_place(call, gathered.paged_attention)()
    assert torch.allclose(found.double(), call.expected(), atol=1e-5)


def test_an_attention_is_off_by_nothing_or_by_much() -> None:
    case = Case("decode", (0, 17), heads=2, kv_heads=1, head_dim=8)
    off, clean = deviation(case, gathered.paged_attention, torch.float32, "cpu")
    assert clean and off < 1e-5

    def blind(*args: object, **options: object) -> torch.Tensor:
        return torch.zeros_like(args[0])  # type: ignore[arg-type]

    off, clean = deviation(case, blind, torch.float32, "cpu")
    assert off > 0.05 and not clean


@pytest.mark.parametrize("case", [check_attention.SPEEDS[0], check_attention.SPEEDS[5]], ids=str)
def test_a_timed_call_of_attention_is_the_call_of_its_case(case: Case) -> None:
    small = replace(case, lengths=(40,), heads=2, kv_heads=1, head_dim=8)
    call = Call(small, torch.float32)
    expected, again = call.expected(), check_attention.paged(call, gathered.paged_attention)
    for _ in range(2):
        torch.testing.assert_close(again().double(), expected, atol=1e-5, rtol=1e-5)


def test_mixed_steps_are_compared_as_one_call_and_by_length() -> None:
    case, q_lens = Case("small", (40, 0, 9), heads=2, kv_heads=1, head_dim=8), (1, 3, 3)
    assert check_attention.varlen_deviation(case, q_lens, gathered.paged_attention, torch.float32, "cpu") < (1e-5, True)
    call = VarlenCall(case, q_lens, torch.float32)
    whole, parted = call.prepared(gathered.paged_attention)(), call.by_length(gathered.paged_attention)()
    torch.testing.assert_close(whole, torch.cat(parted))

    def damaging(*given: Any, **named: Any) -> torch.Tensor:
        given[3].zero_()
        return gathered.paged_attention(*given, **named)

    off, clean = check_attention.varlen_deviation(case, q_lens, damaging, torch.float32, "cpu")
    assert off > 1e-3 and not clean


def test_host_time_is_of_the_calls_and_not_of_the_device() -> None:
    waits, calls = [], []
    us = check_attention.host_microseconds(lambda: calls.append(len(waits)), lambda: waits.append(None), 5, 2)
    assert us > 0 and len(waits) == 4 and calls == [1] * 5 + [2] * 5 + [3] * 5


def test_the_ratio_is_of_medians() -> None:
    rows = Rates(ours=[90.0, 100.0, 500.0], theirs={"ours": [100.0, 101.0, 1.0]}).rows(8, "our engine", "1B", 10)
    assert [row.value for row in rows] == [100.0, 100.0, 1.0]
    assert rows[-1].verdict == "passed"
    assert Rates(ours=[96.0], theirs={"flash": [100.0]}).rows(8, "our engine", "", 10)[-1].verdict == "missed"


def test_one_request_is_measured_against_the_library_s_own_attention_too() -> None:
    assert kinds_for(1, flash=False) == ("ours", "own") and kinds_for(8, flash=False) == ("ours",)
    assert kinds_for(1, flash=True) == kinds_for(8, flash=True) == ("flash",)
    rates = Rates(ours=[100.0], theirs={"ours": [125.0], "own": [50.0]})
    values = {row.name: row.value for row in rates.rows(1, "our engine", "", 10)}
    assert values["1 request, our engine, a token per layer"] == 1000
    assert values["1 request, our engine : the library with its own attention"] == 2
    assert values["1 request, our engine : the library's generator with our attention"] == 0.8


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    spec = check_tokens.REFERENCE.spec(tmp_path)
    save_spec(spec, tmp_path / "spec")
    restored = msgspec.json.decode(
        (tmp_path / "spec").read_bytes(), type=ModelSpec, dec_hook=lambda kind, value: kind(value)
    )
    assert restored == spec
