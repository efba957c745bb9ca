"""Progress at a readable pace, and the choice of a backend."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from engine.backends.base import LoadProgress
from engine.config import ModelSpec
from engine.errors import BackendUnavailable, first_line
from engine.system.install_command import install_extra
from engine.system.slow_disk import ProcessUsage, ReadWatch
from engine.worker_process.factory import create_backend, resolve_backend
from engine.worker_process.loading import ProgressThrottle, limit_torch_threads
from tests.fakes.model import fake_spec
from tests.fakes.model_folders import write_model


def test_progress_passes_ends_of_phases_always_and_the_rest_ten_times_a_second():
    sent: list[tuple[str, int]] = []
    now = [0.0]
    throttle = ProgressThrottle(lambda progress: sent.append((progress.phase, progress.done)), lambda: now[0])
    for done in range(5):
        throttle.report(LoadProgress(phase="weights", done=done, total=4))
        now[0] += 0.06
    throttle.report(LoadProgress(phase="kv_cache", done=0, total=2))
    throttle.report(LoadProgress(phase="kv_cache", done=1, total=2))
    throttle.report(LoadProgress(phase="kv_cache", done=2, total=2))
    assert sent == [("weights", 0), ("weights", 2), ("weights", 4), ("kv_cache", 0), ("kv_cache", 2)]


def test_progress_of_weights_has_the_rate_of_a_slow_disk_and_that_of_no_other_phase():
    sent: list[LoadProgress] = []
    now = [0.0]
    reads = ReadWatch(lambda: now[0], lambda: ProcessUsage(busy_s=0.0, waits=round(now[0])))
    throttle = ProgressThrottle(sent.append, lambda: now[0], reads)
    for second in range(13):
        now[0] = float(second)
        throttle.report(LoadProgress(phase="weights", done=second * 2**20, total=2**30))
    throttle.report(LoadProgress(phase="kv_cache", done=0, total=2))
    assert [each.slow_bytes_per_s for each in sent] == [None] * 10 + [2**20] * 3 + [None]


def test_a_reason_is_one_line():
    assert first_line(ValueError("one.\ntwo")) == "one"
    assert first_line(MemoryError()) == "MemoryError"


def test_torch_gets_the_thread_count_where_the_backend_brought_it_in(monkeypatch):
    counts: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=counts.append))
    limit_torch_threads(3)
    monkeypatch.delitem(sys.modules, "torch")
    limit_torch_threads(4)
    assert counts == [3]


LIBRARIES = pytest.mark.parametrize(
    ("backend", "method", "extra"), [("exllamav2", "exl2", "cuda"), ("exllamav3", "exl3", "exl3")]
)


@LIBRARIES
@pytest.mark.parametrize(
    ("installed", "gpus", "lack"), [(False, 1, "pip install"), (True, 0, "NVIDIA GPUs, and none was found")]
)
def test_a_library_is_refused_with_what_is_missing(
    tmp_path, monkeypatch, backend, method, extra, installed, gpus, lack
):
    machine(monkeypatch, installed=installed, gpus=gpus)
    with pytest.raises(BackendUnavailable, match=f"--backend {backend} cannot run here: .*{lack}") as caught:
        create_backend(fake_spec(tmp_path, backend=backend))
    assert caught.value.details["param"] == "backend"
    assert installed or f"`{install_extra(extra)}`" in caught.value.message


@LIBRARIES
def test_weights_go_to_their_library_where_it_can_run_and_to_torch_elsewhere(
    tmp_path, monkeypatch, backend, method, extra
):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method, "bits": 4.0}}))
    spec = ModelSpec(path=tmp_path, name="m")
    machine(monkeypatch, installed=True, gpus=1)
    assert resolve_backend(spec) == backend
    machine(monkeypatch, installed=True, gpus=0)
    assert resolve_backend(spec) == "torch"
    machine(monkeypatch, installed=False, gpus=1)
    assert resolve_backend(spec) == "torch"


GPTQ = {"quant_method": "gptq", "bits": 4}


def test_gptq_goes_to_exllamav2_where_it_can_run_and_to_torch_elsewhere(tmp_path, monkeypatch):
    for number, more in enumerate(({}, {"desc_act": True}, {"group_size": -1}, {"group_size": 32, "sym": False})):
        spec = ModelSpec(path=write_model(tmp_path / str(number), quantization_config=GPTQ | more), name="m")
        machine(monkeypatch, installed=True, gpus=1)
        assert resolve_backend(spec) == "exllamav2", more
        machine(monkeypatch, installed=True, gpus=0)
        assert resolve_backend(spec) == "torch"
        machine(monkeypatch, installed=False, gpus=1)
        assert resolve_backend(spec) == "torch"


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": GPTQ | {"bits": 8}},
        {"quantization_config": GPTQ | {"group_size": 16}},
        {"quantization_config": GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}},
        {"quantization_config": GPTQ | {"checkpoint_format": "marlin"}},
        {"quantization_config": GPTQ, "architectures": ["NewForCausalLM"]},
    ],
)
def test_gptq_that_exllamav2_does_not_read_goes_to_torch(tmp_path, monkeypatch, config):
    machine(monkeypatch, installed=True, gpus=1)
    assert resolve_backend(ModelSpec(path=write_model(tmp_path / "m", **config), name="m")) == "torch"


def test_plain_weights_go_to_torch_on_every_machine(tmp_path, monkeypatch):
    machine(monkeypatch, installed=True, gpus=1)
    assert resolve_backend(ModelSpec(path=tmp_path, name="m")) == "torch"


def test_without_torch_a_load_says_how_to_install_it(tmp_path, monkeypatch):
    machine(monkeypatch, installed=False, gpus=0)
    with pytest.raises(BackendUnavailable, match=r"^torch is not installed; `.*pip install torch` installs it"):
        create_backend(ModelSpec(path=tmp_path, name="m"))


def machine(monkeypatch, *, installed: bool, gpus: int) -> None:
    """A machine that has the libraries or not, and so many GPUs."""
    probe = SimpleNamespace(read=lambda: [f"cuda:{number}" for number in range(gpus)])
    monkeypatch.setattr("engine.devices.NvmlProbe", lambda: probe)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)


@pytest.mark.parametrize(
    "config",
    [
        *("", "[]", "{}", '{"quantization_config": null}', '{"quantization_config": []}'),
        '{"quantization_config": {"quant_method": 2}}',
    ],
)
def test_a_config_that_says_nothing_of_its_weights_goes_to_torch(tmp_path, monkeypatch, config):
    (tmp_path / "config.json").write_text(config)
    machine(monkeypatch, installed=True, gpus=1)
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert resolve_backend(ModelSpec(path=folder, name="m")) == "torch"
