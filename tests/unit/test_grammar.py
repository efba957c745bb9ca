"""Masks of grammars: what they allow in the tokens of real kinds of tokenizers, and what nothing can be held to."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.backends.base import BackendRequest
from engine.backends.sampling.sampler import SampleRow, apply_masks, sample
from engine.config import Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.text.grammar import MAX_COMPILED, GrammarMask, GrammarMasks, check, stack_bytes
from engine.text.tokenizer import Tokenizer
from tests.fakes import tiny_tokenizers

EOS = 2
PATIENCE_S = 60.0
KINDS = {"byte_level": tiny_tokenizers.byte_level, "byte_fallback": tiny_tokenizers.byte_fallback}


def load(folder: Path, make: Callable[[], tokenizers.Tokenizer] = tiny_tokenizers.byte_level) -> Tokenizer:
    tiny_tokenizers.save(make(), folder, generation_config={"eos_token_id": EOS})
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp(request.param), KINDS[request.param])


@pytest.fixture(scope="module")
def masks(tokenizer: Tokenizer) -> GrammarMasks:
    return GrammarMasks(tokenizer, tokenizer.vocab_size + 13)


def schema_of(schema: object) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(schema))


def mask_of(masks: GrammarMasks, grammar: Grammar, generated: tuple[int, ...] = (), **params: Any) -> GrammarMask:
    request = BackendRequest(
        id="a",
        prompt_ids=[5],
        generated=list(generated),
        params=SamplingParams(grammar=grammar, **params),
        end_token_ids=(EOS,),
    )
    return masks.begin(request).result(PATIENCE_S)


def ids_in(bits: bytes) -> list[int]:
    return [at for at in range(8 * len(bits)) if bits[at // 8] >> at % 8 & 1]


def written(mask: GrammarMask, seed: int, most: int = 4000) -> list[int]:
    """Tokens chosen blindly among those allowed, to the end."""
    chooser, ids = random.Random(seed), list[int]()
    while not mask.is_complete and len(ids) < most:
        ids.append(chooser.choice(ids_in(mask.bitmask())))
        mask.accept(ids[-1])
        assert not mask.error
    assert mask.is_complete
    return ids


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "世界", '"\n']}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def test_blind_choices_write_json_that_the_schema_describes(tokenizer: Tokenizer, masks: GrammarMasks) -> None:
    for seed in range(20):
        text = tokenizer.decode(written(mask_of(masks, schema_of(PERSON)), seed))
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(kind="regex", source=r"[ab]{2,5}-[0-9]{3}"), r"[ab]{2,5}-[0-9]{3}"),
        (Grammar(kind="regex", source=r"^x(é|世)+y$"), r"x(é|世)+y"),
        (Grammar(kind="regex", source=""), ""),
        (Grammar(kind="choice", source=json.dumps(["yes", "yes!", "no\n", '"世"'])), 'yes!?|no\n|"世"'),
        (Grammar(kind="lark", source='start: "a" b+\nb: /[0-9]/ ";"'), "a([0-9];)+"),
        (Grammar(kind="lark", source='root ::= "a" b+\nb ::= [0-9] ";"'), "a([0-9];)+"),
    ],
)
def test_blind_choices_write_what_a_regex_a_choice_and_a_grammar_describe(
    tokenizer: Tokenizer, masks: GrammarMasks, grammar: Grammar, pattern: str
) -> None:
    for seed in range(20):
        assert re.fullmatch(pattern, tokenizer.decode(written(mask_of(masks, grammar), seed)))


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "number"},
        {"type": "string", "maxLength": 6},
        {"enum": ["x", 1, None, {"a": [True]}]},
        {"const": "é\t"},
        {"type": "string", "pattern": "^[a-z]{1,4}$"},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner),
        st.lists(inner, min_size=2, max_size=2).map(lambda two: {"anyOf": two}),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:1],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 2**16))
def test_any_schema_yields_json_that_it_describes(
    tokenizer: Tokenizer, masks: GrammarMasks, schema: dict[str, Any], seed: int
) -> None:
    mask = mask_of(masks, schema_of(schema))
    chooser, ids = random.Random(seed), list[int]()
    while len(ids) < 400 and not mask.is_complete:
        allowed = ids_in(mask.bitmask())
        ids.append(EOS if EOS in allowed else chooser.choice(allowed))  # numbers may go on for ever
        mask.accept(ids[-1])
    assert mask.is_complete, tokenizer.decode(ids)
    jsonschema.validate(json.loads(tokenizer.decode(ids)), schema)


def test_the_end_may_come_exactly_where_the_grammar_may_end(tokenizer: Tokenizer, masks: GrammarMasks) -> None:
    mask = mask_of(masks, Grammar(kind="regex", source="a(bb)*"))
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    assert a is not None
    assert b is not None
    ends = []
    for token_id in (a, b, b, b):
        ends.append(EOS in ids_in(mask.bitmask()))
        mask.accept(token_id)
    assert ends == [False, True, False, True]
    assert not mask.is_complete


def test_ends_wait_for_min_tokens_but_for_no_more_than_the_grammar_can_go_on(
    tokenizer: Tokenizer, masks: GrammarMasks
) -> None:
    assert len(written(mask_of(masks, Grammar(kind="regex", source="a*"), min_tokens=30), 1)) > 30
    assert tokenizer.decode(written(mask_of(masks, Grammar(kind="regex", source="aaa"), min_tokens=30), 1)) == "aaa"


def test_where_ends_are_ignored_they_come_only_where_nothing_else_can(masks: GrammarMasks) -> None:
    mask = mask_of(masks, Grammar(kind="regex", source="(a|b)*"), ignore_eos=True)
    assert EOS not in ids_in(mask.bitmask())
    assert ids_in(mask_of(masks, Grammar(kind="regex", source=""), ignore_eos=True).bitmask()) == [EOS]


def test_a_mask_goes_back_and_on_to_where_the_answer_stands(masks: GrammarMasks) -> None:
    straight = mask_of(masks, schema_of(PERSON))
    ids = written(straight, 3)
    for cut in range(0, len(ids), 5):
        moved = mask_of(masks, schema_of(PERSON), tuple(written(mask_of(masks, schema_of(PERSON)), 4)[:7]))
        moved.restart(ids[:cut])
        assert moved.bitmask() == mask_of(masks, schema_of(PERSON), tuple(ids[:cut])).bitmask()


def test_an_answer_that_its_grammar_did_not_write_is_refused(masks: GrammarMasks) -> None:
    with pytest.raises(InvalidRequest, match="violates its grammar"):
        mask_of(masks, Grammar(kind="regex", source="aaa"), (EOS, EOS))


def test_after_a_token_that_was_not_allowed_nothing_is(masks: GrammarMasks) -> None:
    mask = mask_of(masks, schema_of({"type": "integer"}))
    mask.accept(EOS)
    assert mask.error
    assert not mask.is_complete
    assert not any(mask.bitmask())


def test_no_token_comes_that_the_model_or_the_tokenizer_lacks(tokenizer: Tokenizer, masks: GrammarMasks) -> None:
    anything = Grammar(kind="regex", source=r"(?s:.)*")
    assert max(ids_in(mask_of(masks, anything).bitmask())) < tokenizer.vocab_size
    assert len(mask_of(masks, anything).bitmask()) == -(-(tokenizer.vocab_size + 13) // 32) * 4
    fewer = GrammarMasks(tokenizer, 200)
    assert max(ids_in(mask_of(fewer, anything).bitmask())) < 200


def test_control_tokens_are_no_text(tokenizer: Tokenizer, masks: GrammarMasks) -> None:
    allowed = ids_in(mask_of(masks, Grammar(kind="regex", source=r"(?s:.)+")).bitmask())
    assert not tokenizer.special_ids & set(allowed)


def test_a_tokenizer_that_cannot_write_it_is_said(tmp_path: Path) -> None:
    lettered = GrammarMasks(load(tmp_path, tiny_tokenizers.metaspace), 200)
    with pytest.raises(InvalidRequest, match="no token to continue with"):
        mask_of(lettered, Grammar(kind="regex", source="世", param="guided_regex"))


def test_grammars_are_compiled_once_and_kept_within_bounds(masks: GrammarMasks) -> None:
    for length in range(MAX_COMPILED + 5):
        mask_of(masks, Grammar(kind="regex", source=f"a{{{length}}}"))
    assert len(masks._compiled) <= MAX_COMPILED
    request = BackendRequest(
        id="a", prompt_ids=[5], params=SamplingParams(grammar=Grammar(kind="regex", source="a{3}"))
    )
    masks.begin(request).result(PATIENCE_S)
    assert masks.begin(request).done()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (schema_of({"type": "objekt"}), "objekt"),
        (schema_of({"not": {}}), "not"),
        (Grammar(kind="regex", source="(a"), "unclosed group"),
        (Grammar(kind="regex", source="a\ud800"), "surrogates"),
        (Grammar(kind="lark", source="start: b"), "unknown name"),
        (Grammar(kind="lark", source="start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
        (Grammar(kind="regex", source="(" * 5000 + "a" + ")" * 5000), "parentheses"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_nothing_can_be_held_to_is_said_in_one_line(grammar: Grammar, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        check(grammar)
    assert refused.value.details["param"] == "grammar"
    assert "\n" not in refused.value.message


def test_grammars_that_nest_deep_are_read_or_refused_and_never_end_the_process() -> None:
    links = "".join(f"R{i}: R{i + 1}\n" for i in range(8000))
    check(Grammar(kind="lark", source=f'start: R0\n{links}R8000: "a"\n'))
    chain = {f"a{i}": {"items": {"$ref": f"#/a{i + 1}"}} for i in range(2500)}
    check(schema_of({"$ref": "#/a0", **chain, "a2500": {}}))


def linked(count: int, definition: Callable[[int], object], last: object) -> Grammar:
    """A schema of definitions that refer each to the next."""
    return schema_of(
        {"$ref": "#/$defs/d0", "$defs": {f"d{i}": definition(i) for i in range(count)} | {f"d{count}": last}}
    )


def within_lists(depth: int, schema: object) -> object:
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def rules(count: int, rule: Callable[[int], str], defined: str = ":", name: str = "r") -> Grammar:
    """Rules that name each the next one."""
    lines = [f"{name}{i} {defined} {rule(i + 1)}" for i in range(count)]
    start = "start" if defined == ":" else "root"
    return Grammar(
        kind="lark", source="\n".join([f"{start} {defined} {name}0", *lines, f'{name}{count} {defined} "a"\n'])
    )


LISTS = linked(500, lambda i: {"items": {"$ref": f"#/$defs/d{i + 1}"}}, {})


@pytest.mark.parametrize(
    "grammar",
    [
        linked(500, lambda i: {"properties": {"a": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {}]}}}, {}),
        linked(100, lambda i: within_lists(40, {"$ref": f"#/$defs/d{i + 1}"}), {}),
        linked(500, lambda i: {"$anchor": f"d{i}", "items": {"$ref": f"#d{i + 1}"}}, {"$anchor": "d500"}),
        Grammar(kind="json_schema", source=LISTS.source.replace("$ref", r"\u0024ref")),
        Grammar(kind="lark", source=f"start: %json {LISTS.source}"),
        rules(500, lambda i: "(" * 12 + f"r{i}" + ")" * 12),
        rules(500, lambda i: f'"x"\n | r{i} ":"'),
        rules(500, lambda i: f'"x" r-{i}', "::=", "r-"),
    ],
    ids=["objects", "lists", "anchors", "escaped", "within", "brackets", "continued", "gbnf"],
)
def test_the_stack_of_a_compilation_is_more_than_its_chain_of_references_needs(
    monkeypatch: pytest.MonkeyPatch, grammar: Grammar
) -> None:
    """What stack is given beyond the least is enough without it."""
    monkeypatch.setattr("engine.text.grammar._MIN_STACK_BYTES", 2**18)
    check(grammar)


WORDS = [f"the word of number {i}" for i in range(30_000)]
RULES = "".join(f'\nr{i}: "it is {i} of them"' for i in range(30_000))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="lark", source="start: " + " | ".join(map(json.dumps, WORDS))),
        Grammar(kind="lark", source="start: " + " | ".join(f"r{i}" for i in range(30_000)) + RULES),
        schema_of({"enum": WORDS}),
        Grammar(kind="choice", source=json.dumps(WORDS)),
        Grammar(kind="regex", source="|".join(WORDS)),
    ],
    ids=["words", "rules", "enum", "choice", "regex"],
)
def test_a_long_grammar_without_chains_of_references_takes_the_least_stack(grammar: Grammar) -> None:
    assert len(grammar.source) > 600_000
    assert stack_bytes(grammar) < 2**25


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read as Linux does")
def test_a_grammar_of_a_mebibyte_is_read_where_address_space_is_limited_and_one_too_deep_is_refused() -> None:
    script = """
import resource
from engine.config import Grammar
from engine.errors import InvalidRequest
from engine.text.grammar import check, stack_bytes
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
check(Grammar(kind="lark", source="start: " + " | ".join(f'"the word of number {i}"' for i in range(40_000))))
for links in (25_000, 60_000):
    try:
        chain = "".join(f"r{i}: r{i + 1}\\n" for i in range(links))
        check(Grammar(kind="lark", source=f'start: r0\\n{chain}r{links}: "a"'))
    except InvalidRequest as error:
        print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert "MiB of stack to compile it are not available" in first
    assert "refer to one another too deeply" in second


class Only:
    """A mask that allows these tokens."""

    is_complete, error = False, ""

    def __init__(self, *ids: int, vocab: int) -> None:
        self._bits = sum(1 << each for each in set(ids)).to_bytes(-(-vocab // 32) * 4, "little")

    def bitmask(self) -> bytes:
        return self._bits

    def accept(self, token_id: int) -> None: ...

    def restart(self, generated: object) -> None: ...


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_masks_of_a_batch_leave_their_own_rows_what_they_allow_and_the_others_everything(vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    held, last = logits.clone(), vocab - 1
    apply_masks(held, {1: Only(0, last, vocab=vocab), 3: Only(vocab=vocab)})
    assert torch.equal(held[0], logits[0])
    assert torch.equal(held[2], logits[2])
    assert held[1].isfinite().nonzero().flatten().tolist() == sorted({0, last})
    assert torch.equal(held[1][[0, last]], logits[1][[0, last]])
    assert not held[3].isfinite().any()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, temperature=5.0, top_k=7, top_p=0.9, min_p=0.1),
        SamplingParams(seed=1, xtc_probability=1.0, xtc_threshold=0.01),
        SamplingParams(seed=1, typical_p=0.5, tfs=0.5, top_a=0.3),
        SamplingParams(seed=1, smoothing_factor=2.0, min_temp=0.1, max_temp=4.0),
        SamplingParams(seed=1, logit_bias={4: 100.0}, presence_penalty=2.0, repetition_penalty=3.0),
        SamplingParams(seed=1, min_tokens=5),
    ],
)
def test_no_sampler_chooses_what_a_mask_does_not_allow(params: SamplingParams) -> None:
    logits = torch.randn(64, 600, generator=torch.Generator().manual_seed(2)) * 8
    rows = [
        SampleRow(params, prompt_ids=[1] * (at + 1), end_token_ids=[5], mask=Only(5, 77, 431, vocab=600))
        for at in range(64)
    ]
    chosen = {token.token_id for token in sample(logits, rows) if token is not None}
    assert chosen <= {5, 77, 431}
    assert chosen
