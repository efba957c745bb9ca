"""Both shapes of log-probabilities, alternatives included."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from console.api.requests.logprobs import LOWEST, TextOffsets, chat_logprobs, completion_logprobs
from engine.backends.base import TokenLogprob
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer
from engine.text.tokenizer_config import TokenizerFolder
from tests.fakes import tiny_tokenizers
from tests.fakes.model import EOS_ID, write_fake_model

A, B, C = b"abc"
RECORDS = [
    TokenLogprob(token_id=A, logprob=-0.1, top=((A, -0.1), (B, -2.5))),
    TokenLogprob(token_id=C, logprob=float("-inf"), top=((A, -0.2), (B, -1.5))),
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Token id b is byte b."""
    return Tokenizer.from_folder(write_fake_model(tmp_path))


def test_the_completions_shape_has_the_chosen_token_among_the_alternatives(tokenizer: Tokenizer) -> None:
    offsets = TextOffsets(tokenizer, IncrementalDetokenizer(tokenizer), start=7)
    shaped = completion_logprobs([A, C], RECORDS, offsets=offsets, top=2)
    assert shaped.tokens == ["a", "c"]
    assert shaped.top_logprobs == [{"a": -0.1, "b": -2.5}, {"a": -0.2, "b": -1.5, "c": LOWEST}]
    assert shaped.text_offset == [7, 8]


def test_the_chat_shape_has_exactly_the_alternatives_best_first(tokenizer: Tokenizer) -> None:
    first, second = chat_logprobs(RECORDS, IncrementalDetokenizer(tokenizer)).content
    assert [(top.token, top.logprob, top.bytes) for top in first.top_logprobs] == [("a", -0.1, [A]), ("b", -2.5, [B])]
    assert [top.token for top in second.top_logprobs] == ["a", "b"]
    assert (second.token, second.logprob) == ("c", LOWEST)


def test_a_probability_of_zero_is_valid_json(tokenizer: Tokenizer) -> None:
    encoded = msgspec.json.encode(chat_logprobs(RECORDS, IncrementalDetokenizer(tokenizer)))
    assert msgspec.json.decode(encoded)["content"][1]["logprob"] == LOWEST


@pytest.mark.parametrize(
    ("text", "token_ids", "offsets"),
    [
        ("né!", [*"né!".encode()], [0, 1, 1, 2]),
        ("a<eos>b", [A, EOS_ID, B], [0, 1, 6]),  # written out
        ("ab", [EOS_ID, A, EOS_ID, B], [0, 0, 1, 1]),  # put there by the tokenizer
    ],
)
def test_offsets_are_those_of_the_text(
    tokenizer: Tokenizer, text: str, token_ids: list[int], offsets: list[int]
) -> None:
    found = TextOffsets.in_text(text, tokenizer)
    assert [found.push(token_id) for token_id in token_ids] == offsets


def test_skipped_control_tokens_take_no_room_in_an_answer(tokenizer: Tokenizer) -> None:
    for skip, offsets in ((True, [3, 4, 4]), (False, [3, 4, 9])):
        found = TextOffsets(tokenizer, IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), start=3)
        assert [found.push(token_id) for token_id in (A, EOS_ID, B)] == offsets


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
@pytest.mark.parametrize("text", ["the fox", "token's world, isn't it?", "the fox <s> in it"])
def test_tokens_lie_in_the_text_where_their_offsets_say(kind: str, text: str) -> None:
    tokenizer = Tokenizer(getattr(tiny_tokenizers, kind)(), TokenizerFolder())
    token_ids = tokenizer.encode(text)
    offsets = TextOffsets.in_text(text, tokenizer)
    starts = [offsets.push(token_id) for token_id in token_ids]
    pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert "".join(pieces) == text
    for piece, token_id in zip(pieces, token_ids, strict=True):
        assert piece.strip() in ("", tokenizer.token_bytes(token_id).decode().strip())


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
@pytest.mark.parametrize("text", ["the fox", "a <s> in it"])
def test_the_tokens_of_an_echoed_prompt_spell_it(kind: str, text: str) -> None:
    tokenizer = Tokenizer(getattr(tiny_tokenizers, kind)(), TokenizerFolder())
    token_ids = [*tokenizer.encode(text, add_special_tokens=False)]
    offsets = TextOffsets.in_text(text, tokenizer)
    shaped = completion_logprobs(token_ids, [None] * len(token_ids), offsets=offsets, top=0)
    assert "".join(shaped.tokens) == text
