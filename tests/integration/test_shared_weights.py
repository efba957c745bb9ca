"""Workers that compute on one CPU have one copy of their model's weights, however they come and go."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.backends.base import LoadProgress
from engine.backends.common.native_build import SWITCH
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.huge_pages import FileMapping
from engine.backends.torch.native.library import find_kernels
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights import model_loader
from engine.backends.torch.weights import shared as weight_file
from engine.backends.torch.weights.reader import WeightReader
from engine.backends.torch.weights.shared import SealedFile, UnsealedFile, folder_lock, weights_id
from engine.backends.torch.weights.store import OwnWeights, WeightStore
from engine.config import DtypeName, ModelSpec, SamplingParams
from engine.engine import Engine
from engine.errors import LoadCancelled
from tests.fakes.engines import all_ready, ask, config, read, row
from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sealed files of RAM are Linux's")

PROMPT = [3 + 7 * number for number in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", dtype="bfloat16", with_tokenizer=False)


def load(
    folder: Path,
    *,
    dtype: DtypeName = "bfloat16",
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> ModelRunner:
    spec = ModelSpec(path=folder, name="tiny", dtype=dtype, device="cpu")
    return ModelRunner.load(folder, spec, report=report, cancelled=cancelled)


def logits(runner: ModelRunner) -> torch.Tensor:
    runner.allocate_kv(8, 8, report=lambda progress: None)
    return runner.forward([ChunkInput(PROMPT, 0, [0, 1, 2], sample=True)])


def find(folder: Path, dtype: torch.dtype = torch.bfloat16) -> SealedFile | None:
    """The complete file of a tiny model, once nothing that was dropped is in memory any more."""
    gc.collect()
    native = find_kernels(dtype, torch.device("cpu")).library
    return SealedFile.find(weights_id([folder / "config.json", *folder.glob("*.safetensors")], dtype, native))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that are read from checkpoints meanwhile."""
    names: list[str] = []
    read, view = WeightReader.read, WeightReader.view

    def noted_read(self: WeightReader, *parts: str, device: torch.device) -> torch.Tensor:
        names.extend(parts)
        return read(self, *parts, device=device)

    def noted_view(self: WeightReader, *parts: str, device: torch.device) -> tuple[torch.Tensor, ...]:
        names.extend(parts)
        return view(self, *parts, device=device)

    monkeypatch.setattr(WeightReader, "read", noted_read)
    monkeypatch.setattr(WeightReader, "view", noted_view)
    return names


@contextmanager
def unshared(*_: object) -> Iterator[WeightStore]:
    yield OwnWeights()


@pytest.mark.parametrize(("dtype", "native"), [("bfloat16", "1"), ("bfloat16", "0"), ("float32", "1")])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_weights_compute_what_own_ones_do_to_the_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: list[str],
    architecture: str,
    tie: bool,
    dtype: DtypeName,
    native: str,
) -> None:
    monkeypatch.setenv(SWITCH, native)
    folder = make_tiny_model(
        tmp_path, architecture, tie=tie, hidden_size=256, intermediate_size=1088, with_tokenizer=False
    )
    first = load(folder, dtype=dtype)
    read_once = list(reads)
    second = load(folder, dtype=dtype)
    assert reads == read_once, "the second read again what the first had read"
    monkeypatch.setattr(model_loader, "weight_store", unshared)
    separate = load(folder, dtype=dtype)
    assert (separate.shared_bytes, first.shared_bytes) == (0, second.shared_bytes)
    assert second.shared_bytes >= second.weights_bytes == separate.weights_bytes
    assert torch.equal(logits(first), logits(separate))
    assert torch.equal(logits(second), logits(separate))


async def test_worker_processes_map_the_same_weights_and_answer_the_same(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    engine = Engine(config(worker_host="process", num_workers=2, max_prompts=1))
    await engine.start()
    try:
        await engine.load(ModelSpec(path=folder, name="tiny", threads=1, kv_cache_tokens=4096, dtype="float32"))
        await all_ready(engine)
        pids = [worker.pid for worker in engine.publish().workers]
        files = ({line for line in _maps(pid) if "/memfd:ericllm-" in line} for pid in pids)
        first, second = ({line for line in lines if "/memfd:ericllm-kv-" not in line} for lines in files)
        assert first
        assert first == second
        greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        streams = [engine.submit(ask("the same for both", params=greedy)) for _ in pids]
        assert len({row(engine, stream.request_id).worker for stream in streams}) == 2
        one, other = [await read(stream) for stream in streams]
        assert one.token_ids == other.token_ids
    finally:
        await engine.close(drain_s=0.0)


def test_the_memory_is_given_back_with_its_last_user(folder: Path) -> None:
    first, second = load(folder), load(folder)
    expected = logits(first)
    first.unload()
    third = load(folder)
    assert torch.equal(logits(second), expected)
    assert torch.equal(logits(third), expected)
    second.unload()
    assert find(folder) is not None
    third.unload()
    assert find(folder) is None
    assert not [line for line in _maps("self") if "/memfd:ericllm-" in line]


def test_large_pages_are_made_once_the_load_is_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(FileMapping, "enlarge_pages", lambda self, end: made.append(end))
    writer, reader = load(folder), load(folder)
    assert not made
    for runner in (writer, reader):
        runner.enlarge_pages()
        runner.enlarge_pages()
        assert made and all(size_bytes > 0 for size_bytes in made)
    assert len(made) == 2
    for runner in (writer, reader):
        runner.unload()


def test_another_dtype_and_changed_files_are_other_weights(folder: Path) -> None:
    bfloat16, float32 = load(folder), load(folder, dtype="float32")
    assert (bfloat16.dtype_name, float32.dtype_name) == ("bfloat16", "float32")
    expected = logits(bfloat16)
    make_tiny_model(folder, dtype="bfloat16", seed=1, with_tokenizer=False)
    assert not torch.equal(logits(load(folder)), expected)
    assert torch.equal(logits(bfloat16), expected), "rewriting the files changed what was loaded"


def test_files_that_were_changed_in_place_and_have_their_old_times_are_other_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    before, name = file.stat(), weights_id([file], torch.bfloat16)
    assert weights_id([file], torch.bfloat16) == name
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # a clock of some milliseconds
        file.write_bytes(b"WEIGHTS")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert weights_id([file], torch.bfloat16) != name


_DYING_WRITER = """
import signal, sys, torch
from pathlib import Path
from engine.backends.torch.weights.shared import weight_store
folder = Path(sys.argv[1])
files = [folder / "config.json", *folder.glob("*.safetensors")]
with weight_store(folder, files, torch.bfloat16, [torch.device("cpu")], print, lambda: False) as store:
    store.tensor("model.embed_tokens.weight", lambda lent: torch.zeros(4, 4))
    print("half done", flush=True)
    signal.pause()
"""


def test_a_writer_that_is_killed_half_way_leaves_the_writing_to_who_waits(folder: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", _DYING_WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half done\n"
        assert find(folder) is None, "unfinished weights can be found"
        polls, waits = iter(range(3)), threading.Event()

        def polled() -> bool:
            if next(polls, None) is None:
                waits.set()
            return False

        loaded: list[ModelRunner] = []
        waiting = threading.Thread(target=lambda: loaded.append(load(folder, cancelled=polled)))
        waiting.start()
        assert waits.wait(60), "nobody waited for the writer"
        assert not loaded
        writer.send_signal(signal.SIGKILL)
        waiting.join(60)
    finally:
        writer.kill()
        writer.communicate()
    assert loaded[0].shared_bytes > 0
    assert find(folder) is not None


def test_a_load_that_waits_for_another_one_can_be_cancelled(folder: Path) -> None:
    answers = iter([False, False])
    with folder_lock(folder, lambda: False), pytest.raises(LoadCancelled):
        load(folder, cancelled=lambda: next(answers, True))


def test_a_load_that_waits_for_another_one_reports_that_it_waits(folder: Path) -> None:
    seen: list[LoadProgress] = []
    polls = iter(range(4))
    with folder_lock(folder, lambda: False), pytest.raises(LoadCancelled):
        load(folder, report=seen.append, cancelled=lambda: next(polls, None) is None)
    assert [each.phase for each in seen].count("wait") > 2


def test_a_load_that_fails_publishes_nothing(folder: Path) -> None:
    seen: list[LoadProgress] = []
    with pytest.raises(LoadCancelled):
        load(folder, report=seen.append, cancelled=lambda: len(seen) > 6)
    assert find(folder) is None
    assert not [line for line in _maps("self") if "/memfd:ericllm-" in line]


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_weights_that_cannot_be_shared_are_the_workers_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails_at: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(model_loader, "weight_store", unshared)
        expected = logits(load(folder))
    append, reserve, calls = UnsealedFile.append, UnsealedFile.reserve, iter(range(fails_at))

    def fail_in_time() -> None:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, "no space left on device")

    def appended(self: UnsealedFile, piece: memoryview) -> tuple[memoryview, int, int]:
        fail_in_time()
        return append(self, piece)

    def reserved(self: UnsealedFile, size_bytes: int) -> tuple[memoryview, int, int]:
        fail_in_time()
        return reserve(self, size_bytes)

    monkeypatch.setattr(UnsealedFile, "append", appended)
    monkeypatch.setattr(UnsealedFile, "reserve", reserved)
    runner = load(folder)
    assert runner.shared_bytes == 0
    assert torch.equal(logits(runner), expected)
    assert "no space left" in caplog.text
    assert find(folder) is None
    assert not _lines_of(folder), "what is the worker's own lies in the checkpoint"


def test_packed_weights_that_cannot_be_mapped_are_packed_by_each_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr(weight_file, "can_deserialize", lambda dtype: False)
    first, second = load(folder), load(folder)
    assert 0 < second.shared_bytes == first.shared_bytes
    assert torch.equal(logits(first), logits(second))


@pytest.mark.parametrize("native", ["1", "0"])
def test_nothing_of_the_checkpoint_stays_mapped_and_nothing_shared_can_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, native: str
) -> None:
    monkeypatch.setenv(SWITCH, native)
    runner = load(folder)
    shared = [line for line in _maps("self") if "/memfd:ericllm-" in line]
    assert runner.shared_bytes > 0
    assert shared
    assert all(line.startswith("r--s") for line in shared)
    assert not _lines_of(folder)


def test_native_weights_are_packed_where_they_are_shared_and_not_copied_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_kernels(torch.bfloat16, torch.device("cpu")).library is None:
        pytest.skip("the native kernels do not run here")
    copied: list[int] = []
    packed: list[int] = []
    append, reserve = UnsealedFile.append, UnsealedFile.reserve

    def appended(self: UnsealedFile, piece: memoryview) -> tuple[memoryview, int, int]:
        copied.append(piece.nbytes)
        return append(self, piece)

    def reserved(self: UnsealedFile, size_bytes: int) -> tuple[memoryview, int, int]:
        packed.append(size_bytes)
        return reserve(self, size_bytes)

    monkeypatch.setattr(UnsealedFile, "append", appended)
    monkeypatch.setattr(UnsealedFile, "reserve", reserved)
    runner = load(folder)
    assert runner.linear.startswith("native")
    copied.pop()  # what lies where
    assert max(copied) == 2 * runner.config.vocab_size * runner.config.hidden_size
    assert len(packed) == 4 * runner.config.layers + 1
    assert sum(copied) + sum(packed) == runner.shared_bytes


def _lines_of(folder: Path) -> list[str]:
    """Of this process's maps, those of the checkpoint in `folder`."""
    gc.collect()
    return [line for line in _maps("self") if str(folder) in line]


def _maps(pid: object) -> list[str]:
    """Lines of /proc/PID/maps without the addresses: permissions, offset, device, inode, path."""
    return [line.partition(" ")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
