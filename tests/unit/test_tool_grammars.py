"""Answers that must call: whatever a grammar lets a model write is a call of its format, with arguments that fit."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from console.api.requests.structured_output import json_grammar
from console.api.tools import Tool, ToolChoice, ToolUse, read_answer, tool_use
from console.api.tools.call_grammar import call_grammar
from console.api.tools.formats import FORMATS, ToolFormat
from console.api.tools.harmony_calls import HarmonyCalls
from console.api.tools.tool_use import control_texts
from engine.backends.base import BackendRequest, TokenMask
from engine.config import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.text.grammar import GrammarMask, GrammarMasks
from engine.text.thinking import BY_NAME, ThinkingSplitter, with_thinking
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.fakes.model import EOS_ID
from tests.fakes.tool_templates import write_tool_model

pytestmark = pytest.mark.long

CITIES = ["Paris", 'Oslo "N" ::= x']
WEATHER = Tool(
    name="get_weather",
    description="root ::= what?",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": CITIES, "description": "::="},
            "days": {"type": "integer", "minimum": 1, "maximum": 3},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "exact"],
        "additionalProperties": False,
    },
    strict=True,
)
NOW = Tool(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False})
IDS = [f"{i}-{each.name}" for i, each in enumerate(FORMATS)]
MAX_TOKENS = 20_000


@pytest.fixture(params=FORMATS, ids=IDS)
def written(request: pytest.FixtureRequest) -> ToolFormat:
    """Each format."""
    assert isinstance(request.param, ToolFormat)
    return request.param


def model_of(folder: Path, written: ToolFormat, *, control: bool) -> Tokenizer:
    """A tokenizer whose template is of this format; control: whether its markers are control tokens."""
    signs = " ".join(sign.replace("\\?", "").replace("\\", "") for sign in written.patterns)
    signs = re.sub(r"\((\w+)\|\w+\)", r"\1", signs)
    template = "{# " + signs + " #}{{ tools }}{{ messages[0].content }}"
    return Tokenizer.from_folder(write_tool_model(folder, template, tokens_of(written) if control else ()))


def tokens_of(written: ToolFormat) -> tuple[str, ...]:
    """The control tokens of a format: of its markers the shortest parts."""
    texts = list(dict.fromkeys(control_texts(written)))
    return tuple(text for text in texts if not any(other in text for other in texts if other != text))


def mask_of(tokenizer: Tokenizer, use: ToolUse, text: Grammar | None = None) -> GrammarMask:
    """What the answer may be. text: the format of an answer that calls nothing."""
    params = asyncio.run(use.apply_to(SamplingParams(grammar=text)))
    request = BackendRequest(id="r", prompt_ids=[1], params=params, end_token_ids=(EOS_ID,))
    return GrammarMasks(tokenizer, tokenizer.vocab_size).begin(request).result()


def written_at_random(tokenizer: Tokenizer, use: ToolUse, seed: int, lead: list[int]) -> str:
    """An answer after `lead` that its mask allows, ended as soon as it may."""
    return text_at_random(tokenizer, mask_of(tokenizer, use), use.shown_ids, seed, lead)


def text_at_random(tokenizer: Tokenizer, mask: TokenMask, shown: Sequence[int], seed: int, lead: list[int]) -> str:
    chance, detokenizer = random.Random(seed), IncrementalDetokenizer(tokenizer, shown=shown)
    text = ""
    for token_id in lead:
        mask.accept(token_id)
        text += detokenizer.push(token_id)
    for _ in range(MAX_TOKENS):
        assert not mask.error
        bits = mask.bitmask()
        allowed = [i for i in range(tokenizer.vocab_size) if bits[i // 8] >> i % 8 & 1]
        assert allowed
        if EOS_ID in allowed:
            return text + detokenizer.flush()
        token_id = chance.choice(allowed)
        mask.accept(token_id)
        text += detokenizer.push(token_id)
    raise AssertionError(f"it does not end: {text[:200]}")


@pytest.mark.parametrize("control", [True, False], ids=["control tokens", "plain markers"])
@pytest.mark.parametrize(
    "choice", [ToolChoice("required"), ToolChoice("required", "get_weather")], ids=["any", "named"]
)
def test_whatever_the_grammar_allows_is_a_call_that_fits(
    tmp_path: Path, written: ToolFormat, choice: ToolChoice, control: bool
) -> None:
    tokenizer = model_of(tmp_path, written, control=control)
    use = tool_use(tokenizer, [WEATHER, NOW], choice)
    assert use.tool_format is written
    for seed in range(3):
        text = written_at_random(tokenizer, use, seed, [])
        reader = use.reader()
        assert reader is not None
        said, calls = read_answer(reader, text)
        assert said == ""
        assert calls
        for call in calls:
            assert call.name in (["get_weather"] if choice.name else ["get_weather", "now"])
            arguments = json.loads(call.arguments)
            if call.name == "get_weather":
                assert set(arguments) in ({"city", "exact"}, {"city", "days", "exact"})
                assert arguments["city"] in CITIES
                assert arguments.get("days", 1) in (1, 2, 3)
                assert isinstance(arguments["exact"], bool)


@pytest.mark.parametrize("control", [True, False], ids=["control tokens", "plain markers"])
def test_strict_tools_are_held_to_their_schema_when_the_model_calls_at_will(
    tmp_path: Path, written: ToolFormat, control: bool
) -> None:
    tokenizer = model_of(tmp_path, written, control=control)
    is_harmony = isinstance(written.shape, HarmonyCalls)
    if written.bare or (is_harmony and not control):
        use = tool_use(tokenizer, [WEATHER, NOW])
        assert (use.not_strict, use.grammar) == (("get_weather",), None)
        return
    use = tool_use(tokenizer, [WEATHER])
    free = mask_of(tokenizer, use)
    for token_id in tokenizer.encode("Just some text, { and < too.", add_special_tokens=False):
        assert free.bitmask()[token_id // 8] >> token_id % 8 & 1
        free.accept(token_id)
    assert free.bitmask()[EOS_ID // 8] >> EOS_ID % 8 & 1
    opening = "<|end|><|start|>assistant<|channel|>commentary to=" if is_harmony else written.shape.openings[0]
    lead = tokenizer.encode(f"Hi. {opening}", add_special_tokens=False)
    for seed in range(3):
        reader = use.reader()
        assert reader is not None
        said, calls = read_answer(reader, written_at_random(tokenizer, use, seed, lead))
        assert said == "Hi."
        assert calls
        assert all(json.loads(call.arguments)["city"] in CITIES for call in calls)


@pytest.mark.parametrize(
    ("choice", "parallel"), [(ToolChoice("required"), False), (ToolChoice("required", "now"), True)]
)
def test_one_call_is_all_that_is_allowed_where_no_parallel_calls_are_wanted_or_the_tool_is_named(
    tmp_path: Path, written: ToolFormat, choice: ToolChoice, parallel: bool
) -> None:
    tokenizer = model_of(tmp_path, written, control=True)
    one = tool_use(tokenizer, [NOW], choice, parallel=parallel)
    mask, text = mask_of(tokenizer, one), written_at_random(tokenizer, one, 0, [])
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        mask.accept(token_id)
    assert mask.is_complete


NESTED = Tool(
    name="plan",
    parameters={
        "type": "object",
        "properties": {
            "limit": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 3}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"enum": ["a", "b, c"]}},
            "place": {
                "type": "object",
                "properties": {"exact": {"type": "boolean"}, "name": {"const": "Oslo"}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
        "required": ["place"],
        "additionalProperties": False,
    },
    strict=True,
)


@pytest.mark.parametrize(
    "name", ["GPT-OSS", "GLM-4.5", "MiniMax-M2", "DeepSeek V3.2", "Gemma 4", "FunctionGemma", "LFM2"]
)
def test_nested_values_fit_their_schema_in_each_notation(tmp_path: Path, name: str) -> None:
    [written] = [each for each in FORMATS if each.name == name]
    tokenizer = model_of(tmp_path, written, control=True)
    use = tool_use(tokenizer, [NESTED], ToolChoice("required", "plan"))
    for seed in range(6):
        reader = use.reader()
        assert reader is not None
        _, [call] = read_answer(reader, written_at_random(tokenizer, use, seed, []))
        arguments = json.loads(call.arguments)
        assert set(arguments) <= {"limit", "tags", "place"}
        assert arguments.get("limit") in (None, 0, 1, 2, 3)
        assert set(arguments.get("tags", ())) <= {"a", "b, c"}
        assert arguments["place"]["name"] == "Oslo"
        assert arguments["place"].get("exact", True) in (True, False)


MIN_ITEMS = {"type": "object", "properties": {"tags": {"type": "array", "items": {}, "minItems": 1}}}
PATTERN = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "[0-9]+"}}}


@pytest.mark.parametrize(
    ("name", "schema", "keyword"), [("Gemma 4", MIN_ITEMS, "minItems"), ("Qwen3-Coder", PATTERN, "pattern")]
)
def test_what_a_notation_cannot_enforce_in_a_strict_tool_is_refused_only_where_the_call_must_come(
    tmp_path: Path, name: str, schema: dict[str, object], keyword: str
) -> None:
    [written] = [each for each in FORMATS if each.name == name]
    tokenizer = model_of(tmp_path, written, control=True)
    strict = Tool(name="find", parameters=schema, strict=True)
    for choice in (ToolChoice("required"), ToolChoice("required", "find")):
        with pytest.raises(InvalidRequest, match=f"{keyword} cannot be enforced"):
            tool_use(tokenizer, [strict, NOW], choice)
    assert tool_use(tokenizer, [Tool(name="find", parameters=schema)], ToolChoice("required")).grammar is not None
    assert tool_use(tokenizer, [strict, NOW], ToolChoice("required", "now")).grammar is not None
    use = tool_use(tokenizer, [strict, NOW])
    assert (use.not_strict, use.grammar) == (("find",), None)


TREE: dict[str, object] = {
    "type": "object",
    "$defs": {"place": {"enum": ["Oslo", "Rome"]}},
    "properties": {"name": {"$ref": "#/$defs/place"}, "next": {"$ref": "#"}},
    "required": ["name"],
    "additionalProperties": False,
}
GO = Tool(name="go", parameters={**TREE, "$id": "https://example.org/go"}, strict=True)


@pytest.mark.parametrize("control", [True, False], ids=["control tokens", "plain markers"])
def test_an_answer_beside_a_format_of_text_is_a_call_that_fits_or_text_of_the_format(
    tmp_path: Path, written: ToolFormat, control: bool
) -> None:
    tokenizer = model_of(tmp_path, written, control=control)
    form = json_grammar(TREE, "response_format")
    use = tool_use(tokenizer, [WEATHER, NOW], parallel=False)
    forced = tool_use(tokenizer, [WEATHER, NOW], ToolChoice("required"), parallel=False)
    for seed in range(3):
        call = tokenizer.encode(written_at_random(tokenizer, forced, seed, []), add_special_tokens=False)
        text = tokenizer.encode('{"name": "Oslo", "next": {"name": "Rome"}}', add_special_tokens=False)
        for tokens, calls in ((call, 1), (text, 0)):
            mask, reader = mask_of(tokenizer, use, form), use.reader()
            assert reader is not None
            said, found = read_answer(reader, text_at_random(tokenizer, mask, use.shown_ids, seed, tokens))
            assert len(found) == calls
            assert said == ("" if calls else '{"name": "Oslo", "next": {"name": "Rome"}}')
        mask, reader = mask_of(tokenizer, use, form), use.reader()
        assert reader is not None
        said, found = read_answer(reader, text_at_random(tokenizer, mask, use.shown_ids, seed, []))
        assert found or json.loads(said)["name"] in ("Oslo", "Rome")


def test_references_of_tools_and_of_the_format_hold_where_both_are_one_schema(tmp_path: Path) -> None:
    [llama] = [each for each in FORMATS if each.name == "Llama 3"]
    tokenizer = model_of(tmp_path, llama, control=True)
    mask = mask_of(tokenizer, tool_use(tokenizer, [NOW, GO]), json_grammar(TREE, "response_format"))
    call = '{"name": "go", "parameters": {"name": "Oslo", "next": {"name": "Rome"}}}'
    for token_id in tokenizer.encode(call, add_special_tokens=False):
        assert mask.bitmask()[token_id // 8] >> token_id % 8 & 1
        mask.accept(token_id)
    assert mask.is_complete


THOUGHTS = {
    "nothing": "",
    "a call": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=",
    "a recipient": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=",
    "a final message": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>",
}


@pytest.mark.parametrize("begun", THOUGHTS.values(), ids=THOUGHTS)
def test_a_call_that_gpt_oss_must_make_may_follow_its_thinking(tmp_path: Path, begun: str) -> None:
    [written] = [each for each in FORMATS if isinstance(each.shape, HarmonyCalls)]
    tokenizer = model_of(tmp_path, written, control=True)
    use = tool_use(tokenizer, [WEATHER, NOW], ToolChoice("required"))
    params = with_thinking(BY_NAME["harmony"], asyncio.run(use.apply_to(SamplingParams())), tokenizer, "user: hi")
    assert params.thinking is not None
    request = BackendRequest(id="r", prompt_ids=[1], params=params, end_token_ids=(EOS_ID,))
    for seed in range(3):
        mask = GrammarMasks(tokenizer, tokenizer.vocab_size).begin(request).result()
        lead = tokenizer.encode(begun, add_special_tokens=False)
        text = text_at_random(tokenizer, mask, params.shown_token_ids, seed, lead)
        splitter, reader = ThinkingSplitter(params.thinking), use.reader()
        assert reader is not None
        thought, answer = splitter.push(text)
        said, [call] = read_answer(reader, answer + splitter.flush()[1])
        assert (thought, said) == ("Hm." if begun else "", "")
        assert call.name == "now" or json.loads(call.arguments)["city"] in CITIES


@pytest.mark.parametrize("begun", THOUGHTS.values(), ids=THOUGHTS)
def test_what_follows_the_thinking_of_gpt_oss_is_a_call_or_a_final_message_in_the_format(
    tmp_path: Path, begun: str
) -> None:
    [written] = [each for each in FORMATS if isinstance(each.shape, HarmonyCalls)]
    tokenizer = model_of(tmp_path, written, control=True)
    use = tool_use(tokenizer, [WEATHER, NOW])
    params = asyncio.run(use.apply_to(SamplingParams(grammar=json_grammar(TREE, "response_format"))))
    params = with_thinking(BY_NAME["harmony"], params, tokenizer, "user: hi")
    assert params.thinking is not None
    request = BackendRequest(id="r", prompt_ids=[1], params=params, end_token_ids=(EOS_ID,))
    for seed in range(3):
        mask = GrammarMasks(tokenizer, tokenizer.vocab_size).begin(request).result()
        lead = tokenizer.encode(begun or "<|channel|>final<|message|>", add_special_tokens=False)
        text = text_at_random(tokenizer, mask, params.shown_token_ids, seed, lead)
        splitter, reader = ThinkingSplitter(params.thinking), use.reader()
        assert reader is not None
        thought, answer = splitter.push(text)
        said, calls = read_answer(reader, answer + splitter.flush()[1])
        assert thought == ("Hm." if begun else "")
        assert calls or " to=" not in begun
        assert calls or json.loads(said)["name"] in ("Oslo", "Rome")


def test_a_schema_that_nothing_can_be_held_to_is_refused_by_its_tool(tmp_path: Path) -> None:
    tokenizer = model_of(tmp_path, FORMATS[-1], control=False)
    schema = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.function\.parameters"):
        tool_use(tokenizer, [NOW, Tool(name="a", parameters=schema)], ToolChoice("required"))


def test_definitions_are_not_multiplied_by_the_parameters_of_a_tool() -> None:
    shared = {"$defs": {"long": {"description": "x" * 30_000}}}
    plain = {"type": "object", "properties": {f"p{i}": {} for i in range(500)}, **shared}
    referring = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/long"} for i in range(500)}, **shared}
    [xml] = [each for each in FORMATS if each.name == "Qwen3-Coder"]
    grammar = call_grammar(xml, [Tool(name="a", parameters=plain)], ToolChoice("required"), True, {})
    assert grammar is not None and len(grammar.source) < MAX_GRAMMAR_BYTES
    with pytest.raises(InvalidRequest, match="exceed"):
        call_grammar(xml, [Tool(name="a", parameters=referring)], ToolChoice("required"), True, {})
    with pytest.raises(InvalidRequest, match="exceed"):  # a tool beside a strict one has its grammar, too
        tools = [Tool(name="a", parameters=referring), Tool(name="b", strict=True)]
        call_grammar(xml, tools, ToolChoice("auto"), True, {})


def test_definitions_count_once_where_a_call_is_one_object() -> None:
    parameters = {
        "type": "object",
        "properties": {f"p{i}": {"$ref": "#/$defs/long"} for i in range(100)},
        "$defs": {"long": {"type": "string", "description": "x" * 30_000}},
    }
    [hermes] = [each for each in FORMATS if each.name == "Hermes"]
    assert call_grammar(hermes, [Tool(name="a", parameters=parameters)], ToolChoice("required"), True, {}) is not None


def test_a_strict_tool_may_have_parameters_and_values_called_like_keywords() -> None:
    properties = {"pattern": {"type": "string"}, "format": {"enum": ["pattern", "format"]}}
    tool = Tool(name="grep", parameters={"type": "object", "properties": properties}, strict=True)
    [xml] = [each for each in FORMATS if each.name == "Qwen3-Coder"]
    assert call_grammar(xml, [tool], ToolChoice("required"), True, {}) is not None
    with pytest.raises(InvalidRequest, match="pattern cannot be enforced"):
        bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
        call_grammar(xml, [Tool(name="b", parameters=bad, strict=True)], ToolChoice("required"), True, {})
