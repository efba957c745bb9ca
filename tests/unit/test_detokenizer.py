"""Streaming text: what the pushes and the flush give together is the text of all ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SamplingParams
from engine.errors import UnsupportedModel
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer, begins_text
from engine.text.tokenizer_config import TokenizerFolder
from tests.fakes import tiny_tokenizers

KINDS = ("byte_level", "byte_fallback", "metaspace")


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(getattr(tiny_tokenizers, kind)(), TokenizerFolder())


def stream(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[str]:
    """The text of each push, then of the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=st.text(st.sampled_from("the fox é\n")), answer=st.text(st.sampled_from("the fox é\n")))
def test_an_answer_that_goes_on_with_a_text_reads_as_the_whole_decoded_at_once(
    kind: str, prompt: str, answer: str
) -> None:
    subject = tokenizer(kind)
    before, after = subject.encode(prompt), subject.encode(answer, add_special_tokens=False)
    begins = begins_text(subject, before, SamplingParams(), continues=True)
    detokenizer = IncrementalDetokenizer(subject, begins=begins)
    text = "".join(detokenizer.push(token_id) for token_id in after) + detokenizer.flush()
    assert subject.decode(before) + text == subject.decode([*before, *after])


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_of_its_own_begins_without_the_space_that_the_tokenizer_writes(kind: str) -> None:
    subject = tokenizer(kind)
    before, after = subject.encode("how"), subject.encode("the", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(
        subject, begins=begins_text(subject, before, SamplingParams(), continues=False)
    )
    assert "".join(map(detokenizer.push, after)) == "the"


def test_text_behind_a_control_token_begins_where_the_tokenizer_writes_a_space_there() -> None:
    subject = tokenizer("byte_fallback")
    raw = tiny_tokenizers.byte_fallback()
    raw.normalizer = None
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    once = Tokenizer(raw, TokenizerFolder())
    prompt = subject.encode("how</s>", add_special_tokens=False)
    assert subject.opens_text(prompt)
    assert not once.opens_text(prompt)
    for each in (subject, once):
        assert each.opens_text([])
        assert each.opens_text(each.encode(""))
        assert not each.opens_text(each.encode("how"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str) -> None:
    subject = tokenizer(kind)
    for begins in (True, False):
        detokenizer, spelt, text = IncrementalDetokenizer(subject, begins=begins), b"", ""
        for token_id in subject.encode("the fox é", add_special_tokens=False):
            spelt += detokenizer.bytes_of(token_id)
            text += detokenizer.push(token_id)
        assert spelt.decode() == text + detokenizer.flush()


def is_lone_byte(token: str) -> bool:
    return token.startswith("<0x") and int(token[3:5], 16) >= 0x80


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_of_any_ids_is_their_decoded_text(kind: str, data: st.DataObject, skip: bool) -> None:
    subject = tokenizer(kind)
    known = [i for i in range(subject.vocab_size + 3) if not is_lone_byte(subject.id_to_token(i))]
    ids = data.draw(st.lists(st.sampled_from(known), max_size=40))
    assert "".join(stream(subject, ids, skip_special_tokens=skip)) == subject.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_beyond_the_vocabulary_is_not_the_start_of_the_text(kind: str) -> None:
    subject = tokenizer(kind)
    ids = [subject.vocab_size + 1, *subject.encode(" a", add_special_tokens=False)]
    assert "".join(stream(subject, ids)) == subject.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the 世界😀👩‍👩‍👧é  \n"))))
def test_streamed_text_of_any_text_is_its_decoded_text(kind: str, text: str) -> None:
    subject = tokenizer(kind)
    ids = subject.encode(text)
    assert "".join(stream(subject, ids)) == subject.decode(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_level_text_comes_back_as_it_was(text: str) -> None:
    subject = tokenizer("byte_level")
    assert "".join(stream(subject, subject.encode(text))) == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_of_several_tokens_appears_once_and_whole(kind: str) -> None:
    subject = tokenizer(kind)
    ids = subject.encode("a😀b", add_special_tokens=False)
    texts = [text for text in stream(subject, ids) if text.strip()]
    assert texts == ["a", "😀", "b"]


def test_a_byte_that_no_character_begins_with_is_not_held_back() -> None:
    subject = tokenizer("byte_fallback")
    bad = subject.token_to_id("<0xFF>")
    assert bad is not None
    assert stream(subject, [bad, bad]) == ["\ufffd", "\ufffd", ""]


def test_an_unfinished_character_is_shown_as_broken_by_the_flush() -> None:
    subject = tokenizer("byte_level")
    ids = subject.encode("😀")[:-1]
    assert stream(subject, ids) == [""] * len(ids) + ["\ufffd"]


def test_a_bad_byte_token_does_not_take_the_good_characters_before_it_along() -> None:
    subject = tokenizer("byte_fallback")
    ids = subject.encode("😀", add_special_tokens=False)[-4:]
    bad = subject.token_to_id("<0xFF>")
    assert bad is not None
    assert "".join(stream(subject, [*ids, bad])) == "😀\ufffd"


def test_a_space_after_a_skipped_control_token_is_kept() -> None:
    subject = tokenizer("byte_fallback")
    the, end = subject.token_to_id("▁the"), subject.token_to_id("</s>")
    assert the is not None and end is not None
    assert stream(subject, [end, the, end, the]) == ["", "the", "", " the", ""]


def test_ids_beyond_the_vocabulary_make_no_text() -> None:
    subject = tokenizer("byte_level")
    assert stream(subject, [subject.vocab_size + 100]) == ["", ""]


def test_a_decoder_that_looks_ahead_is_refused_by_name() -> None:
    backend = tiny_tokenizers.metaspace()
    backend.decoder = tokenizers.decoders.CTC()
    with pytest.raises(UnsupportedModel, match="CTC"):
        Tokenizer(backend, TokenizerFolder())


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_token_that_is_to_be_shown_is_text_where_the_others_are_skipped(kind: str) -> None:
    subject = tokenizer(kind)
    shown, *others = sorted(subject.special_ids)
    detokenizer = IncrementalDetokenizer(subject, shown=[shown])
    text = "".join(detokenizer.push(token_id) for token_id in (*others, shown))
    assert text == subject.decode([shown], skip_special_tokens=False)
