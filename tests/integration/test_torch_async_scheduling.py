"""Steps planned ahead, with a real (tiny) model on a device that does its work late: the answers are those without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.backends.sampling.sampler import SampledToken, SamplerOutput, SampleRow
from engine.backends.torch import runner as runner_module
from engine.backends.torch.cuda.step_transfer import readback_for
from engine.config import DeviceShare, SamplingParams
from tests.fakes import queued
from tests.fakes.ahead import GREEDY, SEEDED, Asked, ahead, answers, load, plainly, same
from tests.fakes.recording import FakeRecorder
from tests.fakes.recording import use as use_recorder
from tests.fakes.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ahead"), with_tokenizer=False)


def test_the_next_step_is_launched_before_the_ids_of_this_one_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"a": Asked(1), "b": Asked(2, SEEDED, 20), "c": Asked(3, GREEDY, 50)}
    backend, queue = ahead(folder, monkeypatch)
    same(answers(backend, asked), plainly(folder, asked))
    steps = queue.log.count("read")
    assert queue.log == ["launch", *["launch ahead", "read"] * (steps - 1), "read"]
    assert queue.waits == 0  # nothing but those ids was read
    assert backend.stats().steps == steps


def test_requests_that_join_leave_and_stop_in_the_middle_disturb_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {
        "stays": Asked(1),
        "seeded": Asked(2, SEEDED),
        "leaves": Asked(3, leaves=5),
        "joins": Asked(4, SEEDED, 40, after=("stays", 4)),
        "joins late": Asked(5, after=("leaves", 5)),
        "one token": Asked(6, SamplingParams(temperature=0, max_tokens=1), after=("stays", 6)),
    }
    once = plainly(folder, asked)
    stop = once["stays"][8].token_id
    assert stop is not None
    asked["stays"] = Asked(1, stops=frozenset({stop}))
    expected = plainly(folder, asked)
    assert len(expected["stays"]) <= 9
    backend, queue = ahead(folder, monkeypatch)
    same(answers(backend, asked), expected)
    assert queue.log.count("launch ahead") > 10 and queue.waits == 0


def test_preempted_requests_and_those_without_pages_are_answered_as_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    asked = {name: Asked(salt, params, 10 + 4 * salt) for salt, name in enumerate("abcd")}
    asked["alone"] = Asked(7, SamplingParams(temperature=0, max_tokens=500), 20, after=("d", 24))
    backend, queue = ahead(folder, monkeypatch, kv_tokens=112)
    found, expected = answers(backend, asked), plainly(folder, asked, kv_tokens=112)
    same(found, expected)
    assert found["alone"][-1].finish == "length"
    assert backend.stats().preemptions > 0
    assert queue.log.count("launch ahead") > 10


def test_the_contexts_end_is_no_surprise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"a": Asked(1, SamplingParams(temperature=0, max_tokens=500), 30), "b": Asked(2)}
    backend, _ = ahead(folder, monkeypatch, max_model_len=44)
    found = answers(backend, asked)
    same(found, plainly(folder, asked, max_model_len=44))
    assert (len(found["a"]), found["a"][-1].finish) == (14, "length")


class Alternating:
    """A mask that allows even tokens and odd ones by turns, and knows every token before."""

    is_complete, error = False, ""

    def __init__(self) -> None:
        self._taken: list[int] = []

    def bitmask(self) -> bytes:
        return bytes([0b01010101 if len(self._taken) % 2 == 0 else 0b10101010] * 40)

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == len(self._taken) % 2
        self._taken.append(token_id)

    def restart(self, generated: Sequence[int]) -> None:
        self._taken = list(generated)


def test_what_depends_on_the_last_token_finds_it_beside_what_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {
        "plain": Asked(1),
        "penalised": Asked(
            2, SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=0.5, max_tokens=14)
        ),
        "window": Asked(3, SamplingParams(seed=3, repetition_penalty=1.4, repetition_range=9, max_tokens=14)),
        "dry": Asked(4, SamplingParams(temperature=0, dry_multiplier=3, dry_allowed_length=1, max_tokens=14)),
        "masked": Asked(5, mask=Alternating),
        "at least": Asked(6, SamplingParams(temperature=0, min_tokens=4, top_k=5, seed=1, max_tokens=9)),
    }
    backend, queue = ahead(folder, monkeypatch)
    found = answers(backend, asked)
    same(found, plainly(folder, asked))
    assert [event.token_id % 2 for event in found["masked"] if event.token_id is not None] == [0, 1] * 7
    assert queue.log.count("launch ahead") > 10 and queue.waits == 0


def test_filters_for_which_the_best_tokens_suffice_never_wait_for_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {
        "top_p": Asked(1, SamplingParams(temperature=0.05, top_p=0.9, seed=7, max_tokens=14)),
        "min_p": Asked(2, SamplingParams(min_p=0.2, seed=8, logprobs=2, max_tokens=14), 20),
        "plain": Asked(3),
    }
    backend, queue = ahead(folder, monkeypatch)
    same(answers(backend, asked), plainly(folder, asked))
    assert queue.log.count("launch ahead") > 10 and queue.waits == 0


@pytest.mark.parametrize("recorded", [False, True])
def test_a_token_for_which_they_do_not_suffice_is_drawn_once_more_and_its_next_step_dropped(
    recorded: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {
        "flat": Asked(1, SamplingParams(temperature=1.5, top_p=0.97, seed=7, logprobs=2, max_tokens=12)),
        "flat too": Asked(2, SamplingParams(temperature=2.5, min_p=0.01, seed=9, max_tokens=12), 20, after=("flat", 3)),
        "penalised": Asked(
            3, SamplingParams(temperature=1.5, top_p=0.97, frequency_penalty=0.5, max_tokens=9), after=("flat", 5)
        ),
        "masked": Asked(4, SamplingParams(temperature=2, top_p=0.98, max_tokens=9), mask=Alternating),
        "plain": Asked(5, after=("flat", 2)),
    }
    expected = plainly(folder, asked)
    if recorded:
        use_recorder(monkeypatch, FakeRecorder())
    backend, queue = ahead(folder, monkeypatch)
    redrawn: list[int] = []
    draw_undecided = SamplerOutput.draw_undecided

    def counted(drawn: SamplerOutput, rows: Sequence[SampleRow]) -> dict[int, SampledToken | None]:
        waits = queue.waits
        found = draw_undecided(drawn, rows)
        redrawn.extend(found)
        queue.waits = waits  # only those are counted that have another cause
        return found

    monkeypatch.setattr(SamplerOutput, "draw_undecided", counted)
    same(answers(backend, asked), expected)
    assert 0 < len(redrawn) <= 3  # a request looks at more tokens from its second token on
    assert queue.log.count("launch ahead") > 10 and queue.waits == 0


def test_a_prefix_that_was_computed_ahead_is_found_by_its_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"a": Asked(1, GREEDY, 30), "again": Asked(1, SEEDED, 30, after=("a", 14))}
    backend, _ = ahead(folder, monkeypatch)
    found, expected = answers(backend, asked), plainly(folder, asked)
    same(found, expected)
    assert [events[0].cached_tokens for events in found.values()] == [0, 24]
    goes_on = {
        "b": Asked(1, GREEDY, 30, says=[event.token_id for event in found["a"] if event.token_id is not None][:12])
    }
    found = answers(backend, goes_on)
    assert found["b"][0].cached_tokens == 40  # 30 of the prompt and 10 of the answer, in pages of 8
    same(found, plainly(folder, goes_on))


def test_a_step_waits_where_guesses_or_a_prompt_s_probabilities_need_its_ids(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"told": Asked(1, SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=6), 50), "b": Asked(2)}
    backend, _ = ahead(folder, monkeypatch)
    found, expected = answers(backend, asked), plainly(folder, asked)
    same(found, expected)
    ours, theirs = found["told"][0].prompt_logprobs, expected["told"][0].prompt_logprobs
    assert len(ours) == len(theirs) == 50
    backend, queue = ahead(folder, monkeypatch, ngram_draft=True)
    same(answers(backend, {"b": Asked(2)}), plainly(folder, {"b": Asked(2)}))
    assert "launch ahead" not in queue.log


def test_recorded_decodes_take_the_ids_that_the_step_before_drew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"a": Asked(1), "b": Asked(2, SEEDED, 20), "c": Asked(3, GREEDY, 50, after=("a", 4))}
    expected = plainly(folder, asked)
    recorder = use_recorder(monkeypatch, FakeRecorder())
    backend, queue = ahead(folder, monkeypatch)
    recorded = recorder.recorded
    same(answers(backend, asked), expected)
    assert recorder.replayed > 14 and recorder.recorded == recorded > 0
    assert queue.log.count("launch ahead") > 10 and queue.waits == 0


def test_a_cpu_waits_for_every_step_and_so_does_a_mixture_of_experts(tmp_path: Path, folder: Path) -> None:
    assert readback_for(torch.device("cpu")) is None
    assert load(folder)._runner.readback is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "readback_for", lambda device: queued.QueuedLanding(queued.Queue()))
        backend = load(make_tiny_model(tmp_path, "Qwen2MoeForCausalLM", with_tokenizer=False))
        assert backend._runner.readback is None


@pytest.mark.parametrize("records", [False, True], ids=["eager", "recorded"])
def test_a_split_model_is_scheduled_ahead_too(folder: Path, records: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"a": Asked(1), "b": Asked(2, SEEDED, 20), "c": Asked(3, GREEDY, 50, after=("a", 4))}
    expected = plainly(folder, asked)
    recorder = use_recorder(monkeypatch, FakeRecorder()) if records else FakeRecorder()
    shares = tuple(DeviceShare(device=f"sim:{number}", layers=1, working_bytes=256 << 20) for number in range(2))
    backend, queue = ahead(folder, monkeypatch, shares=shares)
    same(answers(backend, asked), expected)
    assert queue.log.count("launch ahead") > 10 and queue.waits == 0
    assert (recorder.replayed > 28) == records
