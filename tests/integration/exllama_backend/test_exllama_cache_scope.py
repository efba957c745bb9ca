"""What a request finds in the library's prefix cache: pages of its own scope, and not a token of another's."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from engine.backends.exllama.generator_backend import GeneratorBackend
from engine.config import SamplingParams
from tests.contract.driving import Drive, ask, params, prompt
from tests.fakes.exllama import RealExllama
from tests.fakes.exllama3 import RealExllama3
from tests.fakes.exllama_generator import foretell
from tests.fakes.model import VOCAB_SIZE
from tests.integration.exllama_backend.loaded import Make, load

PAGE = 256
ONE = params(max_tokens=1)

REAL = pytest.mark.parametrize("real", [RealExllama, RealExllama3], ids=["exllamav2", "exllamav3"])

_names = count()


def found(
    backend: GeneratorBackend, tokens: list[int], scope: str, knobs: SamplingParams = ONE, before: Drive | None = None
) -> int:
    """How many tokens of a prompt the cache had, as its client is told, once it is answered. before: what runs."""
    name = str(next(_names))
    drive = before or Drive(backend)
    drive.add(ask(name, tokens, knobs, cache_scope=scope))
    while name not in drive.finish:
        drive.step()
    return next(event.cached_tokens for event in drive.events[name] if event.cached_tokens is not None)


def answered(backend: GeneratorBackend, tokens: list[int], scope: str, knobs: SamplingParams) -> list[int]:
    """A prompt with its answer, which the backend has given."""
    name = str(next(_names))
    return tokens + Drive(backend, ask(name, tokens, knobs, cache_scope=scope)).to_end()[name]


@pytest.mark.parametrize("guest", ["bob", ""])
@pytest.mark.parametrize("length", [100, 256, 257, 700])
def test_a_prompt_of_one_scope_is_not_found_by_another(make_any: Make, length: int, guest: str) -> None:
    backend = load(make_any())
    secret = prompt(1, length)
    assert [found(backend, secret, scope) for scope in ("alice", guest)] == [0, 0]


@pytest.mark.parametrize("scope", ["alice", ""])
def test_a_prompt_is_found_by_its_own_scope(make_any: Make, scope: str) -> None:
    backend = load(make_any())
    first, second = [found(backend, prompt(1, 700), scope) for _ in range(2)]
    assert first == 0
    assert second >= 2 * PAGE


@REAL
def test_half_a_page_is_copied_within_a_scope_and_not_across(real: Make) -> None:
    backend = load(real(pages=64))
    secret = prompt(1, 700)
    found(backend, secret, "alice")
    for shared in (40, 255, 300, 600):
        guess = [*secret[:shared], *prompt(2, 700 - shared)]
        assert found(backend, guess, f"bob who guesses {shared}") == 0
        assert found(backend, guess, "alice") >= shared


@pytest.mark.parametrize("length", [1, 20, 250, 300])
def test_an_answer_is_found_by_its_own_scope_alone(make_any: Make, length: int) -> None:
    backend = load(make_any())
    talk = answered(backend, prompt(1, length), "alice", params(max_tokens=600))
    whole = len(talk) // PAGE * PAGE
    assert found(backend, [*talk, 7, 8], "bob") == 0
    assert found(backend, [*talk, 7, 8], "") == 0
    assert found(backend, [*talk, 7, 8], "alice") >= whole


@REAL
def test_the_half_page_that_an_answer_ended_in_is_found_too(real: Make) -> None:
    backend = load(real())
    talk = answered(backend, prompt(1), "alice", params(max_tokens=300))
    assert found(backend, [*talk, 7, 8], "bob") == 0
    assert found(backend, [*talk, 7, 8], "alice") >= len(talk) - 1


def test_scopes_that_run_at_once_share_nothing(make_any: Make) -> None:
    """Also where their answers, and so the pages that they fill, are the same."""
    backend = load(make_any(pages=32))
    for length in (20, 300):
        same = prompt(length, length)
        requests = [
            ask(f"{scope} {length}", same, params(max_tokens=400), cache_scope=scope) for scope in ("alice", "bob")
        ]
        drive = Drive(backend, *requests)
        expected = foretell(same, 400, VOCAB_SIZE)
        assert set(map(tuple, drive.to_end().values())) == {tuple(expected)}
        told = [event.cached_tokens for name in drive.events for event in drive.events[name]]
        assert [each for each in told if each is not None] == [0, 0]
        assert found(backend, same + expected + [7], "carol") == 0
        assert found(backend, same + expected + [7], "bob") >= 256


def test_requests_of_one_scope_that_fill_the_same_page_keep_the_accounts(make_any: Make) -> None:
    backend = load(make_any(pages=32))
    for _ in range(2):
        drive = Drive(
            backend,
            *(ask(str(next(_names)), prompt(3), params(max_tokens=300), cache_scope="alice") for _ in range(2)),
        )
        assert set(map(tuple, drive.to_end().values())) == {tuple(foretell(prompt(3), 300, VOCAB_SIZE))}


def test_guided_requests_and_their_negative_prompts_stay_in_their_scope(make: Make) -> None:
    backend = load(make(pages=32))
    knobs = params(cfg_scale=1.5, negative_prompt_ids=tuple(prompt(9, 400)), max_tokens=1)
    assert found(backend, prompt(1, 400), "alice", knobs) <= 200  # of both, what they have in common
    assert found(backend, prompt(9, 400), "bob") == 0
    assert found(backend, prompt(9, 400), "alice") >= 256


def test_guesses_of_a_draft_model_change_nothing_about_scopes(make: Make) -> None:
    backend = load(make(draft_tokens=3))
    talk = answered(backend, prompt(1, 200), "alice", params(max_tokens=300))
    assert found(backend, [*talk, 7], "bob") == 0
    assert found(backend, [*talk, 7], "alice") >= 256


@REAL
def test_a_cancelled_request_hands_no_page_to_another_scope(real: Make) -> None:
    """It takes the pages of others that are free, and gives them back as they were."""
    backend = load(real(pages=4))
    secret = prompt(1, 200)
    found(backend, secret, "alice")
    drive = Drive(backend, ask("bob's", prompt(2, 5), params(max_tokens=900), cache_scope="bob"))
    backend._start()
    _generator(backend).iterate_start_jobs([])
    drive.cancel("bob's")
    assert found(backend, secret, "bob") == 0
    assert found(backend, secret, "alice") > 0


def test_a_page_that_was_set_aside_while_its_prefix_was_computed_again_is_found_by_nobody() -> None:
    """The library forgets then what came before it, as if it were a first page."""
    backend = load(RealExllama(pages=9))
    secret = prompt(1, 300)
    found(backend, secret, "alice")
    found(backend, prompt(3, 1100), "carol")
    drive = Drive(backend, ask("bob's", prompt(2, 5), params(max_tokens=900), cache_scope="bob"))
    drive.step()
    assert found(backend, secret, "alice", before=drive) < PAGE, "bob's request was to take her first page"
    drive.cancel("bob's")
    (orphan,) = [
        page
        for page in backend.page_table(_generator(backend)).all_pages
        if page.prev_hash is None and page.kv_position
    ]
    assert orphan.sequence[0, :5].tolist() == secret[:5]
    assert found(backend, secret[:200], "bob") == 0


def _generator(backend: GeneratorBackend) -> Any:
    """The library's."""
    return backend._generator
