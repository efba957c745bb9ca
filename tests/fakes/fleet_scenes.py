"""Snapshots of more than one card and one model: simulated devices, workers that died, models side by side, nodes.

Like `scenes`, functions of fixed numbers alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.backends.base import BackendStats, KvTierStats, LoadedModel, LoadProgress
from engine.config import DeviceShare, ModelSpec
from engine.errors import ErrorInfo
from engine.snapshot import AdapterReading, DeviceReading, ModelReading, ModelStatus, ProcessMemory, Snapshot
from tests.fakes.scenes import GIB, MIB, busy, gpu, history, loaded_model, ready_status, requests, spec, worker

LAST_LINES = (
    "Fatal Python error: Segmentation fault",
    "Current thread 0x00007f3a (most recent call first):",
    '  File "engine/backends/torch/runner.py", line 118 in forward',
)


def sim(index: int, **changes: Any) -> DeviceReading:
    """A simulated card of 24 GiB with one worker on it."""
    values: dict[str, Any] = {
        "id": f"sim:{index}",
        "name": "Simulated 24 GiB",
        "kind": "simulated",
        "utilisation": 0.71,
        "total_bytes": 24 * GIB,
        "weights_bytes": int(9.4 * GIB),
        "kv_bytes": int(6.1 * GIB),
        "work_bytes": int(1.2 * GIB),
        "free_bytes": 24 * GIB - int(9.4 * GIB) - int(6.1 * GIB) - int(1.2 * GIB),
    }
    return DeviceReading(**(values | changes))


def share(device: str, *, layers: int = 32, scale: float = 1.0, kv_gib: float = 6.1) -> DeviceShare:
    """What a worker takes of one device; scale: of its weights."""
    return DeviceShare(
        device=device,
        layers=layers,
        weights_bytes=int(9.4 * scale * GIB),
        kv_bytes=int(kv_gib * GIB),
        working_bytes=int(1.2 * GIB),
    )


def crash(worker_id: str) -> ErrorInfo:
    """What is said of a worker that the kernel killed."""
    sentence = f"worker {worker_id} was killed by SIGKILL (probably out of memory): {LAST_LINES[0]}"
    return ErrorInfo(code="worker_failed", message=sentence, details={"worker": worker_id, "signal": "SIGKILL"})


def left_dead(worker_id: str) -> ErrorInfo:
    """What is said of one that died five times in a row."""
    sentence = (
        f"worker {worker_id} crashed 5 times in a row; not restarted. Last error: worker {worker_id} exited with "
        f"code 139: {LAST_LINES[0]}"
    )
    return ErrorInfo(
        code="worker_failed", message=sentence, details={"worker": worker_id, "deaths": 5, "code": 139, "signal": ""}
    )


def tiered() -> BackendStats:
    """The stats of a worker at work whose KV pages go on to a tier that is filling and to one with room."""
    tiers = (
        KvTierStats(name="host", used_bytes=int(5.6 * GIB), limit_bytes=8 * GIB, restored_pages=1234),
        KvTierStats(name="disk", used_bytes=int(7.1 * GIB), limit_bytes=40 * GIB, restored_pages=96),
    )
    return msgspec.structs.replace(worker(0).stats, kv_tiers=tiers)


def simulated(**changes: Any) -> Snapshot:
    """Two simulated cards, three workers: one at work on both, one that comes back, one left dead."""
    split = (share("sim:0", layers=16, scale=0.5, kv_gib=3.0), share("sim:1", layers=16, scale=0.5, kv_gib=3.0))
    used = (share("sim:0", layers=16, scale=0.48, kv_gib=3.0), share("sim:1", layers=16, scale=0.55, kv_gib=3.0))
    values: dict[str, Any] = {
        "devices": (sim(0), sim(1, utilisation=0.35)),
        "workers": (
            worker(
                0,
                model="NeuralHermes-7B",
                devices=("sim:0", "sim:1"),
                planned=split,
                used=used,
                stats=tiered(),
                step_s=0.031,
                last_step_age_s=0.02,
            ),
            _restarting(),
            _dead(),
        ),
        "target_workers": 3,
        "models": (_reading(planned=split, used=used, target_workers=3),),
    }
    return busy(**(values | changes))


def _restarting() -> Any:
    return worker(
        1,
        model="NeuralHermes-7B",
        state="restarting",
        devices=("sim:0",),
        pid=None,
        active=0,
        tokens_per_s=0.0,
        stats=BackendStats(),
        planned=(share("sim:0"),),
        restarts=2,
        deaths_in_a_row=2,
        retry_in_s=3.4,
        last_error=crash("w1"),
        log_tail=LAST_LINES,
    )


def _dead() -> Any:
    return worker(
        2,
        model="NeuralHermes-7B",
        state="failed",
        devices=("sim:1",),
        pid=None,
        active=0,
        tokens_per_s=0.0,
        stats=BackendStats(),
        planned=(share("sim:1"),),
        restarts=4,
        deaths_in_a_row=5,
        last_error=left_dead("w2"),
        log_tail=LAST_LINES,
    )


def _reading(**changes: Any) -> ModelReading:
    values: dict[str, Any] = {
        "key": "NeuralHermes-7B#1",
        "name": "NeuralHermes-7B",
        "status": ready_status(),
        "target_workers": 2,
        "max_prompts": 8,
        "queued": 3,
        "running": 14,
        "idle_unload_s": 600.0,
        "planned": (share("cuda:0"),),
        "used": (share("cuda:0", scale=0.96),),
    }
    return ModelReading(**(values | changes))


def small_model(**changes: Any) -> LoadedModel:
    """The demo model on the CPU."""
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "devices": ("cpu",),
        "max_model_len": 1024,
        "kv_tokens": 16_384,
        "weights_bytes": 17 * MIB,
        "kv_bytes": 96 * MIB,
        "parameters": 8_400_000,
    }
    return loaded_model(**(values | changes))


def demo_reading(**changes: Any) -> ModelReading:
    """The demo model, ready beside the first one."""
    values: dict[str, Any] = {
        "key": "demo#2",
        "name": "demo",
        "status": ModelStatus(
            state="ready", spec=ModelSpec(path=Path("/opt/ericllm/demo"), name="demo"), model=small_model()
        ),
        "target_workers": 1,
        "max_prompts": 16,
    }
    return ModelReading(**(values | changes))


def two_models(**changes: Any) -> Snapshot:
    """A 7B model with an adapter and one that could not be taken, and the demo model beside it."""
    adapters = (
        AdapterReading(name="sql", path=Path("/adapters/sql"), workers=2, size_bytes=31 * MIB),
        AdapterReading(
            name="french",
            path=Path("/adapters/french"),
            error=ErrorInfo(code="invalid_request", message="its rank is 256; the model takes up to 64"),
        ),
    )
    values: dict[str, Any] = {
        "models": (_reading(adapters=adapters), demo_reading()),
        "workers": (
            worker(
                0,
                model="NeuralHermes-7B",
                planned=(share("cuda:0"),),
                used=(share("cuda:0", scale=0.96),),
                stats=tiered(),
            ),
            worker(1, model="NeuralHermes-7B", active=5, planned=(share("cuda:1"),), used=(share("cuda:1"),)),
            worker(2, model="demo", devices=("cpu",), active=2, max_prompts=16, tokens_per_s=88.0),
        ),
        "devices": (
            gpu(0, others=(ProcessMemory(pid=2211, name="/usr/lib/xorg/Xorg", used_bytes=int(1.5 * GIB)),)),
            gpu(1),
        ),
        "requests": requests(),
    }
    return busy(**(values | changes))


def second_loading() -> Snapshot:
    """The first model serves while the second loads."""
    progress = LoadProgress(phase="weights", done=6 * MIB, total=17 * MIB)
    spec_ = ModelSpec(path=Path("/opt/ericllm/demo"), name="demo")
    status = ModelStatus(state="loading", spec=spec_, progress=progress)
    return two_models(models=(_reading(), demo_reading(status=status)))


def one_idle() -> Snapshot:
    """One model that gave its memory back for want of requests."""
    status = ModelStatus(state="idle", spec=spec(), model=loaded_model())
    reading = _reading(status=status, queued=0, running=0)
    return busy(status=status, models=(reading,), workers=(), requests=(), queued=0, running=0, marks=())


def eight_simulated() -> Snapshot:
    """Eight simulated cards, a worker on each."""
    return busy(
        devices=tuple(sim(index, utilisation=0.3 + 0.08 * index) for index in range(8)),
        workers=tuple(worker(index, devices=(f"sim:{index}",), active=index) for index in range(8)),
        target_workers=8,
        history=history(devices=8),
    )


def two_nodes() -> Snapshot:
    """This machine and another one, a worker on each."""
    far = gpu(0, id="node2/cuda:0", node="node2", utilisation=0.4)
    return busy(
        devices=(gpu(0), far),
        workers=(worker(0), worker(1, devices=("node2/cuda:0",), node="node2")),
    )


def memory_ran_out() -> Snapshot:
    """A worker that found out that 11 prompts are all its memory allows, and another one on its way."""
    stats = BackendStats(decoding=6, pages_total=4096, pages_free=1065, prompts_limit=11)
    starting = worker(
        1,
        state="loading",
        active=0,
        stats=BackendStats(),
        progress=LoadProgress(phase="weights", done=int(3.1 * GIB), total=int(9.4 * GIB)),
    )
    return busy(workers=(worker(0, max_prompts=16, stats=stats), starting), max_prompts=16)
