"""Answers that must call: whatever a grammar lets a model write is a call of its format, with arguments that fit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from console.api.tools import Tool, ToolChoice, ToolUse, read_answer, tool_use
from console.api.tools.formats import FORMATS, ToolFormat
from engine.backends.base import BackendRequest
from engine.config import SamplingParams
from engine.errors import InvalidRequest
from engine.text.grammar import GrammarMask, GrammarMasks
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
    signs = signs.replace("(start_header_id|header_start)", "start_header_id")
    template = "{# " + signs + " #}{{ tools }}{{ messages[0].content }}"
    return Tokenizer.from_folder(write_tool_model(folder, template, written.shape.markers if control else ()))


def mask_of(tokenizer: Tokenizer, use: ToolUse) -> GrammarMask:
    """What the answer may be."""
    params = use.apply_to(SamplingParams())
    request = BackendRequest(id="r", prompt_ids=[1], params=params, end_token_ids=(EOS_ID,))
    return GrammarMasks(tokenizer, tokenizer.vocab_size).begin(request).result()


def written_at_random(tokenizer: Tokenizer, use: ToolUse, seed: int, lead: list[int]) -> str:
    """An answer after `lead` that its mask allows, ended as soon as it may."""
    chance, mask, detokenizer = (
        random.Random(seed),
        mask_of(tokenizer, use),
        IncrementalDetokenizer(tokenizer, shown=use.shown_ids),
    )
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
    if written.bare:
        with pytest.raises(InvalidRequest, match="strict needs tool_choice required"):
            tool_use(tokenizer, [WEATHER])
        return
    use = tool_use(tokenizer, [WEATHER])
    free = mask_of(tokenizer, use)
    for token_id in tokenizer.encode("Just some text, { and < too.", add_special_tokens=False):
        assert free.bitmask()[token_id // 8] >> token_id % 8 & 1
        free.accept(token_id)
    assert free.bitmask()[EOS_ID // 8] >> EOS_ID % 8 & 1
    lead = tokenizer.encode("Hi. " + written.shape.openings[0], add_special_tokens=False)
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


def test_plain_text_of_a_parameter_that_has_to_fit_a_pattern_is_refused_in_strict_tools(tmp_path: Path) -> None:
    [coder] = [each for each in FORMATS if each.name == "Qwen3-Coder"]
    schema = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "[0-9]+"}}}
    with pytest.raises(InvalidRequest, match="pattern cannot be enforced"):
        tool_use(model_of(tmp_path, coder, control=False), [Tool(name="find", parameters=schema, strict=True)])


def test_a_schema_that_nothing_can_be_held_to_is_refused_by_its_tool(tmp_path: Path) -> None:
    tokenizer = model_of(tmp_path, FORMATS[-1], control=False)
    schema = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.function\.parameters"):
        tool_use(tokenizer, [NOW, Tool(name="a", parameters=schema)], ToolChoice("required"))
