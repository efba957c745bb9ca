"""TGI's endpoints: bodies, answers, events and errors as its own clients know them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from console.api.server import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, Gate, expected_text, letters, saying
from tests.fakes.model import EOS_ID


def completion(prompt: str, count: int) -> str:
    """What the fake model answers."""
    return expected_text(list(prompt.encode()), count, letters)


async def events(api: Served, path: str = "/generate_stream", /, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, framed as TGI frames them."""
    async with api.http.post(path, json=body) as response:
        assert response.content_type == "text/event-stream", await response.text()
        frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data:{") for frame in frames)
    return [json.loads(frame.removeprefix("data:")) for frame in frames]


async def refusal(api: Served, path: str = "/generate", /, status: int = 400, **body: Any) -> dict[str, str]:
    """The error of a request that must be refused."""
    async with api.http.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == status, answer
        assert set(answer) == {"error", "error_type"}
        return answer


async def test_a_text_is_continued(api: Served) -> None:
    answer = await api.post("/generate", inputs="Once", parameters={"max_new_tokens": 5})
    assert answer == {"generated_text": completion("Once", 5)}


async def test_the_whole_text_is_given_where_it_is_asked_for(api: Served) -> None:
    answer = await api.post("/generate", inputs="Once", parameters={"max_new_tokens": 5, "return_full_text": True})
    assert answer == {"generated_text": "Once" + completion("Once", 5)}


async def test_the_root_answers_with_a_list_and_the_whole_text(api: Served) -> None:
    answer: Any = await api.post("/", inputs="Once", parameters={"max_new_tokens": 5})
    assert answer == [{"generated_text": "Once" + completion("Once", 5)}]
    answer = await api.post("/", inputs="Once", parameters={"max_new_tokens": 5, "return_full_text": False})
    assert answer == [{"generated_text": completion("Once", 5)}]


async def test_the_root_streams_where_the_body_says_so(api: Served) -> None:
    told = await events(api, "/", inputs="Once", stream=True, parameters={"max_new_tokens": 3})
    assert told[-1]["generated_text"] == "Once" + completion("Once", 3)
    assert "".join(event["token"]["text"] for event in told) == completion("Once", 3)


async def test_details_tell_every_token(api: Served) -> None:
    parameters = {"max_new_tokens": 2, "details": True, "seed": 7}
    answer = await api.post("/generate", inputs="Once", parameters=parameters)
    text = completion("Once", 2)
    assert answer["details"] == {
        "finish_reason": "length",
        "generated_tokens": 2,
        "seed": 7,
        "prefill": [],
        "tokens": [{"id": ord(letter), "text": letter, "logprob": -0.5, "special": False} for letter in text],
    }


async def test_a_stream_has_one_event_for_each_token_and_ends_with_the_text(api: Served) -> None:
    told = await events(api, inputs="Once", parameters={"max_new_tokens": 3, "details": True})
    text = completion("Once", 3)
    assert [event["index"] for event in told] == [1, 2, 3]
    assert [event["token"]["text"] for event in told] == list(text)
    assert [event["generated_text"] for event in told] == [None, None, text]
    assert [event["details"] for event in told[:-1]] == [None, None]
    assert told[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 3,
        "seed": None,
        "input_length": len("Once"),
    }


async def test_an_end_token_is_told_and_is_special(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("hi", then=EOS_ID))) as api:
        told = await events(api, inputs=">", parameters={"details": True})
        answer = await api.post("/generate", inputs=">", parameters={"details": True})
    assert [event["token"]["special"] for event in told] == [False, False, True]
    assert (told[-1]["generated_text"], told[-1]["details"]["finish_reason"]) == ("hi", "eos_token")
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == ("hi", "eos_token")
    assert answer["details"]["generated_tokens"] == 3


async def test_an_answer_ends_with_its_stop_sequence_as_tgi_s_do(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one two three"))) as api:
        answer = await api.post("/generate", inputs=">", parameters={"stop": ["two"], "details": True})
    assert answer["generated_text"] == "one two"
    assert answer["details"]["finish_reason"] == "stop_sequence"


async def test_a_character_of_several_tokens_is_told_with_its_last(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("ñu"))) as api:
        told = await events(api, inputs=">", parameters={"max_new_tokens": 3})
    assert [event["token"]["text"] for event in told] == ["", "ñ", "u"]
    assert told[-1]["generated_text"] == "ñu"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        (None, 1.0),
        ({}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"top_p": 0.9}, 1.0),
        ({"temperature": 1.0}, 0.0),
    ],
)
async def test_sampling_is_on_when_it_is_in_tgi(
    api: Served, parameters: dict[str, object] | None, temperature: float
) -> None:
    body = {} if parameters is None else {"parameters": parameters}
    await api.post("/generate", inputs="x", **body)
    assert api.backend.submitted[0].params.temperature == temperature


async def test_every_parameter_reaches_the_engine(api: Served) -> None:
    parameters = {
        "max_new_tokens": 2,
        "temperature": 0.5,
        "top_k": 10,
        "top_p": 0.9,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "seed": 2**64 - 1,
        "stop": ["a", "b"],
        "top_n_tokens": 3,
        "details": True,
    }
    await api.post("/generate", inputs="x", parameters=parameters)
    params = api.backend.submitted[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (2, 0.5, 10, 0.9)
    assert (params.typical_p, params.repetition_penalty, params.frequency_penalty) == (0.8, 1.1, 0.2)
    assert (params.seed, params.stop, params.logprobs) == (2**63 - 1, ("a", "b"), 3)


async def test_a_prompt_is_cut_to_its_last_tokens(api: Served) -> None:
    await api.post("/generate", inputs="abcdef", parameters={"truncate": 2, "max_new_tokens": 1})
    assert bytes(api.backend.submitted[0].prompt_ids) == b"ef"


async def test_the_best_of_several_answers_is_given_and_the_others_in_its_details(api: Served) -> None:
    parameters = {"best_of": 3, "do_sample": True, "max_new_tokens": 2, "details": True}
    answer = await api.post("/generate", inputs="x", parameters=parameters)
    assert answer["generated_text"] == completion("x", 2)
    assert len(answer["details"]["best_of_sequences"]) == 2
    assert len(api.backend.submitted) == 3


@pytest.mark.parametrize(
    ("grammar", "kind", "source"),
    [
        ({"type": "regex", "value": "[ab]+"}, "regex", "[ab]+"),
        ({"type": "json", "value": {"type": "integer"}}, "json_schema", '{"type":"integer"}'),
        ({"type": "json", "value": '{"type":"integer"}'}, "json_schema", '{"type":"integer"}'),
        ({"type": "json_schema", "value": {"schema": {"type": "integer"}}}, "json_schema", '{"type":"integer"}'),
    ],
)
async def test_a_grammar_reaches_the_engine(api: Served, grammar: dict[str, object], kind: str, source: str) -> None:
    await api.post("/generate", inputs="x", parameters={"grammar": grammar, "max_new_tokens": 1})
    asked = api.backend.submitted[0].params.grammar
    assert asked is not None
    assert (asked.kind, asked.source) == (kind, source)


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "regex", "value": "("},
        {"type": "regex", "value": 5},
        {"type": "json", "value": 5},
        {"type": "json", "value": {"type": "smoke"}},
        {"type": "json_schema", "value": {}},
        {"type": "smoke", "value": ""},
        {"type": "json"},
    ],
)
async def test_a_bad_grammar_is_refused_before_any_token(api: Served, grammar: dict[str, object]) -> None:
    error = await refusal(api, inputs="x", parameters={"grammar": grammar})
    assert "grammar" in error["error"]
    assert not api.backend.submitted


async def test_a_grammar_longer_than_allowed_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_schema_bytes=100)) as api:
        error = await refusal(api, inputs="x", parameters={"grammar": {"type": "regex", "value": "a" * 101}})
    assert "100" in error["error"]


async def test_the_prompt_s_tokens_are_told_where_they_are_asked_for(api: Served) -> None:
    parameters = {"decoder_input_details": True, "details": True, "max_new_tokens": 1}
    answer = await api.post("/generate", inputs="ab", parameters=parameters)
    first, second = answer["details"]["prefill"]
    assert first == {"id": 97, "text": "a", "logprob": None}
    assert (second["id"], second["text"]) == (98, "b")
    assert second["logprob"] < 0


async def test_info_says_what_may_be_asked(api: Served) -> None:
    info = await api.get("/info")
    assert (info["model_id"], info["model_pipeline_tag"]) == ("fake", "text-generation")
    assert (info["max_total_tokens"], info["max_input_tokens"]) == (4096, 4095)


async def test_tokens_of_a_text_are_told_with_their_places(api: Served) -> None:
    tokens: Any = await api.post("/tokenize", inputs="aé")
    assert tokens == [
        {"id": 97, "text": "a", "start": 0, "stop": 1},
        {"id": 195, "text": "é", "start": 1, "stop": 2},
        {"id": 169, "text": "é", "start": 1, "stop": 2},
    ]


async def test_how_much_it_took_is_in_the_headers(api: Served) -> None:
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 5}}
    async with api.http.post("/generate", json=body) as response:
        headers = response.headers
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"], headers["x-compute-characters"]) == (
        "4",
        "5",
        "4",
    )


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"watermark": True}, "watermark"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "seed"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_n_tokens": 500}, "top_n_tokens"),
        ({"truncate": 0}, "truncate"),
        ({"adapter_id": "nobody's"}, "nobody's"),
        ({"top_a": 0.5}, "top_a"),
        ({"stop": [""]}, "stop"),
        ("x", "parameters"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(api: Served, parameters: object, named: str) -> None:
    status = 404 if named == "nobody's" else 400
    error = await refusal(api, status=status, inputs="x", parameters=parameters)
    assert named in error["error"]
    assert error["error_type"] == ("not_found" if status == 404 else "validation")


@pytest.mark.parametrize("parameters", [{"best_of": 2, "do_sample": True}, {"decoder_input_details": True}])
async def test_what_a_stream_cannot_tell_is_refused(api: Served, parameters: dict[str, object]) -> None:
    error = await refusal(api, "/generate_stream", inputs="x", parameters=parameters)
    assert next(iter(parameters)) in error["error"]


async def test_a_body_with_inputs_and_a_prompt_is_refused(api: Served) -> None:
    assert "prompt" in (await refusal(api, inputs="x", prompt="y"))["error"]


async def test_a_full_queue_is_overloaded(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_queue=0, max_prompts=1)
    async with serving(tmp_path, config=config) as api:
        error = await refusal(api, status=429, inputs="x", parameters={"best_of": 2, "do_sample": True})
    assert error["error_type"] == "overloaded"


async def test_a_stream_that_fails_ends_with_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api:
        told = await events(api, inputs="Once")
    assert told[0]["token"]["text"]
    assert set(told[-1]) == {"error", "error_type"}
    assert told[-1]["error_type"] == "generation"


async def test_a_key_of_use_is_needed_to_ask_the_root(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, api_key="sesame")) as api:
        error = await refusal(api, "/", status=401, inputs="x")
    assert error["error_type"] == "authentication"


async def test_an_answer_that_runs_out_of_time_ends_with_what_it_has(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(gate=Gate(3))) as api:
        told = await api.cut_off(events(api, inputs="x", parameters={"details": True}), tokens=3)
    assert told[-1]["generated_text"] == completion("x", 3)
    assert told[-1]["details"]["finish_reason"] == "length"
    assert "".join(event["token"]["text"] for event in told) == completion("x", 3)


async def test_what_has_a_prompt_is_another_dialect_s(api: Served) -> None:
    assert await api.post("/generate", prompt="Once", max_tokens=2) == {"text": "Once" + completion("Once", 2)}
    assert (await api.post("/tokenize", prompt="Once"))["count"] == 4


async def test_where_tgi_is_off_its_bodies_are_told_so_and_the_others_answered(api: Served) -> None:
    await api.server.switch_dialect("tgi", False)
    for path in ("/", "/generate", "/generate_stream", "/tokenize"):
        error = await refusal(api, path, status=404, inputs="x")
        assert "is off" in error["error"]
    assert (await api.get("/health"))["status"] == "ok"
    await api.post("/generate", prompt="Once", max_tokens=2)


async def test_a_parameter_that_is_not_tgi_s_is_named_as_it_was_sent(api: Served) -> None:
    refused = await refusal(api, inputs="x", parameters={"max_tokens": 4})
    assert refused["error"] == "max_tokens is not a field of this endpoint"


async def test_a_text_of_any_length_is_cut_to_its_last_tokens(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        await api.post("/generate", inputs="x" * 1_000_000 + "Once", parameters={"truncate": 4, "max_new_tokens": 1})
        assert bytes(api.backend.submitted[0].prompt_ids) == b"Once"
