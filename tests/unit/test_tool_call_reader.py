"""Tool calls in answers: every format, however its text is split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.api.tools import (
    AnswerPiece,
    CallArguments,
    CallEnd,
    CallMalformed,
    CallReader,
    CallStart,
    CallTruncated,
    TextPiece,
    Tool,
    read_answer,
)
from console.api.tools.formats import FORMATS, ToolFormat

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
TOOLS = (WEATHER, Tool(name="now"))
PARIS = ("get_weather", {"city": "Paris", "days": 3})
OSLO = ("get_weather", {"city": 'Oslo "N"\n{}</tool_call>'})
NOW = ("now", {})

Calls = list[tuple[str, dict[str, object]]]

CASES: list[tuple[str, int, str, str, Calls]] = [
    (
        "Hermes",
        0,
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
        "Let me see.",
        [PARIS, NOW],
    ),
    ("Hermes", 0, '<tool_call>{"name": "now", "arguments": null}', "", [NOW]),
    ("Hermes", 0, '<tool_call>{"name": "now"}</tool_call> done', " done", [NOW]),
    (
        "Hermes",
        0,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}</tool_call>',
        "",
        [PARIS],
    ),
    (
        "Hermes",
        0,
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>',
        "",
        [NOW],
    ),
    (
        "Hermes",
        0,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo \\"N\\"\\n{}</tool_call>"}}\n</tool_call>',
        "",
        [OSLO],
    ),
    (
        "Hermes",
        0,
        "<think>\nshall I?\n</think>\n\nNo calls < here",
        "<think>\nshall I?\n</think>\n\nNo calls < here",
        [],
    ),
    (
        "Qwen3-Coder",
        0,
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>",
        "I look.",
        [PARIS, NOW],
    ),
    (
        "Qwen3-Coder",
        0,
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo "N"\n{}</tool_call>\n</parameter>\n</function>\n'
        "</tool_call>",
        "",
        [OSLO],
    ),
    (
        "Mistral",
        1,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": "abcdef123"}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [PARIS, NOW],
    ),
    (
        "Mistral",
        0,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}',
        "",
        [PARIS, NOW],
    ),
    ("Mistral", 0, "Hm. [TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}", "Hm.", [NOW]),
    ("Mistral", 0, "[TOOL_CALLS]now{}", "", [NOW]),
    ("Llama 3", 0, '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', "", [PARIS]),
    ("Llama 3", 0, '\n\n{"type": "function", "name": "now", "parameters": {}}; {"name": "now"}', "", [NOW, NOW]),
    ("Llama 3", 0, '<|python_tag|>{"name": "now", "parameters": {}}', "", [NOW]),
    ("Llama 3", 0, '{"name": "Paris", "parameters": {}}', '{"name": "Paris", "parameters": {}}', []),
    ("Llama 3", 0, '{"city": "Paris", "name": "now"}', '{"city": "Paris", "name": "now"}', []),
    ("Llama 3", 0, 'So: {"name": "now", "parameters": {}}', 'So: {"name": "now", "parameters": {}}', []),
    ("Granite", 0, '<|tool_call|>[{"name": "now", "arguments": {}}]', "", [NOW]),
    ("Phi-4", 0, '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", [NOW]),
    ("Nemotron", 0, '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', "", [NOW]),
    ("Jamba", 0, 'Yes\n<tool_calls>[\n  {"name": "now", "arguments": {}}\n]</tool_calls>', "Yes", [NOW]),
    (
        "Command R7B",
        0,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [NOW],
    ),
    (
        "DeepSeek V3",
        0,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [PARIS, NOW],
    ),
    (
        "DeepSeek V3.1",
        0,
        'Well<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well",
        [PARIS, NOW],
    ),
    (
        "Kimi K2",
        0,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [NOW],
    ),
]
IDS = [f"{case[0]}-{i}" for i, case in enumerate(CASES)]


def of(name: str, which: int = 0) -> ToolFormat:
    """A format of the table by its name."""
    return [each for each in FORMATS if each.name == name][which]


def reader_of(name: str, which: int = 0, **options: bool) -> CallReader:
    """A reader whose control tokens are all its markers."""
    written = of(name, which)
    return CallReader(written, TOOLS, **options)


def summed(pieces: list[AnswerPiece]) -> tuple[str, list[tuple[str, str]], int]:
    """What is said in all, each call's name and arguments, and how many calls broke."""
    said = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    texts = ["" for _ in names]
    began = -1
    for piece in pieces:
        began += isinstance(piece, CallStart)
        if isinstance(piece, CallArguments):
            texts[began] += piece.text
    return said, list(zip(names, texts, strict=True)), sum(isinstance(piece, CallMalformed) for piece in pieces)


def split(text: str, cuts: list[int]) -> list[str]:
    """The text in pieces, cut at these places."""
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "which", "text", "said", "calls"), CASES, ids=IDS)
def test_each_format_is_read(name: str, which: int, text: str, said: str, calls: Calls) -> None:
    words, found = read_answer(reader_of(name, which), text)
    assert words == said
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert len({call.id for call in found}) == len(found)


@pytest.mark.parametrize(("name", "which", "text", "said", "calls"), CASES, ids=IDS)
def test_text_that_comes_a_character_at_a_time_is_read_the_same(
    name: str, which: int, text: str, said: str, calls: Calls
) -> None:
    reader = reader_of(name, which)
    pieces = [piece for character in text for piece in reader.feed(character)] + reader.finish()
    words, found, broken = summed(pieces)
    assert words == said
    assert [(has_calls, json.loads(arguments)) for has_calls, arguments in found] == calls
    assert broken == 0
    assert sum(isinstance(piece, CallEnd) for piece in pieces) == len(calls)


@settings(max_examples=200, deadline=None)
@given(
    case=st.sampled_from(CASES),
    noise=st.text(alphabet='{}[]"<>|/\\ \nabtool_callARGS:,;=`', max_size=30),
    cuts=st.lists(st.integers(0, 10**4), max_size=12),
    cut_off=st.integers(0, 10**4),
)
def test_any_split_gives_the_same_calls_and_the_same_text(
    case: tuple[str, int, str, str, Calls], noise: str, cuts: list[int], cut_off: int
) -> None:
    name, which, text, _, _ = case
    at = cut_off % (len(text) + 1)
    text = text[:at] + noise + text[at:]
    once = reader_of(name, which)
    together = summed([*once.feed(text), *once.finish()])
    apart = reader_of(name, which)
    pieces = [piece for part in split(text, cuts) for piece in apart.feed(part)]
    assert summed([*pieces, *apart.finish()]) == together


@pytest.mark.parametrize(("name", "which", "text", "said", "calls"), CASES, ids=IDS)
def test_an_answer_cut_off_anywhere_has_its_whole_calls_one_partial_call_and_no_markup(
    name: str, which: int, text: str, said: str, calls: Calls
) -> None:
    _, complete = read_answer(reader_of(name, which), text)
    openings = of(name, which).shape.openings
    for end in range(len(text) if calls else 0):
        words, found = read_answer(reader_of(name, which), text[:end])
        assert [call.name for call in found] == [has_calls for has_calls, _ in calls][: len(found)]
        assert not any(call.truncated for call in found[:-1])
        for call, entire in zip(found, complete, strict=False):
            assert entire.arguments.startswith(call.arguments) if call.truncated else call.arguments == entire.arguments
        beyond = words.strip().removeprefix(said.strip()).strip()
        maybe_text = any(opening.startswith(beyond) for opening in openings)
        bare = of(name, which).bare and not found and words == text[:end]
        assert said.strip().startswith(words.strip()) or maybe_text or bare


@pytest.mark.parametrize(("name", "which", "text", "said", "calls"), CASES, ids=IDS)
def test_an_answer_held_to_calls_has_no_text_wherever_it_is_cut_off(
    name: str, which: int, text: str, said: str, calls: Calls
) -> None:
    for end in range(len(text) if calls and not said else 0):
        words, _ = read_answer(reader_of(name, which, required=True), text[:end])
        assert words == ""


def test_a_partial_call_stops_before_the_tag_that_the_answer_ends_within() -> None:
    head = "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"
    for tail in ("", "\n", "\n</para"):
        said, [call] = read_answer(reader_of("Qwen3-Coder"), head + tail)
        assert (said, call.arguments, call.truncated) == ("", '{"city": "Par', True)
    _, [call] = read_answer(reader_of("Qwen3-Coder"), head + "is\n</parameter>\n<parameter=days>\n1")
    assert call.arguments == '{"city": "Paris", "days": '


@pytest.mark.parametrize("value", ["4", "-1.5e", "tru", "true"])
def test_a_value_that_the_answer_may_end_within_is_no_part_of_a_partial_call(value: str) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {{"a": {value}'
    said, [call] = read_answer(reader_of("Hermes"), text)
    assert (said, call.arguments, call.truncated) == ("", '{"a": ', True)


def test_an_answer_ends_with_calls_only_where_all_are_whole() -> None:
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": {"a'
    reader = reader_of("Hermes")
    pieces = [*reader.feed(text), *reader.finish()]
    assert [type(piece) for piece in pieces][-2:] == [CallArguments, CallTruncated]
    assert not reader.has_calls


def test_arguments_are_given_as_they_come_after_the_name() -> None:
    reader = reader_of("Hermes")
    assert reader.feed('Hm.\n<tool_call>\n{"name": "get_wea') == [TextPiece("Hm.")]
    [began] = reader.feed('ther", "arguments": ')
    assert isinstance(began, CallStart)
    assert (began.index, began.name) == (0, "get_weather")
    assert reader.feed('{"city": "Pa') == [CallArguments(0, '{"city": "Pa')]
    assert reader.feed('ris"}') == [CallArguments(0, 'ris"}')]
    assert reader.feed("}") == [CallEnd(0)]


def test_what_may_begin_a_call_is_held_back_and_nothing_else() -> None:
    reader = reader_of("Hermes")
    assert reader.feed("a <b") == [TextPiece("a <b")]
    assert reader.feed(" <tool") == []
    assert reader.feed("box> ") == [TextPiece(" <toolbox>")]
    assert reader.finish() == [TextPiece(" ")]


def test_a_malformed_call_is_broken_off_and_given_as_text(caplog: pytest.LogCaptureFixture) -> None:
    reader = reader_of("Hermes")
    text = 'So <tool_call>{"name": "now", "arguments": {"a" 1}}</tool_call>'
    said, calls, broken = summed([*reader.feed(text), *reader.finish()])
    assert said == text
    assert (calls, broken) == ([("now", '{"a" ')], 1)
    assert not reader.has_calls
    assert "a colon is missing" in caplog.text
    assert read_answer(reader_of("Hermes"), text) == (text, ())


def test_line_breaks_in_a_string_are_mended() -> None:
    _, [call] = read_answer(reader_of("Hermes"), '<tool_call>{"name": "now", "arguments": {"a": "b\n\tc"}}</tool_call>')
    assert json.loads(call.arguments) == {"a": "b\n\tc"}


def test_only_the_first_of_several_calls_is_given_where_one_was_asked_for() -> None:
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "get_weather"}</tool_call>'
    _, calls = read_answer(reader_of("Hermes", one=True), text)
    assert [call.name for call in calls] == ["now"]


def test_control_tokens_that_mark_calls_are_never_given_as_text() -> None:
    written = of("DeepSeek V3.1")
    text = "a<｜tool▁call▁end｜> b<｜tool▁calls▁begin｜> c<｜tool▁call▁begin｜>d e"
    reader = CallReader(written, TOOLS, hidden=written.shape.markers)
    assert summed([*reader.feed(text), *reader.finish()])[0] == "a b cd e"


def test_ids_are_short_where_the_template_wants_them_so() -> None:
    _, [call] = read_answer(reader_of("Mistral"), "[TOOL_CALLS]now[ARGS]{}")
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("true", True), ("True", True), ("None", None), ("[1, 2]", [1, 2]), ("NaN", "NaN"), ("a b", "a b")],
)
def test_a_parameter_of_any_other_kind_than_a_string_is_what_its_text_is(text: str, value: object) -> None:
    call = f"<function=now>\n<parameter=x>\n{text}\n</parameter>\n</function>"
    _, [found] = read_answer(reader_of("Qwen3-Coder"), call)
    assert json.loads(found.arguments) == {"x": value}


@pytest.mark.parametrize("arguments", ['{"city": NaN}', '{"city": ' + "[" * 100_000], ids=["NaN", "deep"])
def test_arguments_in_a_string_that_are_no_json_are_no_call(arguments: str) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {json.dumps(arguments)}}}</tool_call>'
    hermes = next(known for known in FORMATS if known.name == "Hermes")
    assert read_answer(CallReader(hermes, TOOLS), text) == (text, ())


@pytest.mark.parametrize(
    "call",
    ['{"name": "\\ud800"}', '{"name": "now", "arguments": "{\\"city\\": \\"\\udc00\\"}"}'],
    ids=["name", "arguments"],
)
def test_half_a_character_makes_no_call(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    hermes = next(known for known in FORMATS if known.name == "Hermes")
    assert read_answer(CallReader(hermes, TOOLS), text) == (text, ())
