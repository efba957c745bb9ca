"""Thinking, kept apart from the answer: markers of models, pieces of any size, budgets, and grammars after it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.backends.base import BackendRequest
from engine.config import Grammar, SamplingParams, Thinking
from engine.text.grammar import GrammarMasks
from engine.text.output_processor import OutputProcessor
from engine.text.thinking import (
    BY_NAME,
    FORMATS,
    ThinkingFormat,
    ThinkingSplitter,
    format_of,
    thinking_after,
    with_thinking,
)
from engine.text.tokenizer import Tokenizer
from tests.fakes.model import EOS_ID, VOCAB_SIZE
from tests.fakes.tool_templates import write_tool_model

TAGS = Thinking(open="<think>", close="</think>")
INSIDE = msgspec.structs.replace(TAGS, inside=True)


def split(thinking: Thinking, *pieces: str) -> tuple[str, str]:
    """The thinking and the answer of a text that comes in these pieces."""
    splitter = ThinkingSplitter(thinking)
    found = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(thought for thought, _ in found), "".join(text for _, text in found)


def tokenizer_of(folder: Path, template: str = "{{ messages }}", *control_tokens: str) -> Tokenizer:
    write_tool_model(folder, template, control_tokens)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("inside", [False, True])
def test_thinking_and_answer_are_apart_however_the_text_is_cut(each: ThinkingFormat, inside: bool) -> None:
    thinking = Thinking(open=each.open, close=each.close, answer=each.answer, inside=inside)
    text = f"{'' if inside else each.open}\nFirst <this>, then\n that.\n{each.close}\n\nThe  answer.\n"
    expected = ("First <this>, then\n that.", "The  answer.\n")
    for size in (1, 2, 3, 7, len(text)):
        assert split(thinking, *(text[at : at + size] for at in range(0, len(text), size))) == expected


@pytest.mark.parametrize("text", ["  An answer.", "<thin ice> is", "", "<", "\n\n"])
def test_an_answer_without_thinking_is_as_it_was(text: str) -> None:
    for size in (1, len(text) or 1):
        assert split(TAGS, *(text[at : at + size] for at in range(0, len(text), size))) == ("", text)


def test_thinking_that_never_closes_is_all_thinking() -> None:
    assert split(TAGS, "<think>on and", " on </thi") == ("on and on </thi", "")
    assert split(INSIDE, "on and on") == ("on and on", "")


def test_an_answer_in_its_own_channel_loses_the_channel_s_name() -> None:
    harmony = BY_NAME["harmony"]
    thinking = Thinking(open=harmony.open, close=harmony.close, answer=harmony.answer)
    assert split(thinking, *"<|channel|>final<|message|>Hello") == ("", "Hello")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now",
            ("Hm.", "<|start|>assistant<|channel|>commentary to=functions.now"),
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.now",
            ("Hm.", "<|start|>assistant to=functions.now"),
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.",
            ("Hm.", "I look."),
        ),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ok.", ("Hm.", "Ok.")),
        ("<|channel|>analysis<|message|>Hm. <|end|><|start|>assist", ("Hm.", "")),
        ("<|channel|>analy", ("", "")),
    ],
)
def test_a_call_ends_the_thinking_and_is_part_of_the_answer(text: str, expected: tuple[str, str]) -> None:
    harmony = BY_NAME["harmony"]
    thinking = Thinking(open=harmony.open, close=harmony.close, answer=harmony.answer, ends=harmony.ends)
    for size in (1, 2, 3, 7, len(text)):
        assert split(thinking, *(text[at : at + size] for at in range(0, len(text), size))) == expected


def test_only_a_request_with_tools_has_thinking_that_a_call_ends(tmp_path: Path) -> None:
    harmony = BY_NAME["harmony"]
    tokenizer = tokenizer_of(tmp_path, f"{{{{ messages }}}}{harmony.open}", "<|end|>", "<|call|>")
    plain = with_thinking(harmony, SamplingParams(), tokenizer, "user: hi")
    tools = with_thinking(harmony, SamplingParams(shown_token_ids=(VOCAB_SIZE + 1,)), tokenizer, "user: hi")
    assert plain.thinking is not None and plain.thinking.ends == ()
    assert tools.thinking is not None and tools.thinking.ends == harmony.ends


def test_a_later_marker_is_part_of_the_answer() -> None:
    assert split(TAGS, "<think>a</think>write <think> and </think>") == ("a", "write <think> and </think>")


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.name)
def test_the_format_is_known_by_the_chat_template(each: ThinkingFormat, tmp_path: Path) -> None:
    assert format_of(tokenizer_of(tmp_path, f"{{{{ messages }}}}{each.open}")) == each


def test_the_format_is_known_by_tokens_or_by_the_setting(tmp_path: Path) -> None:
    with_tokens = tokenizer_of(tmp_path / "a", "{{ messages }}", "[THINK]", "[/THINK]")
    assert format_of(with_tokens) == BY_NAME["magistral"]
    assert format_of(with_tokens, "off") is None
    plain = tokenizer_of(tmp_path / "b")
    assert format_of(plain) is None
    assert format_of(plain, "think") == BY_NAME["think"]


@pytest.mark.parametrize(
    ("prompt", "begun", "inside"),
    [
        ("user: hi\nassistant: ", "", False),
        ("user: hi\nassistant: <think>\n", "", True),
        ("user: hi\nassistant: <think>\n\n</think>\n\n", "", None),
        ("user: hi\nassistant: <think>I wonder", "<think>I wonder", True),
        ("user: hi\nassistant: <think>\nI wonder", "I wonder", True),
        ("user: hi\nassistant: <think>I know</think>The", "<think>I know</think>The", None),
        ("user: hi\nassistant: <think>\n\n</think>\n\nThe", "The", None),
        ("user: hi\nassistant: The", "The", None),
        ("user: what is <think>?\nassistant: The", "The", None),
    ],
)
def test_the_prompt_says_whether_the_answer_begins_inside_the_thinking(
    prompt: str, begun: str, inside: bool | None
) -> None:
    found = thinking_after(BY_NAME["think"], prompt, begun=begun)
    assert (None if found is None else found.inside) == inside


def request(params: SamplingParams, text: str = "", *more: int) -> BackendRequest:
    ids = [*text.encode(), *more]
    return BackendRequest(id="r", prompt_ids=[1], params=params, generated=ids, end_token_ids=(EOS_ID,))


def output_of(tokenizer: Tokenizer, params: SamplingParams, text: str) -> tuple[str, str, str, int]:
    """Thinking, answer, stop string and tokens of thinking of an answer with this text."""
    processor = OutputProcessor(tokenizer, request(params))
    thinking, answer = "", ""
    for token_id in text.encode():
        shown = processor.push(token_id)
        thinking, answer = thinking + shown.thinking, answer + shown.text
        if shown.finish is not None:
            break
    else:
        rest = processor.flush()
        thinking, answer = thinking + rest[0], answer + rest[1]
    return thinking, answer, processor.stop, processor.thinking_tokens


def test_stop_strings_end_the_answer_and_not_the_thinking(tmp_path: Path) -> None:
    params = SamplingParams(stop=("STOP",), thinking=TAGS)
    text = "<think>a STOP b</think>c STOP d"
    assert output_of(tokenizer_of(tmp_path), params, text) == ("a STOP b", "c ", "STOP", len("<think>a STOP b</think>"))


def test_replayed_tokens_leave_the_split_where_it_was(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    params = SamplingParams(thinking=TAGS, stop=("never",))
    text = "<think>why not</think>Yes, indeed"
    for cut in range(len(text)):
        resumed = OutputProcessor(tokenizer, request(params, text[:cut]))
        found = [resumed.push(token_id) for token_id in text[cut:].encode()]
        rest = resumed.flush()
        thinking = "".join(each.thinking for each in found) + rest[0]
        answer = "".join(each.text for each in found) + rest[1]
        assert "why not".endswith(thinking) and "Yes, indeed".endswith(answer)
        assert resumed.thinking_tokens == len("<think>why not</think>")


def test_banned_strings_are_found_in_both(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    params = SamplingParams(thinking=TAGS, banned_strings=("bad",))
    for text, place in (("<think>a bad", 9), ("<think>a</think>b bad", 18)):
        processor = OutputProcessor(tokenizer, request(params))
        assert [processor.push(token_id).banned_from for token_id in text.encode()][-1] == place


def allowed(bits: bytes) -> set[int]:
    return {place for place in range(8 * len(bits)) if bits[place // 8] >> place % 8 & 1}


def test_a_grammar_begins_after_the_thinking(tmp_path: Path) -> None:
    params = SamplingParams(grammar=Grammar(kind="regex", source="[0-9]+"), thinking=INSIDE)
    masks = GrammarMasks(tokenizer_of(tmp_path), VOCAB_SIZE)
    mask = masks.begin(request(params)).result()
    everything = set(range(VOCAB_SIZE)) - {EOS_ID}
    for token_id in b"hm, 7</think>":
        assert allowed(mask.bitmask()) == everything
        mask.accept(token_id)
    digits = set(b"0123456789")
    assert allowed(mask.bitmask()) == digits | set(b"\n")
    mask.accept(ord("\n"))
    assert allowed(mask.bitmask()) == digits
    mask.accept(ord("7"))
    assert allowed(mask.bitmask()) == digits | {EOS_ID}
    mask.restart(b"hm</think>")
    assert allowed(mask.bitmask()) == digits | set(b"\n")
    assert not mask.error


def test_an_answer_with_a_grammar_may_think_first_or_not(tmp_path: Path) -> None:
    params = SamplingParams(grammar=Grammar(kind="regex", source="[0-9]+"), thinking=TAGS)
    masks = GrammarMasks(tokenizer_of(tmp_path), VOCAB_SIZE)
    mask = masks.begin(request(params)).result()
    assert allowed(mask.bitmask()) == set(b"0123456789<")
    mask.accept(ord("<"))
    assert allowed(mask.bitmask()) == {ord("t")}
    mask.restart(b"1")
    assert allowed(mask.bitmask()) == {*b"0123456789", EOS_ID}


@pytest.mark.parametrize("restarted", [False, True])
def test_an_answer_whose_grammar_begins_as_the_opening_marker_does_is_not_made_to_think(
    tmp_path: Path, restarted: bool
) -> None:
    params = SamplingParams(grammar=Grammar(kind="regex", source="<tool>[0-9]"), thinking=TAGS)
    mask = GrammarMasks(tokenizer_of(tmp_path), VOCAB_SIZE).begin(request(params)).result()
    for written, then in ((b"<t", b"ho"), (b"<to", b"o"), (b"<tool>", b"0123456789"), (b"<th", b"i")):
        mask.restart(written if restarted else b"")
        for token_id in b"" if restarted else written:
            mask.accept(token_id)
        assert allowed(mask.bitmask()) == set(then)
        assert not mask.error
    for token_id in b"ink>Hm.</think><tool>7":
        assert token_id in allowed(mask.bitmask())
        mask.accept(token_id)
    assert mask.is_complete


def test_a_budget_closes_the_thinking(tmp_path: Path) -> None:
    params = SamplingParams(thinking=msgspec.structs.replace(INSIDE, budget=3))
    mask = GrammarMasks(tokenizer_of(tmp_path), VOCAB_SIZE).begin(request(params)).result()
    for token_id in b"abc":
        assert len(allowed(mask.bitmask())) == VOCAB_SIZE
        mask.accept(token_id)
    for token_id in b"</think>":
        assert allowed(mask.bitmask()) == {token_id}
        mask.accept(token_id)
    assert len(allowed(mask.bitmask())) == VOCAB_SIZE
    assert not mask.is_complete
