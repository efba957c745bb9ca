"""llama.cpp's own endpoints: /completion, /tokenize, /apply-template, /embedding, /props and /slots."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from console.api.settings import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.api.operators import named_spec
from tests.fakes.backend import FakeBackend, Gate, expected_text, letters, saying, vector_of
from tests.fakes.engines import Backends
from tests.fakes.model import EOS_ID, fake_spec, write_fake_model

PROMPT = "Once upon a time"
HELLO = [{"role": "user", "content": "hello"}]
PATHS = ("/completion", "/completions")


@pytest.fixture
async def talking(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose model ends its answer by itself."""
    async with serving(tmp_path, FakeBackend(reply=saying("one\nEND", then=EOS_ID))) as served:
        yield served


async def refused(api: Served, path: str, /, **body: Any) -> Any:
    """The error object of a POST that must be refused."""
    async with api.http.post(path, json=body) as response:
        answer = await response.json()
        assert set(answer) == {"error"}
        assert answer["error"]["code"] == response.status
        return answer["error"]


async def listed(api: Served, path: str, /, **body: Any) -> Any:
    """The answer to a POST, or to a GET without a body, that may be an array."""
    async with api.http.request("POST" if body else "GET", path, json=body or None) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def submitted(api: Served) -> list[list[int]]:
    """The prompts that the backend got."""
    return [list(request.prompt_ids) for request in api.backend.submitted]


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer(api: Served, path: str) -> None:
    answer = await api.post(path, prompt=PROMPT, n_predict=4)
    settings, timings = answer.pop("generation_settings"), answer.pop("timings")
    assert answer == {
        "index": 0,
        "content": expected_text(list(PROMPT.encode()), 4, letters),
        "tokens": [],
        "id_slot": -1,
        "stop": True,
        "model": "fake",
        "tokens_predicted": 4,
        "tokens_evaluated": len(PROMPT),
        "prompt": PROMPT,
        "has_new_line": False,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_cached": 0,
    }
    assert (settings["n_predict"], settings["temperature"], settings["top_k"], settings["seed"]) == (
        4,
        0.8,
        40,
        2**32 - 1,
    )
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (len(PROMPT), 0, 4)
    assert timings["prompt_ms"] > 0
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 4, abs=1e-3)


async def test_a_stream_has_a_piece_for_each_token_and_an_end_without_text(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, FakeBackend(reply=saying("one"), gate=gate)) as api:
        body = {"prompt": PROMPT, "n_predict": 3, "stream": True, "timings_per_token": True, "return_progress": True}
        async with api.http.post("/completion", json=body) as response:
            assert response.content_type == "text/event-stream"
            events = []
            gate.allow()
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                events.append(json.loads(line.removeprefix(b"data: ")))
                gate.allow()
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        *pieces, last = [event for event in events if "prompt_progress" not in event]
    assert (progress[-1]["total"], progress[-1]["processed"], progress[-1]["cache"]) == (len(PROMPT), len(PROMPT), 0)
    assert "".join(piece["content"] for piece in pieces) == "one"
    assert [token for piece in pieces for token in piece["tokens"]] == list(b"one")
    assert [piece["stop"] for piece in pieces] == [False] * len(pieces)
    assert pieces[-1]["tokens_predicted"] == pieces[-1]["timings"]["predicted_n"] == 3
    assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "limit")
    assert last["timings"]["predicted_n"] == 3


@pytest.mark.parametrize(
    ("asked", "content", "stop_type", "word"),
    [
        ({}, "one\nEND", "eos", ""),
        ({"n_predict": 2}, "on", "limit", ""),
        ({"stop": ["ten", "END"]}, "one\n", "word", "END"),
        ({"stop": []}, "one\nEND", "eos", ""),
    ],
)
async def test_why_an_answer_ended(
    talking: Served, asked: dict[str, Any], content: str, stop_type: str, word: str
) -> None:
    whole = await talking.post("/completion", prompt="x", **asked)
    assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == (content, stop_type, word)
    assert whole["has_new_line"] is ("\n" in content)
    *_, last = await talking.events("/completion", prompt="x", **asked)
    assert (last["stop_type"], last["stopping_word"], last["has_new_line"]) == (stop_type, word, "\n" in content)


async def test_an_answer_that_the_context_ends_is_truncated(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(max_model_len=32)) as api:
        ended = await api.post("/completion", prompt="x", n_predict=-1)
        assert (ended["tokens_predicted"], ended["truncated"]) == (31, True)
        assert (await api.post("/completion", prompt="x", n_predict=30))["truncated"] is False


async def test_no_token_is_predicted_where_none_is_asked_for(api: Served) -> None:
    answer = await api.post("/completion", prompt=PROMPT, n_predict=0)
    assert (answer["content"], answer["tokens_predicted"], answer["tokens_evaluated"]) == ("", 0, len(PROMPT))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [[EOS_ID, 97, 98]]),
        ([97, 98], [[97, 98]]),
        ([97, "bc", 100.0, "e"], [[97, 98, 99, 100, 101]]),
        (["ab", 99], [[EOS_ID, 97, 98, 99]]),
        ({"prompt_string": "ab"}, [[EOS_ID, 97, 98]]),
        (["ab", "c"], [[EOS_ID, 97, 98], [EOS_ID, 99]]),
        (["ab", [99], [100, "e"], {"prompt_string": "f", "multimodal_data": []}],
         [[EOS_ID, 97, 98], [99], [100, 101], [EOS_ID, 102]]),
    ],
    ids=["text", "ids", "ids and texts", "text first", "object", "texts", "all kinds"],
)  # fmt: skip
async def test_prompts_of_every_shape(tmp_path: Path, prompt: Any, prompts: list[list[int]]) -> None:
    async with serving(tmp_path, spec=fake_spec(write_fake_model(tmp_path, starts=True))) as api:
        answer = await listed(api, "/completion", prompt=prompt, n_predict=1)
        assert submitted(api) == prompts
        answers = answer if isinstance(answer, list) else [answer]
        assert [each["index"] for each in answers] == list(range(len(prompts)))
        assert [each["tokens_evaluated"] for each in answers] == list(map(len, prompts))


async def test_several_answers_to_one_prompt(api: Served) -> None:
    answers = await listed(api, "/completion", prompt="x", n_predict=2, n_cmpl=2)
    assert [each["index"] for each in answers] == [0, 1]


async def test_settings_mean_what_they_mean_in_llama_cpp(api: Served) -> None:
    await api.post("/completion", prompt="x", n_predict=1)
    await api.post(
        "/completion",
        prompt="x",
        n_predict=1,
        temperature=-1,
        repeat_penalty=1.3,
        repeat_last_n=0,
        frequency_penalty=0.5,
        dry_multiplier=0.8,
        dry_penalty_last_n=0,
        seed=2**32 - 1,
        cache_prompt=False,
        id_slot=3,
        n_keep=5,
    )
    await api.post(
        "/completion", prompt="x", n_predict=1, repeat_penalty=1.3, repeat_last_n=-1, seed=5, ignore_eos=True
    )
    plain, off, all_tokens = [request.params for request in api.backend.submitted]
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p, plain.temperature_last) == (
        0.8,
        40,
        0.95,
        0.05,
        True,
    )
    assert plain.repetition_range == 64
    assert (off.temperature, off.repetition_penalty, off.frequency_penalty, off.dry_multiplier) == (0, 1, 0, 0)
    assert off.seed != 2**32 - 1
    assert (all_tokens.repetition_penalty, all_tokens.repetition_range, all_tokens.seed) == (1.3, 0, 5)
    assert (all_tokens.ignore_eos, all_tokens.logit_bias) == (True, {EOS_ID: -100.0})


async def test_a_dynamic_temperature_replaces_the_other(api: Served) -> None:
    await api.post("/completion", prompt="x", n_predict=1, temperature=0.8, dynatemp_range=0.3, dynatemp_exponent=2)
    params = api.backend.submitted[0].params
    assert (params.min_temp, params.max_temp) == pytest.approx((0.5, 1.1))
    assert (params.temp_exponent, params.temperature) == (2, 1)


async def test_the_settings_of_each_answer_are_those_it_had(api: Served) -> None:
    answers = await listed(api, "/completion", prompt=["x", "y"], n=2, n_predict=1, seed=5)
    assert [answer["generation_settings"]["seed"] for answer in answers] == [5, 6, 5, 6]
    assert sorted(request.params.seed or 0 for request in api.backend.submitted) == [5, 5, 6, 6]
    settings = (await api.post("/completion", prompt="x", n_predict=1, dynatemp_range=0.5))["generation_settings"]
    assert (settings["temperature"], settings["dynatemp_range"]) == pytest.approx((0.8, 0.5))


async def test_the_settings_of_an_answer_without_a_limit_have_that_of_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_output_tokens=3)) as api:
        assert (await api.post("/completion", prompt="x"))["generation_settings"]["n_predict"] == 3


async def test_answers_do_not_repeat_long_settings_without_end(api: Served) -> None:
    biases = [[token, -1] for token in range(250)]
    answers = await listed(api, "/completion", prompt="x", n=2, n_predict=1, logit_bias=biases)
    assert [len(answer["generation_settings"]["logit_bias"]) for answer in answers] == [250, 250]
    error = await refused(api, "/completion", prompt=["x", "y"], n=100, n_predict=1, logit_bias=biases)
    assert error["message"].startswith("200 answers would repeat ")
    assert len(await listed(api, "/completion", prompt="x", n=128, n_predict=1)) == 128


async def test_values_that_change_nothing_pass_and_errors_name_the_fields_of_the_client(api: Served) -> None:
    await api.post("/completion", prompt="x", n_predict=1, t_max_predict_ms=-1, sse_ping_interval=30)
    both = await refused(api, "/completion", prompt="x", grammar='root ::= "a"', json_schema={"type": "object"})
    assert both["message"] == "grammar and json_schema both set a format; send one of them"


@pytest.mark.parametrize(
    ("biases", "wanted"),
    [
        ([[97, 1.5], [98, False]], {97: 1.5, 98: -100.0}),
        ([["ab", -0.5]], {97: -0.5, 98: -0.5}),
        ([[97, 1], ["a", 2]], {97: 3.0}),
        ({"97": 2, "b": False, "5": -1}, {97: 2.0, 98: -100.0, 5: -1.0}),
        ([], {}),
        ({}, {}),
    ],
)
async def test_biases_by_token_or_by_text(api: Served, biases: Any, wanted: dict[int, float]) -> None:
    await api.post("/completion", prompt="x", n_predict=1, logit_bias=biases)
    assert api.backend.submitted[0].params.logit_bias == wanted


async def test_samplers_that_are_not_listed_are_off_and_the_temperature_is_where_it_is_listed(api: Served) -> None:
    body = {"prompt": "x", "n_predict": 1, "repeat_penalty": 1.5, "xtc_probability": 0.5, "temperature": 0.7}
    await api.post("/completion", **body, samplers=["top_k", "temperature"])
    await api.post("/completion", **body, samplers=["penalties", "temperature", "top_k", "min_p"])
    await api.post("/completion", **body, samplers="kmxt")
    few, first, letters_ = [request.params for request in api.backend.submitted]
    assert (few.top_k, few.top_p, few.min_p, few.repetition_penalty, few.xtc_probability) == (40, 1, 0, 1, 0)
    assert few.temperature_last
    assert (first.repetition_penalty, first.temperature_last, first.min_p, first.top_p) == (1.5, False, 0.05, 1)
    assert (letters_.xtc_probability, letters_.min_p, letters_.temperature_last) == (0.5, 0.05, True)


async def test_probabilities_of_tokens_and_their_alternatives(api: Served) -> None:
    answer = await api.post("/completion", prompt="x", n_predict=2, n_probs=1, return_tokens=True)
    told = answer["completion_probabilities"]
    assert [each["id"] for each in told] == answer["tokens"] == list(answer["content"].encode())
    assert "".join(each["token"] for each in told) == answer["content"]
    assert [each["bytes"] for each in told] == [[token] for token in answer["tokens"]]
    assert all(each["logprob"] <= 0 and isinstance(each["top_logprobs"], list) for each in told)
    streamed = await api.events("/completion", prompt="x", n_predict=2, n_probs=1)
    assert [each for event in streamed for each in event.get("completion_probabilities", [])] == told


async def test_only_some_fields_are_returned_where_requested(api: Served) -> None:
    fields = ["content", "generation_settings/n_predict", "no/such/field", "stop"]
    answer = await api.post("/completion", prompt="x", n_predict=2, response_fields=fields)
    assert answer == {"content": expected_text([120], 2, letters), "generation_settings/n_predict": 2, "stop": True}


@pytest.mark.parametrize(
    "grammar",
    [{"grammar": 'root ::= "yes" | "no"'}, {"json_schema": {"enum": [1, 2]}}, {"json_schema": {}}],
    ids=["gbnf", "schema", "any JSON"],
)
async def test_an_answer_is_held_to_a_grammar(api: Served, grammar: dict[str, Any]) -> None:
    content = (await api.post("/completion", prompt="x", n_predict=20, **grammar))["content"]
    if "grammar" in grammar:
        assert content in ("yes", "no")
    elif grammar["json_schema"]:
        assert json.loads(content) in (1, 2)
    assert api.backend.submitted[0].params.grammar is not None


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt"),
        ({"prompt": [97, True]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"n_predict": -2}, "n_predict"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"mirostat": 1}, "mirostat"),
        ({"n_probs": 99}, "n_probs"),
        ({"min_keep": 2}, "min_keep"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"t_max_predict_ms": 100}, "t_max_predict_ms"),
        ({"n_indent": 4}, "n_indent"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
        ({"samplers": ["top_p", "top_k"]}, "samplers"),
        ({"samplers": ["top_k", "top_k"]}, "samplers"),
        ({"samplers": ["magic"]}, "samplers"),
        ({"samplers": "kz"}, "samplers"),
        ({"samplers": []}, "samplers"),
        ({"logit_bias": [[97, True]]}, "logit_bias"),
        ({"logit_bias": [[97]]}, "logit_bias"),
        ({"logit_bias": [[97, 101]]}, "logit_bias"),
        ({"logit_bias": "x"}, "logit_bias"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
        ({"stop": "", "stopp": ["x"]}, "stopp"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_in_llama_cpp_s_shape(
    api: Served, body: dict[str, Any], name: str
) -> None:
    error = await refused(api, "/completion", **({"prompt": "x"} if body else {}) | body)
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert name in error["message"]


async def test_a_prompt_that_is_too_long_says_how_long_and_for_what(api: Served) -> None:
    error = await refused(api, "/completion", prompt="x" * 5000)
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (5000, 4096)


async def test_a_stream_that_fails_says_so_in_an_event(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(2, 40))) as api:
        *_, last = await api.events("/completion", prompt="x", n_predict=5)
        assert last["error"]["code"] >= 500
        assert last["error"]["type"] in ("server_error", "unavailable_error")


async def test_errors_of_http_have_the_shape_too(api: Served) -> None:
    async with api.http.get("/completion") as response:
        assert (response.status, (await response.json())["error"]["type"]) == (405, "not_found_error")


async def test_tokens_of_a_text(tmp_path: Path) -> None:
    async with serving(tmp_path, spec=fake_spec(write_fake_model(tmp_path, starts=True))) as api:
        assert await api.post("/tokenize", content="hé") == {"tokens": [104, 195, 169]}
        assert await api.post("/tokenize", content="h", add_special=True) == {"tokens": [EOS_ID, 104]}
        assert await api.post("/tokenize", content="") == {"tokens": []}
        pieces = await api.post("/tokenize", content="hé", with_pieces=True)
        assert pieces == {
            "tokens": [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
        }
        assert await api.post("/tokenize", content="h", parse_special=False) == {"tokens": [104]}
        assert (await api.post("/tokenize", content="h", parse_special=False, add_special=True))["tokens"][-1] == 104
        assert "parse_special" in (await refused(api, "/tokenize", content="<eos>", parse_special=False))["message"]


async def test_the_body_decides_whose_tokenize_it_is(api: Served) -> None:
    assert set(await api.post("/tokenize", content="x")) == {"tokens"}
    assert set(await api.post("/tokenize", prompt="x")) == {"count", "max_model_len", "tokens", "token_strs"}
    assert set((await listed(api, "/tokenize", inputs="x"))[0]) == {"id", "text", "start", "stop"}


async def test_tokens_become_text_in_the_words_of_both(api: Served) -> None:
    assert await api.post("/detokenize", tokens=[104, 105]) == {"prompt": "hi", "content": "hi"}


async def test_a_conversation_becomes_the_prompt_of_chat_completions(api: Served) -> None:
    rendered = await api.post("/apply-template", messages=HELLO)
    await api.post("/v1/chat/completions", messages=HELLO, max_tokens=1)
    assert rendered == {"prompt": bytes(submitted(api)[0]).decode()}


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
async def test_vectors_of_texts(api: Served, path: str) -> None:
    assert await listed(api, path, content="ab") == [{"index": 0, "embedding": [vector_of(b"ab")]}]
    several = await listed(api, path, content=["ab", "c"], embd_normalize=2)
    assert [each["embedding"] for each in several] == [[vector_of(b"ab")], [vector_of(b"c")]]
    assert "embd_normalize" in (await refused(api, path, content="x", embd_normalize=-1))["message"]
    assert await listed(api, path, input=[97, 98]) == [{"index": 0, "embedding": [vector_of(b"ab")]}]
    assert (await refused(api, path, content=[{}]))["message"].startswith("content should be")
    assert (await refused(api, path, input=["a", ""]))["message"] == "input[1] is empty"
    assert (await refused(api, path, content=""))["message"] == "content is empty"
    assert (await refused(api, path))["message"] == "content is missing"


async def test_the_properties_are_those_of_the_model_and_of_a_request_without_settings(api: Served) -> None:
    props = await api.get("/props")
    defaults = props["default_generation_settings"]
    settings = (await api.post("/completion", prompt="x", n_predict=1))["generation_settings"]
    assert defaults["n_ctx"] == 4096
    assert defaults["params"] == {**settings, "n_predict": -1, "max_tokens": -1}
    assert props["total_slots"] == api.engine.config.max_prompts * api.engine.config.num_workers
    assert (props["model_alias"], props["model_path"], props["eos_token"]) == ("fake", "fake", "<eos>")
    assert props["chat_template"].startswith("{% for message in messages %}")
    assert props["is_sleeping"] is False


async def test_properties_and_slots_are_those_of_the_model_that_the_address_names(tmp_path: Path) -> None:
    gate = Gate()
    config = EngineConfig(worker_host="thread", max_prompts=1)
    async with serving(tmp_path, others=Backends(FakeBackend(gate=gate, max_model_len=512)), config=config) as api:
        await api.engine.load(named_spec(tmp_path, "two"), beside=True)
        for name, context in (("fake", 4096), ("two", 512)):
            props = await api.get(f"/props?model={name}")
            assert (props["model_alias"], props["default_generation_settings"]["n_ctx"]) == (name, context)
        body = {"model": "two", "prompt": "x", "n_predict": 3, "stream": True}
        async with api.http.post("/completion", json=body) as response:
            await api.until_row(state="prefill")
            api.engine.publish()
            for name, is_processing in (("fake", False), ("two", True)):
                [slot] = await listed(api, f"/slots?model={name}")
                assert slot["is_processing"] is is_processing
            gate.open()
            await response.read()
        for path in ("/props", "/slots"):
            async with api.http.get(f"{path}?model=nobody") as unknown:
                assert unknown.status == 404


async def test_without_a_model_the_properties_are_a_503(tmp_path: Path) -> None:
    async with serving(tmp_path, load=False) as api, api.http.get("/props") as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (503, 503, "unavailable_error")


async def test_slots_show_the_requests_under_way(tmp_path: Path) -> None:
    gate = Gate()
    config = EngineConfig(worker_host="thread", max_prompts=1)
    async with serving(tmp_path, FakeBackend(gate=gate), config=config) as api:
        [slot] = await listed(api, "/slots?fail_on_no_slot=1")
        assert slot == {"id": 0, "n_ctx": 4096, "is_processing": False}
        async with api.http.post("/completion", json={"prompt": "x", "n_predict": 3, "stream": True}) as response:
            await api.until_row(state="prefill")
            api.engine.publish()
            [slot] = await listed(api, "/slots")
            assert (slot["is_processing"], slot["next_token"]) == (
                True,
                {"has_next_token": True, "n_remain": 3, "n_decoded": 0},
            )
            async with api.http.get("/slots?fail_on_no_slot=1") as full:
                assert full.status == 503
            gate.open()
            await response.read()


async def test_slots_are_those_of_the_first_model(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, others=Backends(FakeBackend(gate=gate))) as api:
        await api.engine.load(named_spec(tmp_path, "two"), beside=True)
        body = {"model": "two", "prompt": "x", "n_predict": 3, "stream": True}
        async with api.http.post("/completion", json=body) as response:
            await api.until_row(state="prefill")
            api.engine.publish()
            assert not any(slot["is_processing"] for slot in await listed(api, "/slots"))
            gate.open()
            await response.read()
