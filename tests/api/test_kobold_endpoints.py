"""KoboldAI's and KoboldCpp's API, as their clients know it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from console.api.server import ApiSettings
from tests.api.harness import Served, serving, until
from tests.fakes.backend import FakeBackend, Gate, expected_text, letters, saying
from tests.fakes.model import EOS_ID


def completion(prompt: str, count: int) -> str:
    """What the fake model answers."""
    return expected_text(list(prompt.encode()), count, letters)


async def refusal(api: Served, path: str = "/api/v1/generate", /, status: int = 400, **body: Any) -> dict[str, str]:
    """The detail of a request that must be refused."""
    async with api.http.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == status, answer
        assert set(answer) == {"detail"}
        assert set(answer["detail"]) == {"msg", "type"}
        return answer["detail"]


async def events(api: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, framed as KoboldCpp frames them."""
    async with api.http.post("/api/extra/generate/stream", json=body) as response:
        assert response.content_type == "text/event-stream", await response.text()
        frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("event: message\ndata: ") for frame in frames)
    return [json.loads(frame.removeprefix("event: message\ndata: ")) for frame in frames]


@pytest.mark.parametrize("path", ["/api/v1/generate", "/api/latest/generate"])
async def test_a_text_is_continued(api: Served, path: str) -> None:
    answer = await api.post(path, prompt="Once", max_length=5)
    assert answer == {"results": [{"text": completion("Once", 5), "finish_reason": "length"}]}


async def test_a_prompt_alone_is_enough_and_the_rest_is_koboldcpp_s(api: Served) -> None:
    await api.post("/api/v1/generate", prompt="Once")
    params = api.backend.submitted[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (180, 0.7, 100, 0.92)
    assert (params.repetition_penalty, params.repetition_range, params.include_stop) == (1.0, 320, True)


async def test_every_setting_reaches_the_engine(api: Served) -> None:
    await api.post(
        "/api/v1/generate",
        prompt="Once",
        max_length=3,
        temperature=0.9,
        rep_pen=1.1,
        rep_pen_range=64,
        top_a=0.1,
        typical=0.9,
        tfs=0.95,
        min_p=0.05,
        sampler_order=[6, 0, 1, 3, 4, 5],
        sampler_seed=9,
        stop_sequence=["zz"],
        ban_eos_token=True,
        banned_tokens=["never"],
        render_special=True,
        logit_bias={"65": -5},
    )
    params = api.backend.submitted[0].params
    assert (params.temperature, params.repetition_penalty, params.repetition_range) == (0.9, 1.1, 64)
    assert (params.top_a, params.typical_p, params.tfs, params.min_p) == (0.1, 0.9, 0.95, 0.05)
    assert (params.seed, params.stop, params.banned_strings) == (9, ("zz",), ("never",))
    assert params.temperature_last
    assert params.logit_bias == {65: -5.0, EOS_ID: -100.0}
    assert not params.skip_special_tokens


async def test_a_dynamic_temperature_lies_around_the_given_one_and_takes_its_place(api: Served) -> None:
    await api.post("/api/v1/generate", prompt="x", max_length=1, temperature=1.5, dynatemp_range=0.5)
    params = api.backend.submitted[0].params
    assert (params.temperature, params.min_temp, params.max_temp) == (1.0, 1.0, 2.0)


async def test_a_grammar_reaches_the_engine(api: Served) -> None:
    await api.post("/api/v1/generate", prompt="x", max_length=1, grammar='root ::= "a" | "b"')
    assert api.backend.submitted[0].params.grammar is not None
    detail = await refusal(api, prompt="x", grammar="root ::= (")
    assert "grammar" in detail["msg"]


async def test_an_answer_has_its_stop_sequence_unless_it_is_to_be_trimmed(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one two three"))) as api:
        kept = await api.post("/api/v1/generate", prompt=">", stop_sequence=["two"])
        trimmed = await api.post("/api/v1/generate", prompt=">", stop_sequence=["two"], trim_stop=True)
    assert kept["results"] == [{"text": "one two", "finish_reason": "stop"}]
    assert trimmed["results"] == [{"text": "one ", "finish_reason": "stop"}]


async def test_a_single_line_is_given_where_it_is_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one\ntwo"))) as api:
        answer = await api.post("/api/v1/generate", prompt=">", singleline=True)
    assert answer["results"][0]["text"] == "one"


async def test_of_a_long_prompt_the_end_is_kept_and_all_of_its_memory(api: Served) -> None:
    await api.post("/api/v1/generate", prompt="0123456789", max_length=4, max_context_length=10)
    assert bytes(api.backend.submitted[0].prompt_ids) == b"456789"
    await api.post("/api/v1/generate", prompt="0123456789", memory="ab", max_length=4, max_context_length=10)
    assert bytes(api.backend.submitted[1].prompt_ids) == b"ab6789"


async def test_a_stream_is_its_pieces_and_a_reason_with_the_last(api: Served) -> None:
    told = await events(api, prompt="Once", max_length=5)
    assert "".join(event["token"] for event in told) == completion("Once", 5)
    assert [event["finish_reason"] for event in told] == [None] * (len(told) - 1) + ["length"]


@pytest.mark.parametrize("genkey", ["", "KCPP1"])
async def test_an_answer_under_way_can_be_looked_at_and_ended(tmp_path: Path, genkey: str) -> None:
    async with serving(tmp_path, FakeBackend(gate=Gate(4))) as api:
        body = {"genkey": genkey} if genkey else {}
        asking = asyncio.create_task(api.post("/api/v1/generate", prompt="Once", max_length=50, **body))
        pending = ""
        async with asyncio.timeout(60):
            while not pending:
                pending = (await api.post("/api/extra/generate/check", **body))["results"][0]["text"]
        assert completion("Once", 50).startswith(pending)
        assert (await api.post("/api/extra/generate/check", genkey="another"))["results"] == [{"text": ""}]
        assert await api.post("/api/extra/abort", genkey="another") == {"success": "false", "done": "false"}
        assert await api.post("/api/extra/abort", **body) == {"success": "true", "done": "true"}
        [answer] = (await asking)["results"]
    assert answer["text"].startswith(pending)
    assert completion("Once", 50).startswith(answer["text"])


async def test_sillytavern_s_abort_has_no_body(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(gate=Gate(2))) as api:
        streaming = asyncio.create_task(events(api, prompt="Once", max_length=50))
        await api.until_row(state="decode")
        async with api.http.post("/api/extra/abort") as response:
            assert (await response.json())["success"] == "true"
        told = await streaming
    assert told[-1]["finish_reason"] == "length"


async def test_another_client_neither_sees_nor_ends_an_answer(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, api_key="sesame")
    async with serving(tmp_path, FakeBackend(gate=Gate(4)), settings=settings) as api:
        mine, other = await api.server.make_key("mine", ("use",)), await api.server.make_key("other", ("use",))
        headers, others = {"X-API-Key": mine.key}, {"X-API-Key": other.key}
        body = {"prompt": "Once", "max_length": 50}
        async with api.http.post("/api/extra/generate/stream", json=body, headers=headers) as response:
            await response.content.readline()
            assert (await api.get("/api/extra/generate/check", headers=others))["results"] == [{"text": ""}]
            async with api.http.post("/api/extra/abort", headers=others) as aborted:
                assert (await aborted.json())["success"] == "false"
            assert (await api.get("/api/extra/generate/check", headers=headers))["results"] != [{"text": ""}]


async def test_what_frontends_ask_first_is_told(api: Served) -> None:
    assert await api.get("/api/v1/model") == {"result": "fake"}
    assert await api.get("/api/v1/info/version") == {"result": "1.2.5"}
    assert await api.get("/api/v1/config/max_context_length") == {"value": 4096}
    assert await api.get("/api/v1/config/max_length") == {"value": 4095}
    assert await api.get("/api/extra/true_max_context_length") == {"value": 4096}
    assert await api.get("/api/v1/config/soft_prompts_list") == {"values": []}
    version = await api.get("/api/extra/version")
    assert (version["result"], version["version"], version["protected"]) == ("KoboldCpp", "1.76", False)


async def test_without_a_model_frontends_see_no_connection(tmp_path: Path) -> None:
    async with serving(tmp_path, load=False) as api:
        assert await api.get("/api/v1/model") == {"result": "ReadOnly"}


async def test_tokens_are_counted_and_told(api: Served) -> None:
    assert await api.post("/api/extra/tokencount", prompt="Hi") == {"value": 2, "ids": [72, 105]}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_length": 0}, "max_length"),
        ({"max_length": 20, "max_context_length": 20}, "max_length"),
        ({"use_memory": True}, "use_memory"),
        ({"rep_pen": 1.1, "rep_pen_slope": 0.7}, "rep_pen_slope"),
        ({"rep_pen": 0}, "rep_pen"),
        ({"typical": 2}, "typical"),
        ({"tfs": 0.9, "top_p": 0.5, "sampler_order": [6, 0, 1, 3, 4, 2, 5]}, "sampler_order"),
        ({"images": ["x"]}, "images"),
        ({"memory": "x" * 30, "max_length": 2, "max_context_length": 20}, "memory"),
        ({"smoke": 1}, "smoke"),
        ({"stream": True}, "stream"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(api: Served, body: dict[str, object], named: str) -> None:
    detail = await refusal(api, prompt="x", **body)
    assert named in detail["msg"]
    assert detail["type"] == "bad_input"


async def test_a_slope_of_no_penalty_is_nothing(api: Served) -> None:
    await api.post("/api/v1/generate", prompt="x", max_length=1, rep_pen=1, rep_pen_slope=0.9)


async def test_a_stream_that_fails_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api:
        told = await events(api, prompt="Once", max_length=50)
    assert told[0]["token"]
    assert told[-1]["detail"]["type"] == "server_error"


async def test_a_body_that_only_text_generation_webui_has_is_its(api: Served) -> None:
    assert await api.post("/api/v1/generate", prompt="Once", max_new_tokens=2) == {
        "results": [{"text": completion("Once", 2)}]
    }
    counts = {reading.name: reading.requests for reading in api.server.report().dialects}
    await until(lambda: api.server.report().under_way == 0)
    assert (counts["textgen"], counts["kobold"]) == (1, 0)


async def test_an_answer_that_runs_out_of_time_ends_with_what_it_has(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(gate=Gate(3))) as api:
        answer = await api.cut_off(api.post("/api/v1/generate", prompt="x"), tokens=3)
    assert answer["results"] == [{"text": completion("x", 3), "finish_reason": "length"}]


async def test_a_default_length_is_no_more_than_the_server_allows(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_output_tokens=3)) as api:
        assert (await api.post("/api/v1/generate", prompt="x"))["results"][0]["text"] == completion("x", 3)
        webui = await api.post("/api/v1/generate", prompt="x", do_sample=True)
        assert webui == {"results": [{"text": completion("x", 3)}]}
        assert "max_length" in (await refusal(api, prompt="x", max_length=4))["msg"]
        assert await api.get("/api/v1/config/max_length") == {"value": 3}
