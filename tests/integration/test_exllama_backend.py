"""What the ExLlamaV2 backend does beyond the contract: failures, guesses, guidance, samplers.

Over a fake generator, and over the library's own on stubbed kernels: what holds for the one must hold for the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.base import BackendRequest
from engine.backends.exllama.backend import ExllamaBackend
from engine.config import ModelSpec, SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest, ModelLoadFailed, WorkerFailed
from tests.contract.driving import GREEDY, SEEDED, TOKENS, Drive, ask, params, prompt
from tests.fakes.exllama import FakeExllama, RealExllama
from tests.fakes.exllama_generator import foretell, hash_logits
from tests.fakes.exllama_job import HOLDING
from tests.fakes.model import VOCAB_SIZE


def load(fakes: FakeExllama, *, max_prompts: int = 8, **spec: object) -> ExllamaBackend:
    backend = fakes.backend()
    backend.load(
        ModelSpec(path=Path("model"), name="fake", **spec),  # type: ignore[arg-type]
        max_prompts=max_prompts,
        step_tokens=64,
        page_tokens=8,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


Make = Callable[..., FakeExllama]


@pytest.fixture(params=[FakeExllama, RealExllama], ids=["fake", "real"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a library, with the fakes' options."""
    maker: Make = request.param
    return maker


def answer(fakes: FakeExllama, request: BackendRequest) -> list[int]:
    return Drive(load(fakes), request).to_end()[request.id]


def flat(*likely: tuple[int, float]) -> Callable[[Sequence[int], int], Tensor]:
    """A model that gives these tokens these probabilities, always."""

    def logits(ids: Sequence[int], vocab_size: int) -> Tensor:
        row = torch.full((vocab_size,), -60.0)
        for token_id, probability in likely:
            row[token_id] = math.log(probability)
        return row

    return logits


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_the_models(make: Make) -> None:
    requests = [ask(str(salt), prompt(salt, 3 + 90 * salt)) for salt in range(8)]
    for draft_tokens in (0, 4):
        together = Drive(load(make(draft_tokens=draft_tokens)), *requests).to_end()
        assert together == {each.id: foretell(each.prompt_ids, TOKENS, VOCAB_SIZE) for each in requests}


def test_guesses_come_several_a_step_and_are_counted(make: Make) -> None:
    backend = load(make(draft_tokens=4))
    drive = Drive(backend, ask("a", prompt(0)))
    drive.to_end()
    stats = backend.stats()
    assert stats.steps < TOKENS
    assert 0 < stats.draft_accepted < stats.draft_tokens
    assert drive.finish == {"a": "length"}


def test_guesses_are_counted_by_how_far_ahead_they_were(make: Make) -> None:
    backend = load(make(draft_tokens=4))
    Drive(backend, ask("a", prompt(0)), ask("b", prompt(1))).to_end()
    stats = backend.stats()
    guessed, held = ([getattr(each, name) for each in stats.drafts] for name in ("guessed", "held"))
    assert len(stats.drafts) == 4
    assert (sum(guessed), sum(held)) == (stats.draft_tokens, stats.draft_accepted)
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1]
    assert all(each.held <= each.guessed for each in stats.drafts)


def test_a_stray_byte_holds_no_token_back(make: Make) -> None:
    def logits(ids: Sequence[int], vocab_size: int) -> Tensor:
        row = hash_logits(ids, vocab_size)
        row[HOLDING] = 99.0 if len(ids) == 20 else -99.0
        return row

    drive = Drive(load(make(logits=logits)), ask("a", prompt(0)))
    while drive.backend.has_work():
        assert len(drive.step()) == 1
    assert drive.tokens["a"][0] == HOLDING


def test_a_request_without_finite_probabilities_fails_alone(make: Make) -> None:
    def logits(ids: Sequence[int], vocab_size: int) -> Tensor:
        return hash_logits(ids, vocab_size) * (math.nan if ids[0] == 250 and len(ids) == 23 else 1)

    drive = Drive(load(make(logits=logits)), ask("a", [250, *prompt(0)]), ask("b", prompt(1)))
    assert drive.to_end()["b"] == foretell(prompt(1), TOKENS, VOCAB_SIZE)
    assert drive.finish["a"] == "error"
    assert "finite" in drive.events["a"][-1].message
    assert len(drive.tokens["a"]) == 2


def test_a_temperature_that_underflows_takes_the_most_likely_token(make: Make) -> None:
    knobs = SamplingParams(temperature=0.01, temperature_last=True, max_tokens=TOKENS, seed=1)
    assert answer(make(logits=flat((5, 0.2), (6, 0.3), (7, 0.25))), ask("a", prompt(0), knobs)) == [6] * TOKENS


def test_a_resumed_request_keeps_its_draws_with_guesses_too(make: Make) -> None:
    knobs = SamplingParams(temperature=1.3, seed=7, max_tokens=TOKENS)
    whole = answer(make(), ask("a", prompt(0), knobs))
    assert answer(make(draft_tokens=3), ask("a", prompt(0), knobs)) == whole
    assert answer(make(draft_tokens=3), ask("a", prompt(0), knobs, generated=whole[:5])) == whole


# --- samplers that are ours -----------------------------------------------------------------------------------------


def shares(fakes: FakeExllama, knobs: SamplingParams) -> dict[int, float]:
    """How often each token comes, of 600."""
    drive = Drive(load(fakes), ask("a", [1, 2, 3], knobs))
    counts = Counter(drive.to_end()["a"])
    return {token_id: count / 600 for token_id, count in counts.items()}


def test_xtc_leaves_all_likely_choices_out_but_the_least() -> None:
    fakes = FakeExllama(max_model_len=4096, logits=flat((5, 0.5), (6, 0.3), (7, 0.15), (8, 0.05)))
    always = shares(fakes, SamplingParams(xtc_probability=1.0, max_tokens=600, seed=3))
    assert always.keys() == {7, 8}
    assert always[7] == pytest.approx(0.75, abs=0.06)
    half = shares(fakes, SamplingParams(xtc_probability=0.5, max_tokens=600, seed=3))
    assert half[5] == pytest.approx(0.25, abs=0.06)
    assert half[7] == pytest.approx((0.15 + 0.75) / 2, abs=0.06)


def test_xtc_leaves_mirostats_state_as_one_draw_does() -> None:
    fakes = FakeExllama(logits=flat((5, 0.5), (6, 0.3), (7, 0.2)))
    knobs = SamplingParams(xtc_probability=1.0, mirostat=2, max_tokens=10, seed=3)
    drive = Drive(load(fakes), ask("a", prompt(0), knobs))
    drive.until(lambda stats: bool(fakes.generators[-1].active_jobs))
    settings = fakes.generators[-1].active_jobs[0].gen_settings
    drive.to_end()
    assert settings.mirostat_mu == [10.0]


def test_frequency_and_presence_penalties_leave_the_prompt_alone(make: Make) -> None:
    model = flat((5, 0.6), (6, 0.4))
    knobs = params(presence_penalty=2.0, max_tokens=2)
    assert answer(make(logits=model), ask("a", [5, 5, 5], knobs)) == [5, 6]


def test_dry_stops_a_repeat(make: Make) -> None:
    def loops(ids: Sequence[int], vocab_size: int) -> Tensor:
        row = torch.zeros(vocab_size)
        row[10 + (ids[-1] - 9) % 3] = 5.0
        return row

    plain = answer(make(logits=loops), ask("a", [10, 11, 12]))
    assert plain == [10, 11, 12] * 8
    assert answer(make(logits=loops), ask("a", [10, 11, 12], params(dry_multiplier=10.0)))[:3] != plain[:3]


# --- guidance -------------------------------------------------------------------------------------------------------


def test_guidance_runs_two_sequences_and_answers_with_both(make: Make) -> None:
    negative = tuple(prompt(5, 300))
    knobs = params(cfg_scale=1.5, negative_prompt_ids=negative)
    fakes = make()
    drive = Drive(load(fakes), ask("a", prompt(0), knobs))
    drive.until(lambda stats: stats.decoding == 1)
    assert fakes.generators[-1].num_remaining_jobs() == 1
    assert drive.backend.stats().pages_free == 16 - 1 - 2
    known: list[int] = []
    for _ in range(TOKENS):
        positive = hash_logits([*prompt(0), *known], VOCAB_SIZE).log_softmax(-1)
        against = hash_logits([*negative, *known], VOCAB_SIZE).log_softmax(-1)
        known.append(int((1.5 * positive - 0.5 * against).argmax()))
    assert drive.to_end()["a"] == known


def test_guidance_takes_two_places(make: Make) -> None:
    knobs = params(cfg_scale=1.5, negative_prompt_ids=(1, 2, 3))
    drive = Drive(load(make(places=3)), *(ask(str(salt), prompt(salt), knobs) for salt in range(3)))
    drive.step()
    assert (drive.backend.stats().decoding, drive.backend.stats().waiting) == (1, 2)
    drive.to_end()


@pytest.mark.parametrize(
    ("fakes", "knobs", "param"),
    [
        ({}, {"cfg_scale": 1.5}, "negative_prompt"),
        ({"draft_tokens": 2}, {"cfg_scale": 1.5, "negative_prompt_ids": (1,)}, "cfg_scale"),
        ({"places": 1}, {"cfg_scale": 1.5, "negative_prompt_ids": (1,)}, "cfg_scale"),
        ({}, {"cfg_scale": 1.5, "negative_prompt_ids": (9999,)}, "negative_prompt"),
        ({"draft_tokens": 2, "ngram": True}, {}, "prompt"),
    ],
)
def test_what_would_break_the_generator_for_everybody_is_refused_by_name(
    make: Make, fakes: dict[str, object], knobs: dict[str, object], param: str
) -> None:
    backend = load(make(**fakes))
    with pytest.raises(InvalidRequest) as refused:
        backend.submit(ask("a", [1, 2], params(**knobs)))
    assert refused.value.details["param"] == param
    assert not backend.has_work()


def test_a_negative_prompt_counts_against_the_pages(make: Make) -> None:
    knobs = params(cfg_scale=2.0, negative_prompt_ids=tuple(prompt(1, 600)))
    with pytest.raises(ContextLengthExceeded, match="600 tokens"):
        load(make(pages=4)).submit(ask("a", prompt(0, 300), knobs))


# --- pages ----------------------------------------------------------------------------------------------------------


def test_pages_are_taken_for_the_whole_answer_before_it_starts(make: Make) -> None:
    fakes = make(pages=4)
    drive = Drive(load(fakes), ask("a", prompt(0), params(max_tokens=700)), ask("b", prompt(1), params(max_tokens=300)))
    drive.step()
    assert (drive.backend.stats().decoding, drive.backend.stats().waiting) == (1, 1)
    assert drive.backend.stats().pages_free == 1
    assert [len(tokens) for tokens in drive.to_end().values()] == [700, 300]


def test_long_answers_share_pages_that_would_not_hold_them_whole(make: Make) -> None:
    backend = load(make(pages=6))
    knobs = params(max_tokens=900)
    drive = Drive(backend, *(ask(str(salt), prompt(salt), knobs) for salt in range(3)))
    drive.step()
    assert (backend.stats().decoding, backend.stats().waiting) == (2, 1)
    answers = drive.to_end()
    assert answers == {str(salt): foretell(prompt(salt), 900, VOCAB_SIZE) for salt in range(3)}
    assert drive.finish == dict.fromkeys("012", "length")
    assert [sum(event.cached_tokens is not None for event in drive.events[name]) for name in "012"] == [1, 1, 1]
    assert backend.stats().prefix_query_tokens == 60


def test_seeded_answers_of_several_leases_are_one(make: Make) -> None:
    knobs = SamplingParams(temperature=1.2, seed=5, max_tokens=700, frequency_penalty=0.1)
    whole = answer(make(), ask("a", prompt(0), knobs))
    assert answer(make(draft_tokens=3), ask("a", prompt(0), knobs)) == whole
    assert answer(make(), ask("a", prompt(0), knobs, generated=whole[:530])) == whole
    assert len(whole) == 700


def test_knobs_side_by_side_do_not_mix(make: Make) -> None:
    knobs = [
        SamplingParams(temperature=1.5, xtc_probability=0.7, xtc_threshold=0.02, seed=1, max_tokens=TOKENS),
        params(dry_multiplier=1.0, dry_allowed_length=1, max_tokens=200),
        params(frequency_penalty=0.5, presence_penalty=0.5, logprobs=3),
        SamplingParams(temperature=0.8, temperature_last=True, top_k=5, seed=2, max_tokens=TOKENS),
        params(cfg_scale=1.5, negative_prompt_ids=(1, 2, 3)),
        GREEDY,
    ]
    requests = [ask(str(number), prompt(number), each) for number, each in enumerate(knobs)]
    together = Drive(load(make()), *requests).to_end()
    assert together == {request.id: answer(make(), request) for request in requests}


def test_a_long_prompt_is_computed_in_chunks_beside_the_others(make: Make) -> None:
    backend = load(make(max_chunk_size=256))
    drive = Drive(backend, ask("a", prompt(0)), ask("b", prompt(1, 1000)))
    drive.step()
    stats = backend.stats()
    assert (stats.prefilling, stats.decoding) == (1, 1)
    assert [(each.computed_tokens, each.known_tokens) for each in stats.sequences] == [(20, 21), (256, 1000)]
    drive.to_end()


@pytest.mark.parametrize("draft_tokens", [0, 7])
def test_a_clamped_answer_ends_with_length_inside_pages_and_context(make: Make, draft_tokens: int) -> None:
    for pages, context in ((2, 2048), (16, 600)):
        fakes = make(pages=pages, max_model_len=context, draft_tokens=draft_tokens)
        drive = Drive(load(fakes), ask("a", prompt(0, 300), params(max_tokens=5000)))
        assert len(drive.to_end()["a"]) == min(pages * 256, context) - 300 - draft_tokens
        assert drive.finish == {"a": "length"}


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["iterate", "prefilled", "decoded"])
def test_a_failing_iteration_ends_the_requests_in_it_alone(where: str) -> None:
    fakes = FakeExllama(pages=4)
    drive = Drive(load(fakes, max_prompts=2))
    drive.add(ask("runs", prompt(0), params(max_tokens=700)))
    drive.step()
    drive.add(ask("waits for pages", prompt(1), params(max_tokens=300)))
    drive.add(ask("waits for its turn", prompt(2)))
    drive.step()
    fakes.faults.add(where, RuntimeError("a kernel failed"))
    drive.step()
    assert drive.finish == {"runs": "error"}
    assert "RuntimeError: a kernel failed" in drive.events["runs"][-1].message
    assert len(fakes.generators) == 2
    tokens = drive.to_end()
    assert tokens["waits for pages"] == foretell(prompt(1), 300, VOCAB_SIZE)
    assert tokens["waits for its turn"] == foretell(prompt(2), TOKENS, VOCAB_SIZE)


def test_a_request_that_waited_through_a_failure_keeps_its_ban(make: Make) -> None:
    fakes = make(pages=4)
    drive = Drive(load(fakes), ask("runs", prompt(0, 400)))
    drive.step()
    knobs = params(logit_bias={7: 50.0, 9: 40.0}, max_tokens=300)
    drive.add(ask("waits for pages", prompt(1), knobs, banned_next=(7,)))
    drive.add(ask("waits too", prompt(1, 600), knobs, banned_next=(7,)))
    drive.step()
    assert drive.backend.stats().waiting == 1
    fakes.faults.add("iterate", RuntimeError("a kernel failed"))
    tokens = drive.to_end()
    assert drive.finish["runs"] == "error"
    assert tokens["waits too"] == [9] + [7] * 299


def test_running_out_of_memory_is_told_as_that(make: Make) -> None:
    fakes = make()
    drive = Drive(load(fakes), ask("a", prompt(0)))
    fakes.faults.add("iterate", torch.OutOfMemoryError("CUDA out of memory"))
    drive.to_end()
    assert "not enough memory" in drive.events["a"][-1].message


@pytest.mark.parametrize(
    ("make", "where"),
    [
        *((FakeExllama, where) for where in ("iterate", "prefilled", "decoded")),
        (RealExllama, "iterate"),  # the stubbed kernels fail whole steps alone
    ],
    indirect=["make"],
)
@pytest.mark.parametrize("knobs", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_step_that_runs_out_of_memory_goes_on_with_fewer_requests(
    make: Make, where: str, knobs: SamplingParams
) -> None:
    requests = [ask(str(salt), prompt(salt, 3 + 90 * salt), knobs) for salt in range(8)]
    expected = {request.id: answer(make(), request) for request in requests}
    fakes = make()
    drive = Drive(load(fakes), *requests)
    for _ in range(4):
        drive.step()
    fakes.faults.add(where, *(torch.OutOfMemoryError("CUDA out of memory") for _ in range(2)))
    assert drive.to_end() == expected
    assert set(drive.finish.values()) == {"length"}
    assert drive.backend.stats().prompts_limit == 5
    assert len(fakes.generators) == 3
    drive.backend.set_max_prompts(8)
    assert drive.backend.stats().prompts_limit == 0


def test_a_job_that_the_library_refuses_fails_alone(make: Make) -> None:
    fakes = make()
    drive = Drive(load(fakes), ask("a", prompt(0)), ask("b", prompt(1)))
    fakes.faults.add("enqueue", AssertionError("Job requires 99 pages"))
    assert drive.to_end()["b"] == foretell(prompt(1), TOKENS, VOCAB_SIZE)
    assert "Job requires 99 pages" in drive.events["a"][-1].message
    assert len(fakes.generators) == 1


def test_a_failing_cancel_makes_the_generator_anew(make: Make) -> None:
    fakes = make()
    drive = Drive(load(fakes, max_prompts=2), *(ask(str(salt), prompt(salt)) for salt in range(3)))
    drive.step()
    fakes.faults.add("cancel", RuntimeError("page table"))
    drive.backend.cancel("0")
    assert drive.backend.has_work()
    assert [event.request_id for event in drive.backend.step() if event.finish == "error"] == ["1"]
    while drive.backend.has_work():
        drive.backend.step()
        drive.backend.check()
    assert drive.backend.stats().pages_free == drive.backend.stats().pages_total


def test_a_generator_that_cannot_be_mended_degrades_the_backend(make: Make) -> None:
    fakes = make()
    backend = load(fakes, max_prompts=1)
    drive = Drive(backend, ask("a", prompt(0)), ask("b", prompt(1)))
    drive.step()
    fakes.faults.add("iterate", RuntimeError("broken"))
    fakes.faults.add("make_generator", RuntimeError("no memory for its buffers"))
    drive.step()
    assert drive.finish == {"a": "error", "b": "error"}
    assert "no memory for its buffers" in backend.stats().degraded
    assert not backend.has_work()
    with pytest.raises(WorkerFailed, match="no memory for its buffers"):
        backend.submit(ask("c", prompt(2)))
    backend.unload()
    assert backend.stats().degraded == ""


def test_a_lost_device_is_not_mended(make: Make) -> None:
    fakes = make()
    backend = load(fakes)
    backend.submit(ask("a", prompt(0)))
    fakes.faults.add("iterate", RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        backend.step()
    assert len(fakes.generators) == 1


def test_a_model_that_cannot_answer_fails_its_load_and_gives_its_memory_back(make: Make) -> None:
    fakes = make()
    fakes.faults.add("iterate", RuntimeError("no kernel image"))
    with pytest.raises(ModelLoadFailed, match="no kernel image"):
        load(fakes)
    assert fakes.freed == 1


def test_memory_is_given_back_once(make: Make) -> None:
    fakes = make()
    backend = load(fakes)
    backend.submit(ask("a", prompt(0), GREEDY))
    backend.step()
    backend.unload()
    backend.unload()
    assert fakes.freed == 1
