"""Answers held to grammars by the backends over the ExLlama libraries: a fake generator, and the libraries' own over
stubbed kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from engine.backends.base import BackendRequest, TokenEvent
from engine.backends.exllama.generator_backend import LEASE_TOKENS, GeneratorBackend
from engine.config import Grammar, ModelSpec, SamplingParams
from engine.text.grammar import GrammarMasks
from engine.text.tokenizer import Tokenizer
from tests.fakes.exllama import FakeExllama, RealExllama
from tests.fakes.exllama3 import RealExllama3
from tests.fakes.model import EOS_ID, VOCAB_SIZE, write_fake_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HELD = Grammar(kind="json_schema", source=json.dumps(SCHEMA))
WORDS = Grammar(kind="regex", source="[a-c]{3,5}!")
Make = Callable[..., FakeExllama | RealExllama3]


@pytest.fixture(params=[FakeExllama, RealExllama, RealExllama3], ids=["fake", "real", "exllamav3"])
def make_any(request: pytest.FixtureRequest) -> Make:
    """Makes either library, with the options that all of the fakes have."""
    maker: Make = request.param
    return maker


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> GrammarMasks:
    folder = write_fake_model(tmp_path_factory.mktemp("fake"))
    return GrammarMasks(Tokenizer.from_folder(folder), VOCAB_SIZE)


def load(fakes: FakeExllama | RealExllama3) -> GeneratorBackend:
    backend = fakes.backend()
    backend.load(
        ModelSpec(path=Path("model"), name="fake"),
        max_prompts=8,
        step_tokens=64,
        page_tokens=8,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def ask(name: str, grammar: Grammar | None, **params: Any) -> BackendRequest:
    fields = SamplingParams(**{"seed": 3, "max_tokens": 200 if grammar else 30, "grammar": grammar, **params})
    return BackendRequest(id=name, prompt_ids=list(f"tell {name}".encode()), params=fields, end_token_ids=(EOS_ID,))


def answers(backend: GeneratorBackend, masks: GrammarMasks, *requests: BackendRequest) -> dict[str, list[TokenEvent]]:
    """What each was answered, to its end."""
    events: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
    for request in requests:
        backend.submit(request, masks.begin(request).result(60.0) if request.params.grammar else None)
    while backend.has_work():
        for event in backend.step():
            events[event.request_id].append(event)
            if event.token_id == EOS_ID and event.finish is None:
                backend.cancel(event.request_id)
    backend.check()
    assert not backend._masks
    return events


def text_of(events: list[TokenEvent]) -> str:
    return bytes(event.token_id for event in events if event.token_id is not None and event.token_id < 256).decode()


@pytest.mark.parametrize("draft_tokens", [0, 4])
@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02},
        {"min_tokens": 150, "logit_bias": {EOS_ID: 100.0}},
    ],
)
def test_json_is_what_its_schema_describes(
    make_any: Make, masks: GrammarMasks, draft_tokens: int, knobs: dict[str, Any]
) -> None:
    asked = [ask(str(salt), grammar, **knobs) for salt, grammar in enumerate([HELD, None, HELD, WORDS])]
    told = answers(load(make_any(draft_tokens=draft_tokens)), masks, *asked)
    for name in "02":
        assert told[name][-1].finish == "stop"
        jsonschema.validate(json.loads(text_of(told[name])), SCHEMA)
    assert re.fullmatch(WORDS.source, text_of(told["3"]))
    assert (len(told["1"]), told["1"][-1].finish) == (30, "length")


def test_what_is_too_long_ends_with_length_and_what_may_end_does_with_an_end_token(
    make_any: Make, masks: GrammarMasks
) -> None:
    cut = answers(load(make_any()), masks, ask("a", HELD, max_tokens=5))["a"]
    assert (len(cut), cut[-1].finish) == (5, "length")
    ended = answers(load(make_any()), masks, ask("a", Grammar(kind="regex", source="a*"), logit_bias={EOS_ID: 100.0}))[
        "a"
    ]
    assert [event.token_id for event in ended] == [EOS_ID]


def test_a_mask_goes_on_over_the_leases_of_a_long_answer(make_any: Make, masks: GrammarMasks) -> None:
    length = LEASE_TOKENS + 40
    long = Grammar(kind="regex", source=f"(ab){{{length // 2}}}")
    told = answers(load(make_any()), masks, ask("a", long, max_tokens=length + 9))["a"]
    assert text_of(told) == "ab" * (length // 2)


def test_a_generator_that_is_made_anew_finds_the_mask_where_the_answer_was_told_to(
    make_any: Make, masks: GrammarMasks
) -> None:
    fakes = make_any()
    backend = load(fakes)
    requests = [ask(name, HELD, temperature=0.0) for name in "abcd"]
    for request in requests:
        backend.submit(request, masks.begin(request).result(60.0))
    events = [event for _ in range(12) for event in backend.step()]
    fakes.faults.add("decoded", torch.OutOfMemoryError("CUDA out of memory"))
    while backend.has_work():
        events += backend.step()
    whole = answers(load(make_any()), masks, *requests)
    for request in requests:
        mine = [event for event in events if event.request_id == request.id]
        assert mine[-1].finish == "stop"
        assert text_of(mine) == text_of(whole[request.id])


def test_tokens_ruled_out_that_leave_the_grammar_nothing_are_an_error(make_any: Make, masks: GrammarMasks) -> None:
    request = ask("a", Grammar(kind="regex", source="abc"))
    backend = load(make_any())
    backend.submit(
        BackendRequest(id="a", prompt_ids=[3, 4, 5], params=request.params, banned_next=(ord("a"),)),
        masks.begin(request).result(60.0),
    )
    events = [event for _ in range(9) for event in backend.step()]
    assert [event.finish for event in events] == ["error"]
