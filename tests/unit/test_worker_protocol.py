"""Messages and their frames."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.base import BackendRequest, BackendStats, LoadedModel, LoadProgress, TokenLogprob
from engine.config import ModelSpec, SamplingParams
from engine.errors import InsufficientMemory, from_info
from engine.worker_process import protocol
from engine.worker_process.protocol import Codec, RequestOutput, split_frames
from tests.fakes.requests import make_request

REQUEST = BackendRequest(
    id="r1",
    prompt_ids=[1, 2, 3],
    generated=[4],
    params=SamplingParams(seed=-5, max_tokens=9, stop=("a", "b"), logit_bias={7: -1.5}, logprobs=2),
    end_token_ids=(2, 3),
)
ERROR = InsufficientMemory("it does not fit", device="cuda:0", short_bytes=12).info


def commands(path) -> list[protocol.Command]:
    spec = ModelSpec(path=path, name="m", lora=path / "lora", gpu_split_gb=(1.5, 2.0), threads=2)
    return [
        protocol.Load(spec=spec, max_prompts=4, step_tokens=64, page_tokens=16, threads=2),
        protocol.CancelLoad(),
        protocol.Submit(request=REQUEST),
        protocol.Cancel(request_id="r1"),
        protocol.SetMaxPrompts(max_prompts=3),
        protocol.Shutdown(),
    ]


def events() -> list[protocol.Event]:
    model = LoadedModel(
        backend="torch",
        architecture="LlamaForCausalLM",
        dtype="float32",
        devices=("cpu",),
        vocab_size=10,
        max_model_len=20,
        kv_tokens=30,
        page_tokens=16,
        weights_bytes=40,
        kv_bytes=50,
        parameters=60,
    )
    output = RequestOutput(
        request_id="r1",
        token_ids=[1, 2],
        text="é",
        logprobs=[TokenLogprob(token_id=1, logprob=-0.5, top=((1, -0.5), (2, -1.0)))],
        finish="error",
        error=ERROR,
        cached_tokens=16,
    )
    return [
        protocol.Hello(pid=1),
        protocol.Progress(progress=LoadProgress(phase="weights", done=1, total=2)),
        protocol.Loaded(model=model, load_s=1.5),
        protocol.LoadFailed(error=ERROR),
        protocol.StepBatch(outputs=[output], stats=BackendStats(steps=3), step_s=0.25, rss_bytes=7),
        protocol.WorkerError(error=ERROR),
        protocol.LogLine(level=20, logger="native", message="x"),
    ]


def test_every_command_survives_the_channel(tmp_path):
    codec = Codec()
    for command in commands(tmp_path):
        (body,) = split_frames(bytearray(codec.frame(command)))
        assert codec.command(body) == command


def test_every_event_survives_the_channel():
    codec = Codec()
    for event in events():
        (body,) = split_frames(bytearray(codec.frame(event)))
        assert codec.event(body) == event


def test_an_error_is_the_same_exception_on_the_other_side():
    error = from_info(ERROR)
    assert type(error) is InsufficientMemory
    assert (error.message, error.details) == ("it does not fit", {"device": "cuda:0", "short_bytes": 12})


def test_an_event_is_no_command():
    codec = Codec()
    (body,) = split_frames(bytearray(codec.frame(protocol.Hello(pid=1))))
    with pytest.raises(msgspec.ValidationError):
        codec.command(body)


@given(sizes=st.lists(st.integers(0, 300), max_size=8), cuts=st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_frames_come_out_whole_however_the_stream_is_cut(sizes, cuts):
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    buffer, taken, position, turn = bytearray(), [], 0, 0
    while position < len(stream):
        cut = cuts[turn % len(cuts)]
        buffer += stream[position : position + cut]
        taken += split_frames(buffer)
        position, turn = position + cut, turn + 1
    assert taken == bodies
    assert not buffer


def test_a_worker_gets_one_number_for_all_requests_of_a_client_and_not_its_name() -> None:
    mine, again, others = (make_request(client=name).for_backend() for name in ("192.0.2.7", "192.0.2.7", "key-b"))
    assert 0 < mine.client == again.client != others.client < 2**32
    assert b"192.0.2.7" not in msgspec.msgpack.encode(mine)


def test_a_request_without_a_client_has_none_in_its_message() -> None:
    assert b"client" not in msgspec.msgpack.encode(make_request().for_backend())
