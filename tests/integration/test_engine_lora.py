"""LoRA adapters through the whole engine, with real processes: they outlive the workers that have them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine.config import AdapterSpec, ModelSpec, SamplingParams
from engine.engine import Engine
from engine.errors import UnsupportedModel
from tests.fakes.adapters import make_adapter
from tests.fakes.engines import ask, config, read, until
from tests.fakes.held import Hold
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=100, temperature=1.1, top_p=0.9, ignore_eos=True, seed=2)


async def test_adapters_outlive_a_killed_worker_and_new_workers_have_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold = Hold(monkeypatch, tmp_path, "make_torch")
    folder = make_tiny_model(tmp_path / "model")
    names = ("", "one", "two")
    engine = Engine(config(worker_host="process"))
    await engine.start()
    try:
        await engine.load(ModelSpec(path=folder, name="tiny", threads=1, kv_cache_tokens=4096, dtype="float32"))
        for seed, name in enumerate(names[1:], start=1):
            adapter = make_adapter(tmp_path / name, folder, seed=seed)
            await engine.attach(AdapterSpec(name=name, path=adapter.folder))
        requests = [ask("the quick brown fox", params=PARAMS, adapter=name) for name in names]
        undisturbed = [await read(engine.submit(request)) for request in requests]
        assert len({answer.text for answer in undisturbed}) == len(names)

        hold.begin()
        reading = [asyncio.create_task(read(engine.submit(request))) for request in requests]
        await until(lambda: sum(row.state == "decode" for row in engine.publish().requests) == len(requests))
        pid = engine.publish().workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        hold.end()
        disturbed = await asyncio.gather(*reading)
        assert engine.publish().totals.requeued == len(requests)
        assert [answer.token_ids for answer in disturbed] == [answer.token_ids for answer in undisturbed]

        await engine.reconfigure(num_workers=2)
        await until(lambda: [each.state for each in engine.publish().workers] == ["ready", "ready"])
        together = await asyncio.gather(*(read(engine.submit(request)) for request in [*requests, *requests]))
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in undisturbed] * 2

        misfit = make_adapter(tmp_path / "misfit", make_tiny_model(tmp_path / "other", hidden_size=128))
        with pytest.raises(UnsupportedModel, match="this model's is 64 x 128"):
            await engine.attach(AdapterSpec(name="misfit", path=misfit.folder))
    finally:
        await engine.close(drain_s=0.0)


async def test_an_answer_ends_with_the_adapter_it_began_with_or_says_why_it_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold = Hold(monkeypatch, tmp_path, "make_torch")
    folder = make_tiny_model(tmp_path / "model")
    engine = Engine(config(worker_host="process"))
    await engine.start()
    try:
        await engine.load(ModelSpec(path=folder, name="tiny", threads=1, kv_cache_tokens=4096, dtype="float32"))
        request = ask("the quick brown fox jumps over the lazy dog", params=PARAMS, adapter="it")
        answers = {}
        for seed in (1, 2):
            adapter = make_adapter(tmp_path / f"v{seed}", folder, seed=seed)
            await engine.attach(AdapterSpec(name="it", path=adapter.folder))
            answers[seed] = await read(engine.submit(request))
        assert answers[1].token_ids != answers[2].token_ids

        for seed, overwritten in ((1, False), (2, True)):
            await engine.attach(AdapterSpec(name="it", path=tmp_path / f"v{seed}"))
            hold.begin()
            reading = asyncio.create_task(read(engine.submit(request)))
            await until(lambda: [row.state for row in engine.publish().requests if not row.finish] == ["decode"])
            if overwritten:
                make_adapter(tmp_path / f"v{seed}", folder, seed=5)
            await engine.attach(AdapterSpec(name="it", path=tmp_path / "v2"))
            pid = engine.publish().workers[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            hold.end()
            answer = await reading
            if overwritten:
                assert answer.deltas[-1].error is not None
                assert "the files in" in answer.deltas[-1].error.message
                assert answer.token_ids == answers[seed].token_ids[: len(answer.token_ids)]
            else:
                assert answer.token_ids == answers[seed].token_ids
        again = [await read(engine.submit(request)) for _ in range(2)]
        assert again[0].token_ids == again[1].token_ids
        assert again[1].deltas[-1].cached_tokens > 0
    finally:
        await engine.close(drain_s=0.0)
