"""A worker whose model is split over two processes: to the token what one process answers, and none is left over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
import pytest

from engine.backends.base import BackendRequest, LoadProgress
from engine.backends.torch.backend import TorchBackend
from engine.config import AdapterSpec, DeviceShare, ModelSpec, SamplingParams
from engine.engine import Engine
from engine.errors import InsufficientMemory, InvalidRequest, LoadCancelled, WorkerFailed
from tests.fakes.adapters import make_adapter
from tests.fakes.engines import all_ready, config, read, until
from tests.fakes.engines import ask as ask_engine
from tests.fakes.families import make_family
from tests.fakes.held import Hold
from tests.fakes.tiny_models import make_tiny_model
from tests.integration.headless import Headless
from tests.integration.torch_backend.running import GREEDY, SEEDED, Run, ask, load_spec, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RESTART_S = 120.0
"""Patience with an answer that a worker begins and another, of two processes, ends."""


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    assert rank_pids() == []


def rank_pids(of: int | None = None) -> list[int]:
    """Processes of ranks below a process, by default this one."""
    found = []
    for child in psutil.Process(of).children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and any("rank_process" in part for part in child.cmdline()):
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def split(folder: Path, *, max_prompts: int = 4, ranks: int = 2, **spec: Any) -> TorchBackend:
    settings = {"name": "tiny", "dtype": "float32", "device": "cpu", "kv_cache_tokens": 1024} | spec
    backend = TorchBackend()
    load_spec(
        backend,
        ModelSpec(path=folder, tensor_parallel_size=ranks, **settings),  # type: ignore[arg-type]
        max_prompts=max_prompts,
        page_tokens=16,
    )
    return backend


def answers(backend: TorchBackend, *requests: BackendRequest, limit: int = 12) -> dict[str, list[int]]:
    return Run(backend, *requests, limit=limit).to_end()


def assert_same_answers(folder: Path, **spec: Any) -> None:
    requests = [ask("greedy", prompt(1, 40)), ask("seeded", prompt(2), SEEDED), ask("long", prompt(3, 100), SEEDED)]
    one, two = split(folder, ranks=1, **spec), split(folder, **spec)
    try:
        assert answers(two, *requests) == answers(one, *requests)
    finally:
        two.unload()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"])
def test_two_ranks_answer_as_one_process(tmp_path: Path, architecture: str) -> None:
    assert_same_answers(make_tiny_model(tmp_path, architecture))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi3"])
def test_two_ranks_answer_as_one_process_with_a_model_of_each_family(tmp_path: Path, family: str) -> None:
    assert_same_answers(make_family(tmp_path, family))


def test_drafts_from_n_grams_change_no_token_of_two_ranks(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    repeated = ask("again", prompt(1, 12) * 4)
    expected = answers(split(folder, ranks=1), repeated, limit=40)
    two = split(folder, ngram_draft=True, draft_tokens=4)
    try:
        assert answers(two, repeated, limit=40) == expected
        assert two.stats().draft_tokens > 0
    finally:
        two.unload()


def test_prompt_logprobs_and_vectors_are_computed_by_two_ranks_too(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    params = SamplingParams(temperature=0, prompt_logprobs=3, max_tokens=2)
    requests = [
        BackendRequest(id="logprobs", prompt_ids=prompt(1, 90), params=params),
        BackendRequest(id="vector", prompt_ids=prompt(2), params=SamplingParams(max_tokens=0), embed=True),
        BackendRequest(id="beside", prompt_ids=prompt(3), params=SamplingParams(temperature=0, max_tokens=6)),
    ]

    def outputs(backend: TorchBackend) -> tuple[dict[str, list[int]], list[float], list[float]]:
        """Tokens, log-probabilities of the first prompt, and the vector."""
        run, logprobs, vector = Run(backend, *requests), list[float](), b""
        while backend.has_work():
            for event in run.step():
                logprobs += [each.logprob for each in event.prompt_logprobs if each is not None]
                vector += event.vector
        return run.tokens, logprobs, np.frombuffer(vector, np.float32).tolist()

    one, two = split(folder, ranks=1), split(folder)
    try:
        expected, found = outputs(one), outputs(two)
        assert found[0] == expected[0]
        assert len(found[1]) == 89
        assert found[1] == pytest.approx(expected[1], abs=1e-4)
        assert len(found[2]) == 64
        assert found[2] == pytest.approx(expected[2], abs=1e-5)
    finally:
        two.unload()


def test_a_request_names_an_adapter_of_two_ranks(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    adapter = AdapterSpec(name="a", path=make_adapter(tmp_path / "adapter", folder, seed=1).folder)
    one, two = split(folder, ranks=1), split(folder)
    try:
        found = []
        for backend in (one, two):
            size = backend.attach(adapter)
            requests = [
                BackendRequest(id="with", prompt_ids=prompt(1), params=GREEDY, adapter="a"),
                BackendRequest(id="without", prompt_ids=prompt(1), params=GREEDY),
            ]
            run = Run(backend, *requests, limit=12)
            run.step()
            backend.detach("a")  # the request keeps it
            tokens = run.to_end()
            assert tokens["with"] != tokens["without"]
            with pytest.raises(InvalidRequest, match="no adapter a"):
                backend.submit(BackendRequest(id="late", prompt_ids=prompt(1), params=GREEDY, adapter="a"))
            backend.attach(adapter)
            again = answers(backend, BackendRequest(id="w", prompt_ids=prompt(1), params=GREEDY, adapter="a"), limit=12)
            assert again["w"] == tokens["with"]
            found.append((tokens, size > 0))
        assert found[0] == found[1]
    finally:
        two.unload()


def test_an_adapter_that_no_rank_can_read_is_refused_and_the_model_goes_on(tmp_path: Path) -> None:
    two = split(make_tiny_model(tmp_path / "model"))
    try:
        with pytest.raises(Exception, match="adapter"):
            two.attach(AdapterSpec(name="a", path=tmp_path / "none"))
        assert len(answers(two, ask("r", prompt(1)), limit=3)["r"]) == 3
    finally:
        two.unload()


def test_preempted_requests_of_two_ranks_answer_as_others(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    requests = [ask(f"r{number}", prompt(number, 30)) for number in range(4)]
    expected = answers(split(folder, ranks=1), *requests, limit=40)
    two = split(folder, kv_cache_tokens=160)
    try:
        assert answers(two, *requests, limit=40) == expected
        assert two.stats().preemptions > 0
    finally:
        two.unload()


def test_each_rank_has_a_simulated_device_of_its_own(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    shares = tuple(
        DeviceShare(device=f"sim:{number}", layers=2, ranks=2, weights_bytes=1 << 20, kv_bytes=1 << 24)
        for number in range(2)
    )
    two = TorchBackend()
    spec = ModelSpec(path=folder, name="tiny", dtype="float32", kv_cache_tokens=1024, tensor_parallel_size=2)
    try:
        model = load_spec(two, msgspec.structs.replace(spec, shares=shares))
        assert model.devices == ("sim:0", "sim:1")
        assert [(share.layers, share.ranks) for share in model.shares] == [(2, 2)] * 2
        assert model.weights_bytes == sum(share.weights_bytes for share in model.shares)
        assert model.kv_bytes == sum(share.kv_bytes for share in model.shares) > 0
    finally:
        two.unload()
    scarce = DeviceShare(device="sim:1", layers=2, ranks=2, weights_bytes=1000)
    small = msgspec.structs.replace(spec, shares=(shares[0], scarce))
    with pytest.raises(InsufficientMemory, match="sim:1"):
        load_spec(two, small)
    scarce = DeviceShare(device="sim:1", layers=2, ranks=2, weights_bytes=235_000, kv_bytes=263_000)
    with pytest.raises(WorkerFailed, match=r"rank 1 of 2 .*failed: a step needs 1 MiB of working memory on sim:1"):
        load_spec(two, msgspec.structs.replace(spec, shares=(shares[0], scarce)))


def test_a_killed_rank_ends_the_worker_with_its_name(tmp_path: Path) -> None:
    two = split(make_tiny_model(tmp_path))
    try:
        run = Run(two, ask("r", prompt(1)))
        run.step()
        (pid,) = rank_pids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=r"rank 1 of 2 \(tensor parallelism, cpu\) ended: SIGKILL"):
            for _ in range(100):
                run.step()
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            two.has_work()
    finally:
        two.unload()


def test_of_four_ranks_the_one_that_was_lost_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    expected = answers(split(folder, ranks=1), ask("r", prompt(1)), limit=6)
    four = split(folder, ranks=4)
    try:
        assert answers(four, ask("r", prompt(1)), limit=6) == expected
        run = Run(four, ask("again", prompt(2)))
        run.step()
        os.kill(rank_pids()[1], signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=r"rank 2 of 4 .*SIGKILL"):
            for _ in range(100):
                run.step()
    finally:
        four.unload()


def test_a_load_that_is_cancelled_leaves_no_rank(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    for phase in ("weights", "kv_cache", "warm_up"):
        seen = threading.Event()

        def report(progress: LoadProgress, phase: str = phase, seen: threading.Event = seen) -> None:
            if progress.phase == phase:
                seen.set()

        spec = ModelSpec(path=folder, name="tiny", dtype="float32", device="cpu", tensor_parallel_size=2)
        with pytest.raises(LoadCancelled):
            load_spec(TorchBackend(), spec, report=report, cancelled=seen.is_set)
        assert rank_pids() == []
    with pytest.raises(LoadCancelled):
        load_spec(TorchBackend(), spec, cancelled=lambda: True)
    assert rank_pids() == []


def test_a_model_that_ranks_cannot_share_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(InvalidRequest, match="tensor_parallel_size is 3"):
        split(make_tiny_model(tmp_path), ranks=3)


async def test_a_killed_rank_costs_a_restart_and_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hold = Hold(monkeypatch, tmp_path, "make_torch")
    folder = make_tiny_model(tmp_path / "model")
    engine = Engine(config(worker_host="process"))
    await engine.start()
    try:
        spec = ModelSpec(
            path=folder, name="tiny", threads=1, kv_cache_tokens=4096, dtype="float32", tensor_parallel_size=2
        )
        await engine.load(spec)
        await all_ready(engine)
        params = SamplingParams(max_tokens=30, temperature=1.3, top_p=0.9, ignore_eos=True, seed=2)
        undisturbed = await read(engine.submit(ask_engine("hello", params=params)))
        (worker,) = engine.publish().workers
        (pid,) = rank_pids(worker.pid)
        hold.begin()
        reading = asyncio.create_task(read(engine.submit(ask_engine("hello", params=params)), RESTART_S))
        await until(lambda: engine.publish().requests[0].output_tokens > 3)
        os.kill(pid, signal.SIGKILL)
        hold.end()
        assert (await reading).token_ids == undisturbed.token_ids
        await all_ready(engine)
        (worker,) = engine.publish().workers
        assert worker.restarts == 1
        assert worker.last_error is not None and "SIGKILL" in worker.last_error.message

        (pid,) = rank_pids(worker.pid)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        await until(lambda: engine.publish().workers[0].restarts == 2)
        await all_ready(engine)
        (pid,) = rank_pids(engine.publish().workers[0].pid)
        await engine.unload()
        await until(lambda: not psutil.pid_exists(pid))
    finally:
        await engine.close(drain_s=0.0)


async def test_a_rank_that_hangs_costs_a_restart_and_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hold = Hold(monkeypatch, tmp_path, "make_torch")
    folder = make_tiny_model(tmp_path / "model")
    engine = Engine(config(worker_host="process", hang_s=6.0))
    await engine.start()
    try:
        settings = {"threads": 1, "kv_cache_tokens": 4096, "dtype": "float32", "tensor_parallel_size": 2}
        await engine.load(ModelSpec(path=folder, name="tiny", **settings))  # type: ignore[arg-type]
        await all_ready(engine)
        params = SamplingParams(max_tokens=30, temperature=1.3, ignore_eos=True, seed=2)
        undisturbed = await read(engine.submit(ask_engine("hello", params=params)))
        (hung,) = rank_pids(engine.publish().workers[0].pid)
        hold.begin()
        reading = asyncio.create_task(read(engine.submit(ask_engine("hello", params=params)), RESTART_S))
        await until(lambda: engine.publish().requests[0].output_tokens > 3)
        os.kill(hung, signal.SIGSTOP)
        hold.end()
        assert (await reading).token_ids == undisturbed.token_ids
        assert engine.publish().workers[0].restarts == 1
        await until(lambda: not psutil.pid_exists(hung))
    finally:
        await engine.close(drain_s=0.0)


async def test_a_server_of_two_ranks_on_two_devices_answers_as_one_of_one_process(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    texts = []
    for number, more in enumerate(((), ("--tensor-parallel-size", "2", "--devices", "sim:1,1"))):
        flags = ("--headless", "--port", "0", "--model", str(folder), "--dtype", "float32", "--threads", "1")
        server = Headless(*flags, *more, home=tmp_path / str(number))
        try:
            address = server.wait_for(r"http://\S+:\d+").group()
            server.wait_for("ready")
            async with aiohttp.ClientSession() as session:
                bodies = [{"prompt": "the quick", "max_tokens": 20, "seed": 3, "temperature": t} for t in (0, 1.2)]
                posts = [session.post(f"{address}/v1/completions", json=body) for body in bodies]
                replies = [await (await post).json() for post in posts]
            texts.append([reply["choices"][0]["text"] for reply in replies])
        finally:
            server.end()
    assert texts[0] == texts[1]
