"""The whole engine over the ExLlamaV2 backend, whose library is a fake: text, stops, cancels and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from torch import Tensor

from console.api.metrics import models_of, vllm_families
from engine.config import SamplingParams
from engine.engine import Engine, RequestStream
from engine.errors import InvalidRequest
from tests.fakes.backend import Gate
from tests.fakes.engines import StillProbe, all_ready, ask, config, read, until
from tests.fakes.exllama import FakeExllama
from tests.fakes.exllama_generator import foretell, hash_logits
from tests.fakes.model import EOS_ID, VOCAB_SIZE, fake_spec


def greedy(max_tokens: int = 40, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def text_of(prompt: str, count: int) -> str:
    return bytes(foretell(list(prompt.encode()), count, VOCAB_SIZE)).decode()


async def failure(stream: RequestStream) -> str:
    last = (await read(stream)).last
    assert last.error is not None
    assert (last.finish, last.error.code) == ("error", "worker_failed")
    return last.error.message


class Paced(FakeExllama):
    """Fakes whose every token waits at a gate, which is open while the model loads."""

    def __init__(self, **options: object) -> None:
        super().__init__(logits=self._logits, **options)  # type: ignore[arg-type]
        self.gate = Gate()
        self.loading = True

    def _logits(self, ids: Sequence[int], vocab_size: int) -> Tensor:
        if not self.loading:
            self.gate.enter()
        return hash_logits(ids, vocab_size)


@asynccontextmanager
async def serving(folder: Path, fakes: FakeExllama, **settings: object) -> AsyncIterator[Engine]:
    engine = Engine(config(**settings), backend_factory=lambda spec: fakes.backend(), probe=StillProbe())
    await engine.start()
    try:
        await engine.load(fake_spec(folder))
        await all_ready(engine)
        yield engine
    finally:
        if isinstance(fakes, Paced):
            fakes.gate.open()
        await engine.close(drain_s=0.0)


@pytest.mark.parametrize("draft_tokens", [0, 3])
async def test_sixteen_streams_at_once_get_the_models_text(tmp_path: Path, draft_tokens: int) -> None:
    fakes = FakeExllama(draft_tokens=draft_tokens)
    async with serving(tmp_path, fakes, max_prompts=8) as engine:
        prompts = [f"stream number {number} " * (1 + number) for number in range(16)]
        answers = await asyncio.gather(*(read(engine.submit(ask(prompt, params=greedy()))) for prompt in prompts))
        assert [answer.text for answer in answers] == [text_of(prompt, 40) for prompt in prompts]
        assert {answer.last.finish for answer in answers} == {"length"}
        await until(lambda: engine.publish().totals.finished == {"length": 16})
    assert fakes.freed == 1


async def test_metrics_tell_of_guesses_by_model_and_by_position(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeExllama(draft_tokens=3)) as engine:
        await asyncio.gather(*(read(engine.submit(ask(f"number {n}", params=greedy()))) for n in range(4)))
        (usage,) = engine.usage()
        families = {family.name: family for family in vllm_families(models_of(engine.publish()), [usage])}
    assert usage.drafts is not None
    assert 0 < usage.drafts <= usage.draft_tokens
    assert 0 < usage.draft_accepted == sum(usage.held_by_position) <= usage.draft_tokens
    told = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [sample.value for sample in told] == list(usage.held_by_position)
    assert [sample.labels["position"] for sample in told] == [str(n) for n in range(len(told))]
    assert {sample.labels["model_name"] for sample in told} == {"fake"}


async def test_a_stop_string_ends_the_answer_and_frees_its_pages(tmp_path: Path) -> None:
    fakes = FakeExllama(draft_tokens=3)
    async with serving(tmp_path, fakes) as engine:
        whole = text_of("hello", 40)
        answer = await read(engine.submit(ask("hello", params=greedy(stop=(whole[10:13],)))))
        assert answer.text == whole[: whole.index(whole[10:13])]
        assert answer.last.finish == "stop"
        await until(lambda: not fakes.generators[-1].referenced_pages)


async def test_an_end_token_ends_the_answer_and_is_held_back_before_min_tokens(tmp_path: Path) -> None:
    params = greedy(logit_bias={EOS_ID: 100.0}, min_tokens=5)
    async with serving(tmp_path, FakeExllama()) as engine:
        answer = await read(engine.submit(ask("hello", params=params)))
        assert (len(answer.token_ids), answer.token_ids[-1], answer.last.finish) == (6, EOS_ID, "stop")
        assert EOS_ID not in answer.token_ids[:-1]


async def test_a_cancelled_stream_gives_its_pages_back_and_the_others_go_on(tmp_path: Path) -> None:
    fakes = Paced()
    async with serving(tmp_path, fakes) as engine:
        fakes.loading = False
        stays, goes = (engine.submit(ask(prompt, params=greedy())) for prompt in ("stays", "goes"))
        await asyncio.to_thread(fakes.gate.wait_until_reached)
        goes.cancel()
        fakes.gate.open()
        assert (await read(stays)).text == text_of("stays", 40)
        await until(lambda: not fakes.generators[-1].referenced_pages)


async def test_a_failing_iteration_fails_who_was_in_it_and_the_worker_goes_on(tmp_path: Path) -> None:
    fakes = Paced()
    async with serving(tmp_path, fakes, max_prompts=1) as engine:
        fakes.loading = False
        first, second = (engine.submit(ask(prompt, params=greedy())) for prompt in ("first", "second"))
        await asyncio.to_thread(fakes.gate.wait_until_reached)
        fakes.faults.add("iterate", RuntimeError("a kernel failed"))
        fakes.gate.open()
        assert "a kernel failed" in await failure(first)
        assert (await read(second)).text == text_of("second", 40)
        assert [worker.state for worker in engine.publish().workers] == ["ready"]
        assert engine.publish().workers[0].restarts == 0


@pytest.mark.parametrize(
    ("step", "generator"),
    [
        ("CUDA error: an illegal memory access was encountered", ""),
        ("broken", "no memory for its buffers"),
        ("broken", "CUDA error: unspecified launch failure"),
    ],
    ids=["a lost device", "no new generator", "a device lost while mending"],
)
async def test_a_worker_that_cannot_go_on_costs_no_answer(tmp_path: Path, step: str, generator: str) -> None:
    fakes = Paced()
    async with serving(tmp_path, fakes, max_prompts=2) as engine:
        fakes.loading = False
        prompts = [f"stream {number}" for number in range(6)]
        reading = [asyncio.create_task(read(engine.submit(ask(prompt, params=greedy())))) for prompt in prompts]
        await asyncio.to_thread(fakes.gate.wait_until_reached)
        fakes.faults.add("iterate", RuntimeError(step))
        if generator:
            fakes.faults.add("make_generator", RuntimeError(generator))
        fakes.gate.open()
        answers = await asyncio.gather(*reading)
        assert [answer.text for answer in answers] == [text_of(prompt, 40) for prompt in prompts]
        assert engine.publish().workers[0].restarts == 1
        assert fakes.freed == 1


async def test_what_its_generator_cannot_tell_of_prompts_is_refused_with_the_backends_name(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeExllama()) as engine:
        with pytest.raises(InvalidRequest, match="prompt_logprobs is not supported by the exllamav2 backend"):
            engine.submit(ask("a prompt", params=greedy(prompt_logprobs=1)))
        with pytest.raises(InvalidRequest, match="embeddings are not supported by the exllamav2 backend"):
            engine.submit(ask("a prompt", embed=True))


async def test_no_tokens_asked_for_ends_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeExllama()) as engine:
        last = (await read(engine.submit(ask("a prompt", params=greedy(0))))).last
        assert (last.finish, last.output_tokens) == ("length", 0)
