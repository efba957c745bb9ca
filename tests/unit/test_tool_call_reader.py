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
    (
        "GPT-OSS",
        0,
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}<|call|>',
        "",
        [PARIS],
    ),
    (
        "GPT-OSS",
        0,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}",
        "I look.",
        [NOW],
    ),
    ("GPT-OSS", 0, " to=functions.now<|channel|>commentary json<|message|>{}", "", [NOW]),
    ("GPT-OSS", 0, "<|start|>assistant<|channel|>analysis to=now code<|message|>{}", "", [NOW]),
    (
        "GPT-OSS",
        0,
        "One.<|end|><|start|>assistant<|channel|>final<|message|>Two <|b|> three.",
        "One.\nTwo <|b|> three.",
        [],
    ),
    (
        "Seed-OSS",
        0,
        "Hm.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        "Hm.",
        [PARIS, NOW],
    ),
    (
        "MiniMax-M2",
        0,
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [PARIS, NOW],
    ),
    ("MiniMax-M1", 0, '<tool_calls>\n{"name": "now", "arguments": {}}\n</tool_calls>', "", [NOW]),
    (
        "DeepSeek V3.2",
        0,
        'Well.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Well.",
        [PARIS, NOW],
    ),
    (
        "DeepSeek V4",
        0,
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "",
        [NOW],
    ),
    (
        "GLM-4.5",
        0,
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "I look.",
        [PARIS, NOW],
    ),
    (
        "GLM-4.7",
        0,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3"
        "</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        [PARIS, NOW],
    ),
    (
        "Gemma 4",
        0,
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "",
        [PARIS, NOW],
    ),
    (
        "FunctionGemma",
        0,
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:<escape>3<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        "",
        [PARIS, NOW],
    ),
    (
        "Apertus",
        0,
        '<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 3}}, {"now": {}}]<|tools_suffix|>',
        "",
        [PARIS, NOW],
    ),
    (
        "LFM2",
        0,
        "<|tool_call_start|>[get_weather(city='Paris', days=3), now()]<|tool_call_end|>Looking.",
        "Looking.",
        [PARIS, NOW],
    ),
    (
        "OLMo 3",
        0,
        'Yes. <function_calls>get_weather(city="Paris", days=3)\nnow()</function_calls>',
        "Yes.",
        [PARIS, NOW],
    ),
    ("Python", 0, "[get_weather(city='Paris', days=3), now()]", "", [PARIS, NOW]),
    ("Python", 0, "[1] says now() and [now", "[1] says now() and [now", []),
    ("Python", 0, "[later()]", "[later()]", []),
    ("xLAM", 0, '[{"name": "now", "arguments": {}}]', "", [NOW]),
    ("xLAM", 0, "[1, 2]", "[1, 2]", []),
    ("GigaChat 3.1", 0, '<|function_call|>{"name": "now", "arguments": {}}', "", [NOW]),
    (
        "InternLM2",
        0,
        'Hm.<|action_start|><|plugin|>\n{"name": "now", "arguments": {}}<|action_end|>',
        "Hm.",
        [NOW],
    ),
    (
        "Granite 20B",
        0,
        '<function_call> {"name": "now", "arguments": {}}\n<function_call> {"name": "now"}',
        "",
        [NOW, NOW],
    ),
    (
        "Functionary",
        0,
        '<function=get_weather>{"city": "Paris", "days": 3}</function><function=now>{}</function>',
        "",
        [PARIS, NOW],
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


@pytest.mark.parametrize("value", ['"\\U0000d83d\\U0000de00"', '"\\ud83d"'], ids=["long escape", "no string"])
def test_half_a_character_makes_no_python_call(value: str) -> None:
    call = f"<function_calls>get_weather(days={value})</function_calls>"
    assert read_answer(reader_of("OLMo 3"), call) == (call, ())


def test_text_between_the_messages_of_an_answer_is_on_lines_of_its_own() -> None:
    text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Done."
    assert read_answer(reader_of("GPT-OSS"), text) == ("I look.\nDone.", ())


def test_space_that_begins_a_message_is_dropped_however_it_is_split() -> None:
    text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|> Done."
    reader = reader_of("GPT-OSS")
    pieces = [piece for char in text for piece in reader.feed(char)]
    assert summed([*pieces, *reader.finish()])[0] == read_answer(reader_of("GPT-OSS"), text)[0] == "I look.\nDone."


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>comm",
        "<|start|>assist",
        "<|start|>assistant<|channel|>commentary to=functions.n",
        "<|end|><|start|>",
    ],
)
def test_a_header_that_the_answer_ends_within_is_no_text(header: str) -> None:
    written = of("GPT-OSS")
    reader = CallReader(written, TOOLS, hidden=written.shape.markers)
    assert summed([*reader.feed(f"Hi.{header}"), *reader.finish()]) == ("Hi.", [], 0)


def test_a_control_token_within_a_marker_that_the_answer_ends_within_is_no_text() -> None:
    for end in ("<｜DSML｜", "<｜DSML｜func"):
        reader = CallReader(of("DeepSeek V3.2"), TOOLS, hidden=("｜DSML｜",))
        assert summed([*reader.feed(f"Hi. {end}"), *reader.finish()])[0].strip() == "Hi."


def test_a_call_of_no_known_shape_in_a_message_is_text() -> None:
    text = "<|channel|>commentary to=functions.now json<|message|>print(1)"
    said, calls, broken = summed([*(reader := reader_of("GPT-OSS")).feed(text), *reader.finish()])
    assert (said, calls, broken) == (text, [("now", "")], 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a'", "a"),
        ('"it\'s"', "it's"),
        ("'it\\'s \\n \\u00e9 \\x41 \\q'", "it's \n é A \\q"),
        ("'say \"hi\", it's'", 'say "hi", it\'s'),
        ('""', ""),
        ('""""""', ""),
        ("""'''it's, "so"\n\\tlong'''""", 'it\'s, "so"\n\tlong'),
        ("True", True),
        ("none", None),
        ("[1, 2.5, (3,), {'a': None, \"b\": [],}]", [1, 2.5, [3], {"a": None, "b": []}]),
        ("-1_000", -1000),
        ("null", None),
        ("1e3", 1000.0),
    ],
)
def test_values_of_python_calls_are_python_s(text: str, value: object) -> None:
    call = f"<function_calls>now(x={text.replace('none', 'None')}, y=1)</function_calls>"
    _, [found] = read_answer(reader_of("OLMo 3"), call)
    assert json.loads(found.arguments) == {"x": value, "y": 1}


def test_a_key_of_a_python_call_may_be_any_that_a_schema_has() -> None:
    _, [found] = read_answer(reader_of("OLMo 3"), "<function_calls>now(max-days=1, größe.x = 2)</function_calls>")
    assert json.loads(found.arguments) == {"max-days": 1, "größe.x": 2}


@pytest.mark.parametrize("text", ["f(1)", "nan", "[" * 100_000, "x", "{1: 2}", "'\\xzz'", "0x" + "f" * 10_000, "1 2"])
def test_what_is_no_literal_makes_no_python_call(text: str) -> None:
    call = f"<function_calls>now(x={text}, y=1)</function_calls>"
    assert read_answer(reader_of("OLMo 3"), call) == (call, ())


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, "{'a': [None]}", {"a": [None]}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({}, "[1]", [1]),
        ({}, "a b", "a b"),
        ({"type": "integer"}, "three", "three"),
    ],
)
@pytest.mark.parametrize("name", ["GLM-4.5", "Seed-OSS", "MiniMax-M2", "Qwen3-Coder"])
def test_a_value_without_a_type_has_that_of_the_tool_s_schema(
    name: str, schema: dict[str, object], text: str, value: object
) -> None:
    call = {
        "GLM-4.5": f"<tool_call>find\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "Seed-OSS": f"<seed:tool_call><function=find><parameter=x>{text}</parameter></function></seed:tool_call>",
        "MiniMax-M2": f'<minimax:tool_call><invoke name="find"><parameter name="x">{text}</parameter></invoke>',
        "Qwen3-Coder": f"<tool_call><function=find><parameter=x>\n{text}\n</parameter></function></tool_call>",
    }[name]
    find = Tool(name="find", parameters={"type": "object", "properties": {"x": schema}})
    _, [found] = read_answer(CallReader(of(name), [find]), call)
    assert json.loads(found.arguments) == {"x": value}


def test_a_gemma_value_may_be_quoted_as_in_json_or_not_at_all() -> None:
    call = '<|tool_call>call:now{a:"b",<|"|>c d<|"|>:e f,g:[1,{h:null}],i:"j:{k}"}<tool_call|>'
    _, [found] = read_answer(reader_of("Gemma 4"), call)
    assert json.loads(found.arguments) == {"a": "b", "c d": "e f", "g": [1, {"h": None}], "i": "j:{k}"}
