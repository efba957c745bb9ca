"""text-generation-webui's own API, as its clients used it: the blocking one and the websocket."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from console.api.dialects.textgen.generate import MAX_PINGS
from console.api.server import ApiSettings
from tests.api.harness import Served, serving, until
from tests.fakes.backend import FakeBackend, Gate, expected_text, letters, saying
from tests.fakes.model import EOS_ID

EVERY_DEFAULT = {
    "do_sample": True,
    "temperature": 0.5,
    "top_p": 1,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "tfs": 1,
    "top_a": 0,
    "repetition_penalty": 1.1,
    "repetition_penalty_range": 0,
    "encoder_repetition_penalty": 1.0,
    "top_k": 0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "length_penalty": 1,
    "early_stopping": False,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "guidance_scale": 1,
    "negative_prompt": "",
    "seed": -1,
    "add_bos_token": True,
    "truncation_length": 2048,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "custom_stopping_strings": "",
    "stopping_strings": [],
    "preset": "None",
    "use_max_seq_len": False,
}


def completion(prompt: str, count: int) -> str:
    """What the fake model answers."""
    return expected_text(list(prompt.encode()), count, letters)


async def events(api: Served, **body: object) -> list[dict[str, Any]]:
    """What comes over a websocket until it is closed."""
    async with api.http.ws_connect("/api/v1/stream") as socket:
        await socket.send_str(json.dumps(body))
        return [json.loads(message.data) async for message in socket]


async def test_a_text_is_continued(api: Served) -> None:
    answer = await api.post("/api/v1/generate", prompt="Once", max_new_tokens=5)
    assert answer == {"results": [{"text": completion("Once", 5)}]}


async def test_a_body_with_every_default_is_accepted(api: Served) -> None:
    answer = await api.post("/api/v1/generate", prompt="Once", max_new_tokens=4, **EVERY_DEFAULT)
    assert answer == {"results": [{"text": completion("Once", 4)}]}
    params = api.backend.submitted[0].params
    assert (params.temperature, params.repetition_penalty, params.top_k, params.min_tokens) == (0.5, 1.1, 0, 0)


async def test_left_out_settings_are_text_generation_webui_s(api: Served) -> None:
    await api.post("/api/v1/generate", prompt="Once", do_sample=True)
    params = api.backend.submitted[0].params
    assert (params.max_tokens, params.temperature, params.repetition_penalty) == (200, 0.5, 1.1)


async def test_without_sampling_the_likeliest_tokens_are_taken(api: Served) -> None:
    await api.post("/api/v1/generate", prompt="Once", do_sample=False, max_new_tokens=1)
    assert api.backend.submitted[0].params.temperature == 0


async def test_every_setting_reaches_the_engine(api: Served) -> None:
    await api.post(
        "/api/v1/generate",
        prompt="Once",
        max_new_tokens=3,
        typical_p=0.9,
        tfs=0.8,
        top_a=0.1,
        top_k=7,
        min_length=2,
        seed=5,
        ban_eos_token=True,
        skip_special_tokens=False,
        stopping_strings=["zz"],
        repetition_penalty_range=64,
        custom_token_bans="7, 8",
    )
    params = api.backend.submitted[0].params
    assert (params.typical_p, params.tfs, params.top_a, params.top_k) == (0.9, 0.8, 0.1, 7)
    assert (params.min_tokens, params.seed, params.stop, params.repetition_range) == (2, 5, ("zz",), 64)
    assert params.logit_bias == {EOS_ID: -100.0, 7: -100.0, 8: -100.0}
    assert not params.skip_special_tokens


async def test_an_answer_ends_before_a_stopping_string(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one two three"))) as api:
        answer = await api.post("/api/v1/generate", prompt=">", stopping_strings=[" two"])
    assert answer == {"results": [{"text": "one"}]}


async def test_of_a_prompt_that_is_too_long_the_end_is_kept(api: Served) -> None:
    await api.post("/api/v1/generate", prompt="0123456789", max_new_tokens=4, truncation_length=10)
    assert bytes(api.backend.submitted[0].prompt_ids) == b"456789"
    await api.post("/api/v1/generate", prompt="x" * 100_000 + "end", max_new_tokens=96)
    cut = api.backend.submitted[1].prompt_ids
    assert (len(cut), bytes(cut[-3:])) == (4000, b"end")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 10, "truncation_length": 10}, "max_new_tokens"),
        ({"num_beams": 2}, "num_beams"),
        ({"epsilon_cutoff": 3}, "epsilon_cutoff"),
        ({"preset": "Godlike"}, "preset"),
        ({"min_length": -1, "seed": 1}, "min_length"),
        ({"do_sample": True, "stream": True}, "stream"),
        ({"do_sample": True, "smoke": 1}, "smoke"),
        ({"max_new_tokens": 5, "repetition_penalty_range": "x"}, "repetition_penalty_range"),
        ({"do_sample": True, "custom_token_bans": "a"}, "custom_token_bans"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(api: Served, body: dict[str, object], param: str) -> None:
    error = await api.refusal("/api/v1/generate", prompt="x", **{"do_sample": True, **body})
    assert error["param"] == param
    assert param in error["message"]


async def test_the_model_is_told_and_nothing_is_loaded(api: Served) -> None:
    await api.server.switch_dialect("kobold", False)
    assert await api.get("/api/v1/model") == {"result": "fake"}
    assert await api.post("/api/v1/model") == {"result": "fake"}
    assert await api.post("/api/v1/model", action="list") == {"result": ["fake"]}
    info = await api.post("/api/v1/model", action="info")
    assert info == {"result": {"model_name": "fake", "lora_names": []}}
    error = await api.refusal("/api/v1/model", action="load", model_name="other")
    assert "/admin/load" in error["message"]


async def test_without_a_model_there_is_none(tmp_path: Path) -> None:
    async with serving(tmp_path, load=False) as api:
        await api.server.switch_dialect("kobold", False)
        assert await api.get("/api/v1/model") == {"result": "None"}


async def test_tokens_are_counted(api: Served) -> None:
    assert await api.post("/api/v1/token-count", prompt="Once") == {"results": [{"tokens": 4}]}


async def test_the_websocket_sends_the_text_piece_by_piece_and_says_when_it_ends(api: Served) -> None:
    told = await events(api, prompt="Once", max_new_tokens=5, **EVERY_DEFAULT)
    assert [event["message_num"] for event in told] == list(range(len(told)))
    assert {event["event"] for event in told[:-1]} == {"text_stream"}
    assert "".join(event["text"] for event in told[:-1]) == completion("Once", 5)
    assert told[-1] == {"event": "stream_end", "message_num": len(told) - 1}


async def test_the_websocket_tells_what_it_refuses_and_closes(api: Served) -> None:
    async with api.http.ws_connect("/api/v1/stream") as socket:
        await socket.send_str(json.dumps({"prompt": "x", "num_beams": 4}))
        told = await socket.receive_json()
        closing = await socket.receive()
        assert (closing.type, socket.close_code) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.POLICY_VIOLATION)
    assert (told["event"], told["error"]["param"]) == ("error", "num_beams")
    await until(lambda: [failure.code for failure in api.server.report().failures] == ["invalid_request"])


@pytest.mark.parametrize("sent", ["{", "[]", '"x"', "[" * 100 + "]" * 100])
async def test_what_is_no_json_object_is_refused_over_the_websocket(api: Served, sent: str) -> None:
    async with api.http.ws_connect("/api/v1/stream") as socket:
        await socket.send_str(sent)
        assert (await socket.receive_json())["event"] == "error"


async def test_an_answer_that_fails_has_no_stream_end(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api:
        told = await events(api, prompt="Once", max_new_tokens=50)
    assert told[0]["event"] == "text_stream"
    assert told[-1]["event"] == "error"


async def test_a_client_that_leaves_ends_its_answer(paced_api: Served) -> None:
    api = paced_api
    async with api.http.ws_connect("/api/v1/stream") as socket:
        await socket.send_str(json.dumps({"prompt": "Once", "max_new_tokens": 50}))
        await api.until_row(state="prefill")
        await socket.close()
    await api.until_row(state="finished", finish="cancelled")


async def test_a_second_prompt_on_a_connection_is_refused(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, FakeBackend(gate=Gate())) as api,
        api.http.ws_connect("/api/v1/stream") as socket,
    ):
        await socket.send_str(json.dumps({"prompt": "Once", "max_new_tokens": 50}))
        await api.until_row(state="prefill")
        await socket.send_str(json.dumps({"prompt": "Twice"}))
        told = await socket.receive_json()
        assert told["event"] == "error"
        assert "One prompt" in told["error"]["message"]


async def test_a_stream_can_be_stopped_from_elsewhere_and_ends_with_what_has_come(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, FakeBackend(gate=Gate(3))) as api,
        api.http.ws_connect("/api/v1/stream") as socket,
    ):
        await socket.send_str(json.dumps({"prompt": "Once", "max_new_tokens": 50}))
        assert (await socket.receive_json())["event"] == "text_stream"
        assert await api.post("/api/v1/stop-stream") == {"results": "success"}
        rest = [json.loads(message.data) async for message in socket]
    assert rest[-1]["event"] == "stream_end"


async def test_the_websocket_asks_for_a_key_and_for_an_upgrade(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, api_key="sesame")) as api:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await api.http.ws_connect("/api/v1/stream")
        headers = {"Authorization": "Bearer sesame"}
        assert "websocket" in (await api.get("/api/v1/stream", status=400, headers=headers))["error"]["message"]
        async with api.http.ws_connect("/api/v1/stream", headers=headers) as socket:
            await socket.send_str(json.dumps({"prompt": "Once", "max_new_tokens": 1}))
            assert (await socket.receive_json())["event"] == "text_stream"


async def test_a_page_from_elsewhere_cannot_open_the_websocket(api: Served) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
        await api.http.ws_connect("/api/v1/stream", headers={"Origin": "http://elsewhere.example"})


async def test_a_websocket_of_a_dialect_that_is_off_is_not_there(api: Served) -> None:
    await api.server.switch_dialect("textgen", False)
    with pytest.raises(aiohttp.WSServerHandshakeError, match="404"):
        await api.http.ws_connect("/api/v1/stream")


async def test_a_silent_websocket_is_closed(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, settings=ApiSettings(port=0, idle_timeout_s=0.05)) as api,
        api.http.ws_connect("/api/v1/stream") as socket,
    ):
        assert (await socket.receive()).type == aiohttp.WSMsgType.CLOSE


async def test_a_stream_that_runs_out_of_time_ends_with_what_it_has(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(gate=Gate(3))) as api:
        told = await api.cut_off(events(api, prompt="x"), tokens=3)
    assert "".join(event["text"] for event in told[:-1]) == completion("x", 3)
    assert told[-1]["event"] == "stream_end"


async def test_a_stopping_server_closes_a_websocket_that_has_asked_nothing(api: Served) -> None:
    async with api.http.ws_connect("/api/v1/stream") as socket:
        await until(lambda: api.server.report().under_way == 1)
        stopping = asyncio.create_task(api.server.stop(drain_s=0.0))
        assert (await socket.receive()).type == aiohttp.WSMsgType.CLOSE
        await stopping


async def test_a_prompt_of_a_websocket_holds_no_more_than_a_body(api: Served) -> None:
    for prompt in ("[" + "[]," * 70_000 + "[]]", "[" * 100_000):
        async with api.http.ws_connect("/api/v1/stream") as socket:
            await socket.send_str(f'{{"prompt": {prompt}}}')
            told = await socket.receive_json()
            assert told["event"] == "error"
            assert told["error"]["param"] in ("prompt", None)
            assert "is too large" in told["error"]["message"] or "nests deeper" in told["error"]["message"]


@pytest.mark.parametrize("has_prompt", [False, True])
async def test_a_flood_of_pings_ends_its_connection_and_a_few_are_answered(tmp_path: Path, has_prompt: bool) -> None:
    async with serving(tmp_path, FakeBackend(gate=Gate(1))) as api:
        async with api.http.ws_connect("/api/v1/stream", autoping=False) as socket:
            if has_prompt:
                await socket.send_str(json.dumps({"prompt": "Once", "max_new_tokens": 50}))
                assert (await socket.receive_json())["event"] == "text_stream"
            for _ in range(MAX_PINGS // 2):
                await socket.ping(b"x")
            pongs = [await socket.receive() for _ in range(MAX_PINGS // 2)]
            assert {message.type for message in pongs} == {aiohttp.WSMsgType.PONG}
            with suppress(ConnectionError):
                for _ in range(100 * MAX_PINGS):
                    await socket.ping()
            async with asyncio.timeout(60):
                while not socket.closed:
                    await socket.receive()
        if has_prompt:
            await api.until_row(state="finished", finish="cancelled")
        assert "100 pings" in api.server.report().failures[0].message
