"""What engine/backends/base.py promises, kept by every backend."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from engine.backends.base import BackendRequest, LoadProgress
from engine.config import SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest, LoadCancelled
from tests.contract.driving import GREEDY, SEEDED, TOKENS, Drive, Subject, ask, params, prompt

PARAMS = pytest.mark.parametrize("knobs", [GREEDY, SEEDED], ids=["greedy", "seeded"])


# --- load and unload ------------------------------------------------------------------------------------------------


def test_a_load_reports_each_phase_to_its_end_and_says_what_it_loaded(subject: Subject) -> None:
    reports: list[LoadProgress] = []
    backend = subject.create()
    loaded = subject.load(backend, report=reports.append)
    last = {report.phase: report for report in reports}
    assert list(last)[-3:] == ["weights", "kv_cache", "warm_up"]
    assert all(report.done == report.total for report in last.values())
    stats = backend.stats()
    assert loaded.kv_tokens == stats.pages_total * loaded.page_tokens == 4096
    assert (loaded.weights_bytes, loaded.kv_bytes) == (stats.weights_bytes, stats.kv_bytes)
    assert loaded.vocab_size > 250
    assert (stats.steps, stats.pages_cached, stats.pages_free) == (0, 0, stats.pages_total)


@pytest.mark.parametrize("phase", ["weights", "kv_cache", "warm_up"])
def test_a_load_can_be_cancelled_in_every_phase_and_leaves_nothing(subject: Subject, phase: str) -> None:
    seen: list[str] = []
    backend = subject.create()
    with pytest.raises(LoadCancelled):
        subject.load(backend, report=lambda report: seen.append(report.phase), cancelled=lambda: phase in seen)
    assert (backend.stats().weights_bytes, backend.stats().pages_total) == (0, 0)
    assert backend.step() == []


def test_unloading_forgets_everything_and_can_be_done_twice(subject: Subject) -> None:
    drive = Drive(subject.loaded(), ask("a", prompt(0)), ask("b", prompt(1)))
    drive.step()
    backend = drive.backend
    backend.unload()
    backend.unload()
    backend.check()
    assert not backend.has_work()
    assert backend.step() == []
    assert (backend.stats().pages_total, backend.stats().weights_bytes, backend.stats().sequences) == (0, 0, ())


def test_a_backend_loads_again_after_an_unload(subject: Subject) -> None:
    backend = subject.loaded()
    backend.unload()
    subject.load(backend)
    assert Drive(backend, ask("a", prompt(0))).to_end()["a"] == subject.alone(ask("a", prompt(0)))


def test_a_step_with_nothing_to_do_gives_nothing(subject: Subject) -> None:
    backend = subject.loaded()
    assert not backend.has_work()
    assert backend.step() == []
    backend.check()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "length"), [({}, 512), ({"kv_cache_tokens": 256}, 257), ({"max_input_len": 30}, 31)])
def test_a_prompt_that_cannot_fit_is_refused_with_numbers(subject: Subject, spec: dict[str, int], length: int) -> None:
    backend = subject.loaded(**spec)
    with pytest.raises(ContextLengthExceeded, match=f"{length} tokens, more than the ") as refused:
        backend.submit(ask("a", prompt(0, length)))
    assert refused.value.details["prompt_tokens"] == length
    limit = refused.value.details["limit"]
    assert isinstance(limit, int)
    assert limit < length
    assert not backend.has_work()
    assert Drive(backend, ask("a", prompt(0, limit))).to_end()["a"]


def test_tokens_outside_the_vocabulary_are_refused_by_name(subject: Subject) -> None:
    backend = subject.loaded()
    for request, param in (
        (ask("a", [5, 99_999]), "prompt"),
        (ask("b", [5], generated=[-1]), "generated"),
        (ask("c", [5], params(logit_bias={99_999: 1.0})), "logit_bias"),
        (ask("d", []), "prompt"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            backend.submit(request)
        assert refused.value.details["param"] == param
    assert not backend.has_work()


def test_an_id_cannot_be_taken_twice(subject: Subject) -> None:
    backend = subject.loaded()
    backend.submit(ask("a", prompt(0)))
    with pytest.raises(InvalidRequest, match="id a"):
        backend.submit(ask("a", prompt(1)))


# --- one request, one answer ----------------------------------------------------------------------------------------


@PARAMS
def test_a_request_gets_the_same_answer_whatever_else_runs(subject: Subject, knobs: SamplingParams) -> None:
    requests = [ask(str(salt), prompt(salt, 5 + 57 * salt), knobs) for salt in range(6)]
    together = Drive(subject.loaded(max_prompts=4), *requests).to_end()
    assert together == {request.id: subject.alone(request) for request in requests}
    assert all(len(tokens) == TOKENS for tokens in together.values())


@PARAMS
@pytest.mark.parametrize("had", [1, 11])
def test_a_resumed_request_goes_on_as_if_nothing_had_happened(
    subject: Subject, knobs: SamplingParams, had: int
) -> None:
    whole = subject.alone(ask("whole", prompt(3), knobs))
    resumed = Drive(subject.loaded(), ask("resumed", prompt(3), knobs, generated=whole[:had]))
    assert resumed.to_end()["resumed"] == whole
    assert len(resumed.events["resumed"]) == TOKENS - had


def test_different_seeds_give_different_answers(subject: Subject) -> None:
    answers = {
        tuple(subject.alone(ask("a", prompt(0), params(temperature=1.5, seed=seed)))) for seed in (-5, 5, 6, 2**62)
    }
    assert len(answers) == 4


def test_what_a_prompt_had_in_the_cache_is_reported_with_how_far_it_is(subject: Subject) -> None:
    backend = subject.loaded()
    Drive(backend, ask("first", prompt(1, 300))).to_end()
    drive = Drive(backend, ask("again", prompt(1, 300) + prompt(9, 100)))
    stats = drive.until(lambda stats: any(each.computed_tokens for each in stats.sequences))
    [sequence] = stats.sequences
    assert 256 <= sequence.cached_tokens <= min(300, sequence.computed_tokens)
    drive.to_end()
    assert drive.events["again"][0].cached_tokens == sequence.cached_tokens


@PARAMS
def test_a_known_prefix_is_found_and_changes_nothing(subject: Subject, knobs: SamplingParams) -> None:
    backend = subject.loaded()
    first = Drive(backend, ask("first", prompt(1, 300), knobs))
    again = Drive(backend)
    answer = first.to_end()["first"]
    again.add(ask("again", prompt(1, 300), knobs))
    assert again.to_end()["again"] == answer
    cached = [event.cached_tokens for event in again.events["again"]]
    assert [event.cached_tokens for event in first.events["first"]] == [0] + [None] * (TOKENS - 1)
    assert 256 <= cached[0] < 300  # type: ignore[operator]
    assert cached[1:] == [None] * (TOKENS - 1)
    stats = backend.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (600, cached[0])
    assert stats.prompt_tokens_computed == 600 - stats.prefix_hit_tokens
    assert stats.pages_cached > 0


def test_a_request_finds_what_its_own_scope_computed_or_all_scopes_share(subject: Subject) -> None:
    """A walk of requests that begin as others of all scopes did, or go on from their answers, or are cancelled."""
    rng = random.Random(7)
    drive = Drive(subject.loaded(max_prompts=4, kv_cache_tokens=16384))
    asked: list[BackendRequest] = []
    for number in range(120):
        before = rng.choice(asked) if asked and rng.random() < 0.3 else None
        known = [*before.prompt_ids, *drive.tokens[before.id]] if before else prompt(rng.randrange(6), 440)
        tokens = [*known[: rng.choice((100, 300, 440))], *prompt(rng.randrange(99), rng.choice((1, 20)))]
        scope, shared = rng.choice(("", "alice", "bob")), rng.choice((0, 0, 260))
        knobs = params(max_tokens=rng.choice((1, 10)))
        asked.append(ask(str(number), tokens, knobs, cache_scope=scope, shared_tokens=min(shared, len(tokens))))
        drive.add(asked[-1])
        for _ in range(rng.randrange(6)):
            drive.step()
        if rng.random() < 0.1 and asked[-1].id not in drive.finish:
            drive.cancel(asked[-1].id)
    drive.to_end()
    found = {
        request.id: drive.events[request.id][0].cached_tokens or 0 for request in asked if drive.events[request.id]
    }
    assert sum(cached > 0 for cached in found.values()) > 20
    for request in asked:
        assert found.get(request.id, 0) <= max(
            _may_find(request, other, drive) for other in asked if other is not request
        )


def _may_find(request: BackendRequest, other: BackendRequest, drive: Drive) -> int:
    """Most tokens of a prompt that may come of another request."""
    alike = _common(request.prompt_ids, [*other.prompt_ids, *drive.tokens[other.id]])
    if request.cache_scope == other.cache_scope:
        return alike
    return min(alike, *(each.shared_tokens for each in (request, other) if each.cache_scope))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def test_a_prompt_is_counted_once_however_often_its_answer_goes_on_anew(subject: Subject) -> None:
    """As one does that takes tokens back, or that another worker had."""
    backend = subject.loaded()
    answer = Drive(backend, ask("a", prompt(1, 300))).to_end()["a"]
    for generated, banned in (([], answer[:1]), (answer[:5], answer[5:6]), (answer[:9], [])):
        again = Drive(backend, ask("a", prompt(1, 300), generated=generated, banned_next=tuple(banned)))
        again.to_end()
        assert again.events["a"][0].cached_tokens is not None
    stats = backend.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (300, 0)


def test_a_request_at_the_contexts_end_ends_with_length(subject: Subject) -> None:
    drive = Drive(subject.loaded(), ask("a", prompt(0, 500), params(max_tokens=1000)))
    tokens = drive.to_end()["a"]
    assert drive.finish == {"a": "length"}
    assert 12 - 3 <= len(tokens) <= 12


def test_a_request_for_no_tokens_ends_with_its_prompt(subject: Subject) -> None:
    drive = Drive(subject.loaded(), ask("a", prompt(0), params(max_tokens=0)), ask("b", prompt(1)))
    tokens = drive.to_end()
    assert [(event.token_id, event.finish) for event in drive.events["a"]] == [(None, "length")]
    assert tokens["b"] == subject.alone(ask("b", prompt(1)))


# --- parameters -----------------------------------------------------------------------------------------------------


def test_end_tokens_are_masked_before_min_tokens_and_told_like_any_other_after(subject: Subject) -> None:
    knobs = params(logit_bias={7: 50.0, 9: 40.0}, min_tokens=5)
    drive = Drive(subject.loaded(), ask("a", prompt(0), knobs, end_token_ids=(7, 99_999)))
    assert drive.to_end()["a"][:6] == [9] * 5 + [7]


def test_banned_next_binds_the_very_next_token_alone(subject: Subject) -> None:
    knobs = params(logit_bias={7: 50.0, 9: 40.0})
    fresh = Drive(subject.loaded(), ask("a", prompt(0), knobs, banned_next=(7,)))
    assert fresh.to_end()["a"] == [9] + [7] * (TOKENS - 1)
    resumed = Drive(subject.loaded(), ask("a", prompt(0), knobs, generated=[7, 7], banned_next=(7,)))
    assert resumed.to_end()["a"] == [7, 7, 9] + [7] * (TOKENS - 3)


@pytest.mark.parametrize("asked", [None, 0, 3])
def test_logprobs_come_as_many_as_asked_best_first(subject: Subject, asked: int | None) -> None:
    drive = Drive(subject.loaded(), ask("a", prompt(0), params(logprobs=asked)))
    drive.to_end()
    for event in drive.events["a"]:
        if asked is None:
            assert event.logprob is None
            continue
        assert event.logprob is not None
        assert event.logprob.token_id == event.token_id
        assert event.logprob.logprob <= 0
        values = [value for _, value in event.logprob.top]
        assert len(values) == asked
        assert values == sorted(values, reverse=True)
        if asked:
            assert event.logprob.top[0] == (event.token_id, event.logprob.logprob)


def test_logprobs_are_the_models_own_whatever_the_knobs_do(subject: Subject) -> None:
    def first(**knobs: object) -> tuple[tuple[int, float], ...]:
        drive = Drive(subject.loaded(), ask("a", prompt(0), params(logprobs=5, **knobs), end_token_ids=(3,)))
        drive.to_end()
        logprob = drive.events["a"][0].logprob
        assert logprob is not None
        return logprob.top

    plain = first()
    knobs = {"logit_bias": {plain[0][0]: -100.0}, "repetition_penalty": 3.0, "temperature": 1.7, "min_tokens": 4}
    assert first(**knobs) == plain


# --- life -----------------------------------------------------------------------------------------------------------


def test_cancelling_frees_pages_in_every_phase(subject: Subject) -> None:
    drive = Drive(subject.loaded(max_prompts=2), ask("decodes", prompt(0, 4)))
    drive.until(lambda stats: stats.decoding == 1)
    drive.add(ask("starts", prompt(1, 480)))
    drive.add(ask("waits", prompt(2)))
    drive.add(ask("unseen", prompt(3)))
    drive.step()
    assert drive.backend.stats().waiting == 2
    for name in ("unseen", "waits", "starts", "decodes", "decodes", "unknown"):
        drive.cancel(name)
    assert not drive.backend.has_work()
    assert drive.step() == []
    assert drive.backend.stats().pages_free == drive.backend.stats().pages_total


def test_a_cancelled_request_says_nothing_more_and_the_others_do_not_notice(subject: Subject) -> None:
    drive = Drive(subject.loaded(), ask("stays", prompt(0)), ask("goes", prompt(1)))
    drive.until(lambda stats: stats.decoding == 2)
    drive.step()
    drive.cancel("goes")
    while drive.backend.has_work():
        assert all(event.request_id == "stays" for event in drive.step())
    assert drive.tokens["stays"] == subject.alone(ask("stays", prompt(0)))


def test_max_prompts_can_change_at_any_time_and_nobody_is_lost(subject: Subject) -> None:
    backend = subject.loaded(max_prompts=2)
    requests = [ask(str(salt), prompt(salt)) for salt in range(6)]
    drive = Drive(backend, *requests)
    drive.step()
    assert backend.stats().waiting == 4
    backend.set_max_prompts(4)
    drive.step()
    assert backend.stats().waiting == 2
    backend.set_max_prompts(1)
    drive.step()
    assert (backend.stats().waiting, backend.stats().prefilling + backend.stats().decoding) == (2, 4)
    most = 0
    while backend.stats().waiting:
        drive.step()
        if backend.stats().waiting < 2:
            most = max(most, backend.stats().prefilling + backend.stats().decoding)
    assert most == 1
    assert drive.to_end() == {request.id: subject.alone(request) for request in requests}


def test_requests_that_do_not_fit_together_take_turns(subject: Subject) -> None:
    requests = [ask(str(salt), prompt(salt, 200)) for salt in range(5)]
    drive = Drive(subject.loaded(kv_cache_tokens=512), *requests)
    assert drive.to_end() == {request.id: subject.alone(request) for request in requests}


def test_a_step_that_fails_ends_its_requests_with_the_reason_and_the_next_work(subject: Subject) -> None:
    drive = Drive(subject.loaded(max_prompts=2), *(ask(str(salt), prompt(salt)) for salt in range(3)))
    drive.step()
    subject.fail_next_step(RuntimeError("a kernel failed"))
    drive.step()
    assert drive.finish == {"0": "error", "1": "error"}
    assert "RuntimeError: a kernel failed" in drive.events["0"][-1].message
    assert drive.to_end()["2"] == subject.alone(ask("2", prompt(2)))
    assert drive.finish.get("2") != "error"
    after = Drive(drive.backend, ask("after", prompt(1)))
    assert after.to_end()["after"] == subject.alone(ask("after", prompt(1)))
