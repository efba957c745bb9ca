"""How the ExLlamaV2 backend deals out its pages, and what it does when something fails."""

from __future__ import annotations

import pytest
import torch

from engine.backends.base import BackendRequest
from engine.config import SamplingParams
from engine.errors import ModelLoadFailed, WorkerFailed
from tests.contract.driving import GREEDY, SEEDED, TOKENS, Drive, ask, params, prompt
from tests.fakes.exllama import FakeExllama, RealExllama
from tests.fakes.exllama_generator import foretell
from tests.fakes.model import VOCAB_SIZE
from tests.integration.exllama_backend.loaded import Make, answer, load


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


def computed(drive: Drive) -> dict[str, int]:
    """Tokens of each request that are computed."""
    return {each.request_id: each.computed_tokens for each in drive.backend.stats().sequences}


def long_prompts(client: int, *salts: int) -> list[BackendRequest]:
    """Requests of a client, of 1,000 tokens each."""
    return [ask(f"{client}-{salt}", prompt(salt, 1000), client=client) for salt in salts]


def test_a_client_with_many_long_prompts_does_not_hold_up_the_answers_of_another(make: Make) -> None:
    """Beside a short request a step computes one chunk of the long prompts, two where it ends one, not one of each."""
    short = ask("short", prompt(9), client=2)
    drive = Drive(load(make(pages=32, max_chunk_size=256)), *long_prompts(1, 0, 1, 2))
    drive.step()
    assert computed(drive) == {"1-0": 256, "1-1": 256, "1-2": 256}, "a client alone gets it all"
    drive.add(short)
    drive.step()
    assert computed(drive) == {"1-0": 512, "1-1": 256, "1-2": 256, "short": 20}
    for _ in range(8):
        before = sum(each for name, each in computed(drive).items() if name != "short")
        drive.step()
        assert sum(each for name, each in computed(drive).items() if name != "short") - before <= 2 * 256
    assert computed(drive)["1-2"] > 256
    answers = drive.to_end()
    assert {name: len(tokens) for name, tokens in answers.items()} == dict.fromkeys(answers, TOKENS)
    assert answers["short"] == foretell(prompt(9), TOKENS, VOCAB_SIZE)
    assert answers["1-2"] == foretell(prompt(2, 1000), TOKENS, VOCAB_SIZE)


def test_clients_with_long_prompts_share_the_prompt_tokens_whatever_the_number_of_their_requests(make: Make) -> None:
    drive = Drive(load(make(pages=32, max_chunk_size=256)), *long_prompts(1, 0, 1, 2, 3), *long_prompts(2, 4))
    for _ in range(6):
        drive.step()
        tokens = computed(drive)
        first, second = (sum(n for name, n in tokens.items() if name.startswith(client)) for client in "12")
        assert abs(first - second) <= 256, tokens
    assert drive.to_end().keys() == {"1-0", "1-1", "1-2", "1-3", "2-4"}


def waiting_for_pages(make_any: Make) -> Drive:
    """8 pages: 5 of them held for 500 tokens, and a request that waits for 6."""
    drive = Drive(load(make_any(pages=8)), ask("old", prompt(0, 600), params(max_tokens=500), client=1))
    drive.step()
    drive.add(ask("long", prompt(1, 1480), client=2))
    drive.step()
    assert drive.backend.stats().waiting == 1
    return drive


def test_requests_that_fit_go_on_while_a_long_prompt_waits_for_pages(make_any: Make) -> None:
    drive = waiting_for_pages(make_any)
    short = [f"short {salt}" for salt in range(10)]
    for salt, name in enumerate(short):
        drive.add(ask(name, prompt(salt + 2), client=3 + salt % 2))
    drive.until(lambda stats: drive.finish.keys() >= set(short))
    assert drive.finish.keys() == set(short)
    assert drive.tokens["long"] == []
    assert drive.to_end()["long"] == foretell(prompt(1, 1480), TOKENS, VOCAB_SIZE)


def test_a_long_prompt_gets_its_pages_however_many_others_keep_coming(make_any: Make) -> None:
    drive = waiting_for_pages(make_any)
    for step in range(240):
        if step % 6 == 0:  # so that no two of them end together
            drive.add(ask(f"short {step}", prompt(step + 2), client=3 + step))
        if step == 63:
            drive.cancel("old")
        drive.step()
    assert "long" in drive.finish
    drive.to_end()


@pytest.mark.parametrize("draft_tokens", [0, 7])
def test_a_clamped_answer_ends_with_length_inside_pages_and_context(make: Make, draft_tokens: int) -> None:
    for pages, context in ((2, 2048), (16, 600)):
        fakes = make(pages=pages, max_model_len=context, draft_tokens=draft_tokens)
        drive = Drive(load(fakes), ask("a", prompt(0, 300), params(max_tokens=5000)))
        assert len(drive.to_end()["a"]) == min(pages * 256, context) - 300 - draft_tokens
        assert drive.finish == {"a": "length"}


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


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: out of memory")],
    ids=["torch", "driver"],
)
def test_running_out_of_memory_is_told_as_that(make: Make, error: Exception) -> None:
    fakes = make()
    drive = Drive(load(fakes), ask("a", prompt(0)))
    fakes.faults.add("iterate", error)
    drive.to_end()
    assert "out of memory" in drive.events["a"][-1].message


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
    assert (drive.backend.stats().prompts_limit, drive.backend.stats().oom_steps) == (5, 2)
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


def test_a_generator_that_cannot_be_replaced_ends_the_worker_and_no_request(make: Make) -> None:
    fakes = make()
    drive = Drive(load(fakes, max_prompts=1), ask("a", prompt(0)), ask("b", prompt(1)))
    drive.step()
    fakes.faults.add("iterate", RuntimeError("broken"))
    fakes.faults.add("make_generator", RuntimeError("no memory for its buffers"))
    with pytest.raises(WorkerFailed, match="could not be replaced: RuntimeError: no memory for its buffers"):
        drive.step()
    assert not drive.finish


@pytest.mark.parametrize("where", ["iterate", "enqueue"])
def test_a_lost_device_is_not_mended_and_ends_the_worker(make: Make, where: str) -> None:
    fakes = make()
    backend = load(fakes)
    backend.submit(ask("a", prompt(0)))
    fakes.faults.add(where, torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(WorkerFailed, match="the worker lost its device: CUDA error: an illegal memory access"):
        backend.step()
    assert len(fakes.generators) == 1


@pytest.mark.parametrize("message", ["no kernel image", "CUDA error: no kernel image is available"])
def test_a_model_that_cannot_answer_fails_its_load_and_gives_its_memory_back(make: Make, message: str) -> None:
    fakes = make()
    fakes.faults.add("iterate", RuntimeError(message))
    with pytest.raises(ModelLoadFailed, match=f"it cannot answer: .*{message}"):
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
