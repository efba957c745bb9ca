"""The text side of a request: end tokens, stop strings, limits, and going on after a lost worker."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.base import BackendRequest, FinishReason
from engine.config import SamplingParams
from engine.text.output_processor import OutputProcessor
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_config import TokenizerFolder
from tests.fakes import tiny_tokenizers

END = 2


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(), TokenizerFolder())


def stage(generated: list[int] | None = None, **params: object) -> OutputProcessor:
    sampling = SamplingParams(**({"max_tokens": 1000} | params))  # type: ignore[arg-type]
    request = BackendRequest(id="r", prompt_ids=[1], generated=generated or [], params=sampling, end_token_ids=(END,))
    return OutputProcessor(tokenizer(), request)


def feed(subject: OutputProcessor, ids: list[int]) -> tuple[str, FinishReason | None, int]:
    """Visible text, finish reason, and how many ids were taken until it."""
    text = ""
    for taken, token_id in enumerate(ids, start=1):
        output = subject.push(token_id)
        text += output.text
        if output.finish:
            return text, output.finish, taken
    return text, None, len(ids)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text)


def test_an_end_token_ends_the_answer_and_makes_no_text() -> None:
    ids = ids_of("the fox")
    assert feed(stage(skip_special_tokens=False), [*ids, END]) == ("the fox", "stop", len(ids) + 1)


def test_a_stop_string_ends_the_answer_before_it() -> None:
    text, finish, _ = feed(stage(stop=("lazy",)), ids_of("the lazy dog"))
    assert (text, finish) == ("the ", "stop")


def test_an_answer_that_was_resumed_goes_on_with_the_text_of_its_prompt_as_before() -> None:
    spaced = Tokenizer(tiny_tokenizers.byte_fallback(), TokenizerFolder())
    prompt, answer = spaced.encode("how"), spaced.encode("the the", add_special_tokens=False)
    for continues, expected in ((True, " the the"), (False, "the the")):
        request = BackendRequest(id="r", prompt_ids=prompt, params=SamplingParams(max_tokens=1000), continues=continues)
        whole = OutputProcessor(spaced, request)
        texts = [whole.push(token_id).text for token_id in answer]
        assert "".join(texts) == expected
        for taken in range(len(answer) + 1):
            resumed = OutputProcessor(spaced, msgspec.structs.replace(request, generated=answer[:taken]))
            assert [resumed.push(token_id).text for token_id in answer[taken:]] == texts[taken:]


def test_max_tokens_end_the_answer_with_all_its_text() -> None:
    ids = ids_of("the quick E")
    assert feed(stage(max_tokens=len(ids), stop=("END",)), ids) == ("the quick E", "length", len(ids))


def test_a_stop_in_the_last_allowed_token_counts_as_a_stop() -> None:
    ids = ids_of("the.")
    assert feed(stage(max_tokens=len(ids), stop=(".",)), ids)[:2] == ("the", "stop")
    assert feed(stage(max_tokens=len(ids) + 1), [*ids, END])[:2] == ("the.", "stop")


def test_an_end_token_releases_text_held_for_a_stop_string() -> None:
    assert feed(stage(stop=("END",)), [*ids_of("the EN"), END])[:2] == ("the EN", "stop")


def test_stop_strings_count_from_min_tokens_on() -> None:
    ids = ids_of("a.b.c")
    assert len(ids) == 5
    assert feed(stage(stop=(".",), min_tokens=3), ids) == ("a.b", "stop", 4)
    assert feed(stage(stop=(".",), min_tokens=4), ids) == ("a.b", "stop", 4)
    assert feed(stage(stop=(".",), min_tokens=5), ids) == ("a.b.c", None, 5)


def test_an_end_token_before_min_tokens_changes_nothing() -> None:
    assert feed(stage(min_tokens=4), [*ids_of("a"), END, *ids_of("bc"), END]) == ("abc", "stop", 5)


def test_nothing_comes_after_the_end() -> None:
    subject = stage()
    feed(subject, [END])
    assert subject.push(ids_of("a")[0]).text == ""
    assert subject.finish == "stop"


def test_an_answer_that_its_backend_ends_gives_its_held_text() -> None:
    subject = stage(stop=("fox jumps",))
    assert feed(subject, ids_of("the fox"))[0] == "the "
    assert subject.flush() == ("", "fox")


def test_replayed_ids_that_end_the_answer_say_so() -> None:
    assert stage(generated=ids_of("abc"), max_tokens=3).finish == "length"


@given(
    text=st.text("ab😀世. ", max_size=30),
    cut=st.integers(0, 60),
    stops=st.lists(st.text("ab. ", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 5),
)
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_resumed_request_emits_exactly_what_was_still_to_come(
    text: str, cut: int, stops: list[str], min_tokens: int, include_stop: bool
) -> None:
    params = {"stop": tuple(stops), "min_tokens": min_tokens, "include_stop": include_stop}
    ids = [*ids_of(text), END]
    whole = stage(**params)
    before, finish, taken = feed(whole, ids[:cut])
    if finish:
        return
    after = feed(whole, ids[cut:])
    assert feed(stage(generated=ids[:taken], **params), ids[cut:]) == after
    assert feed(stage(**params), ids)[0] == before + after[0]
