"""A worker's answers: text, ends, stop strings, characters of several tokens, going on where one broke off."""

from __future__ import annotations

from tests.fakes.backend import FakeBackend, expected_text, saying
from tests.fakes.model import EOS_ID
from tests.fakes.worker import PROMPT_IDS, submit_command


async def test_a_request_streams_one_output_per_step_and_ends_at_max_tokens(start_worker, model_folder):
    probe = await start_worker(FakeBackend())
    assert (await probe.load(model_folder)).model.backend == "fake"
    probe.send(submit_command("r", max_tokens=5))
    outputs = [output async for output in probe.outputs("r")]
    assert [len(output.token_ids) for output in outputs] == [1] * 5
    assert "".join(output.text for output in outputs) == expected_text(PROMPT_IDS, 5)
    assert [output.finish for output in outputs] == [None] * 4 + ["length"]
    assert outputs[0].cached_tokens == 0


async def test_an_end_token_ends_the_answer_and_makes_no_text(start_worker, model_folder):
    probe = await start_worker(FakeBackend(reply=saying("hi", then=EOS_ID)))
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=50))
    text, last = await probe.answer("r")
    assert (text, last.finish, last.token_ids) == ("hi", "stop", [EOS_ID])


async def test_a_stop_string_across_tokens_is_held_back_and_never_shown(start_worker, model_folder):
    backend = FakeBackend(reply=saying("answer END more"))
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=50, stop=("END",)))
    outputs = [output async for output in probe.outputs("r")]
    assert "".join(output.text for output in outputs) == "answer "
    assert sum(len(output.token_ids) for output in outputs) == len("answer END")
    assert outputs[-1].finish == "stop"
    assert backend.cancelled == ["r"]


async def test_text_held_for_a_stop_string_is_shown_when_the_answer_ends_otherwise(start_worker, model_folder):
    probe = await start_worker(FakeBackend(reply=saying("so EN", then=EOS_ID)))
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=50, stop=("END",)))
    text, last = await probe.answer("r")
    assert (text, last.text, last.finish) == ("so EN", "EN", "stop")


async def test_a_character_of_several_tokens_is_shown_once_whole(start_worker, model_folder):
    probe = await start_worker(FakeBackend(reply=saying("é😀", then=EOS_ID)))
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=50))
    texts = [output.text async for output in probe.outputs("r")]
    assert texts == ["", "é", "", "", "", "😀", ""]


async def test_a_resumed_request_emits_only_what_comes_after_its_tokens(start_worker, model_folder):
    whole = expected_text(PROMPT_IDS, 10)
    backend = FakeBackend()
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("r", generated=whole[:4], max_tokens=10))
    text, last = await probe.answer("r")
    assert (text, last.finish) == (whole[4:], "length")


async def test_a_resumed_request_whose_tokens_end_it_is_finished_at_once(start_worker, model_folder):
    backend = FakeBackend()
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("r", generated="abcd", max_tokens=4))
    text, last = await probe.answer("r")
    assert (text, last.finish, backend.submitted) == ("", "length", [])


async def test_a_prompt_that_the_backend_refuses_ends_with_its_typed_error(start_worker, model_folder):
    probe = await start_worker(FakeBackend(max_model_len=4))
    await probe.load(model_folder)
    probe.send(submit_command("r", "too long for it"))
    _, last = await probe.answer("r")
    assert last.finish == "error"
    assert last.error.code == "context_length_exceeded"
    assert last.error.details == {"prompt_tokens": 15, "limit": 4}


async def test_a_request_without_a_model_is_refused(start_worker, model_folder):
    probe = await start_worker(FakeBackend())
    probe.send(submit_command("r"))
    _, last = await probe.answer("r")
    assert last.error.code == "no_model_loaded"


async def test_logprobs_come_one_for_each_token(start_worker, model_folder):
    probe = await start_worker(FakeBackend())
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=3, logprobs=0))
    outputs = [output async for output in probe.outputs("r")]
    assert [[entry.token_id for entry in output.logprobs] for output in outputs] == [
        output.token_ids for output in outputs
    ]
