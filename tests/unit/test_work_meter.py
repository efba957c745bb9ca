"""What models ask of their devices, against hand-computed numbers, and what devices can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.backends.base import BackendStats, LoadedModel, SequenceStats
from engine.config import DeviceShare
from engine.devices import cpu_limits
from engine.devices.cpu_limits import LimitsFile, measure_cpu
from engine.devices.nvml import nvidia_limits
from engine.doctor.inspection import ProbeFailed
from engine.errors import EngineError
from engine.metrics.insight import WorkerCounters, WorkMeter
from engine.snapshot import DeviceLimits, DeviceReading, DeviceWork

GIB = 2**30
LIMITS = DeviceLimits(flops_16bit_per_s=1e14, flops_32bit_per_s=1e13, bytes_per_s=1e12)


def model(**changes: object) -> LoadedModel:
    """A billion parameters in two bytes each, and 64 KiB of KV per token."""
    values: dict[str, object] = {
        "backend": "torch",
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "devices": ("cuda:0",),
        "vocab_size": 1000,
        "max_model_len": 4096,
        "kv_tokens": 1000,
        "page_tokens": 16,
        "weights_bytes": 2_000_000_000,
        "kv_bytes": 65_536_000,
        "parameters": 1_000_000_000,
    }
    return LoadedModel(**(values | changes))  # type: ignore[arg-type]


def gpu(number: int = 0, limits: DeviceLimits | None = LIMITS) -> DeviceReading:
    return DeviceReading(
        id=f"cuda:{number}", name="", kind="cuda", utilisation=None, total_bytes=GIB, free_bytes=GIB, limits=limits
    )


def worked(
    *devices: DeviceReading, of: LoadedModel | None = None, tokens: int = 0, **stats: object
) -> list[DeviceWork]:
    """A worker that did 50 steps in two seconds, with `tokens` prompt tokens, and generates 100 tokens a second."""
    meter, held = WorkMeter(), of or model()
    meter.read(10.0, [WorkerCounters("w0", held, BackendStats(), 0.0)], devices)
    now = BackendStats(steps=50, prompt_tokens_computed=tokens, **stats)  # type: ignore[arg-type]
    return list(meter.read(12.0, [WorkerCounters("w0", held, now, 100.0)], devices))


def test_operations_are_two_per_parameter_and_token_prompts_included() -> None:
    (work,) = worked(gpu(), tokens=1800)
    assert work.flops_per_s == pytest.approx(2 * 1e9 * (900 + 100))
    assert work.flops_limit_per_s == 1e14


def test_a_step_reads_all_weights_and_the_kv_of_its_requests() -> None:
    sequences = tuple(SequenceStats(request_id=str(each), computed_tokens=200, known_tokens=201) for each in range(3))
    (work,) = worked(gpu(), sequences=sequences)
    assert work.bytes_per_s == pytest.approx(25 * (2e9 + 600 * 65_536))
    assert work.bytes_limit_per_s == 1e12


def test_guesses_that_did_not_hold_were_computed_too() -> None:
    (work,) = worked(gpu(), draft_tokens=80, draft_accepted=60)
    assert work.flops_per_s == pytest.approx(2e9 * (10 + 100))


def test_a_mixture_of_experts_computes_with_some_of_its_parameters_and_reads_what_its_requests_touch() -> None:
    (work,) = worked(gpu(), of=model(active_parameters=250_000_000), decoding=2)
    assert work.flops_per_s == pytest.approx(2 * 0.25e9 * 100)
    assert work.bytes_per_s == pytest.approx(25 * 2e9 * 0.5)
    (crowded,) = worked(gpu(), of=model(active_parameters=250_000_000), decoding=9)
    assert crowded.bytes_per_s == pytest.approx(25 * 2e9)


def test_a_model_over_two_devices_is_divided_as_its_weights_are() -> None:
    shares = (DeviceShare(device="cuda:0", weights_bytes=3 * GIB), DeviceShare(device="cuda:1", weights_bytes=GIB))
    first, second = worked(gpu(0), gpu(1, None), of=model(shares=shares, devices=("cuda:0", "cuda:1")))
    assert first.flops_per_s == pytest.approx(3 * second.flops_per_s)
    assert first.flops_per_s + second.flops_per_s == pytest.approx(2e9 * 100)
    assert (second.flops_limit_per_s, second.bytes_limit_per_s) == (None, None)


def test_a_device_without_a_worker_is_not_told_of() -> None:
    assert [work.device for work in worked(gpu(0), gpu(1))] == ["cuda:0"]


def test_float32_is_held_against_what_the_device_does_in_float32() -> None:
    (work,) = worked(gpu(), of=model(dtype="float32"))
    assert work.flops_limit_per_s == 1e13


def test_a_worker_that_does_nothing_asks_for_nothing() -> None:
    meter, idle = WorkMeter(), WorkerCounters("w0", model(), BackendStats(steps=50), 0.0)
    for second in range(10):
        (work,) = meter.read(float(second), [idle], [gpu()])
    assert (work.flops_per_s, work.bytes_per_s) == (0.0, 0.0)


def test_a_worker_that_was_started_again_counts_from_there() -> None:
    meter = WorkMeter()
    for second, steps in ((0.0, 5000), (1.0, 10), (2.0, 30)):
        (work,) = meter.read(second, [WorkerCounters("w0", model(), BackendStats(steps=steps), 40.0)], [gpu()])
    assert work.bytes_per_s == pytest.approx(20 * 2e9)


def test_what_was_done_long_ago_does_not_count() -> None:
    meter = WorkMeter()
    for second in range(20):
        steps = min(second, 10) * 100
        (work,) = meter.read(float(second), [WorkerCounters("w0", model(), BackendStats(steps=steps), 0.0)], [gpu()])
    assert work.bytes_per_s == 0.0


# --- limits -----------------------------------------------------------------------------------------------------------


def limits(**changes: object) -> DeviceLimits:
    values: dict[str, object] = {"geforce": False} | changes
    found = nvidia_limits(**values)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("facts", "tflops", "gb_per_s"),
    [
        ({"capability": (9, 0), "cores": 16896, "clock_mhz": 1830, "memory_bits": 5120, "memory_mhz": 2619}, 989, 3352),
        ({"capability": (8, 0), "cores": 6912, "clock_mhz": 1410, "memory_bits": 5120, "memory_mhz": 1215}, 312, 1555),
        ({"capability": (7, 5), "cores": 2560, "clock_mhz": 1590, "memory_bits": 256, "memory_mhz": 5001}, 65, 320),
        ({"capability": (7, 0), "cores": 5120, "clock_mhz": 1530, "memory_bits": 4096, "memory_mhz": 877}, 125, 898),
        (
            {"capability": (8, 6), "cores": 10496, "clock_mhz": 1695, "memory_bits": 384, "memory_mhz": 9751}
            | {"geforce": True},
            71,
            936,
        ),
        (
            {"capability": (8, 9), "cores": 16384, "clock_mhz": 2520, "memory_bits": 384, "memory_mhz": 10501}
            | {"geforce": True},
            165,
            1008,
        ),
    ],
    ids=["H100 SXM", "A100 40 GB", "T4", "V100", "RTX 3090", "RTX 4090"],
)
def test_limits_are_those_of_the_data_sheets(facts: dict[str, object], tflops: float, gb_per_s: float) -> None:
    found = limits(**facts)
    assert found.flops_16bit_per_s is not None
    assert found.bytes_per_s is not None
    assert found.flops_16bit_per_s / 1e12 == pytest.approx(tflops, rel=0.01)
    assert found.bytes_per_s / 1e9 == pytest.approx(gb_per_s, rel=0.01)


def test_a_card_that_is_not_in_the_table_has_no_flops_and_what_a_driver_does_not_tell_is_unknown() -> None:
    facts: dict[str, object] = {"cores": 100, "clock_mhz": 1000, "memory_bits": 64, "memory_mhz": 1000}
    unknown = limits(capability=(42, 0), **facts)
    assert (unknown.flops_16bit_per_s, unknown.flops_32bit_per_s, unknown.bytes_per_s) == (None, None, 16e9)
    nothing = {"capability": None, "cores": None, "clock_mhz": None, "memory_bits": None, "memory_mhz": None}
    assert nvidia_limits(geforce=False, **nothing) is None  # type: ignore[arg-type]


def test_measured_limits_are_kept_for_this_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LimitsFile(tmp_path).write(LIMITS)
    assert LimitsFile(tmp_path).read() == LIMITS
    monkeypatch.setattr(cpu_limits, "cpu_name", lambda: "Another processor")
    assert LimitsFile(tmp_path).read() is None


@pytest.mark.parametrize("torn", [b"", b"{", b'{"x": 3}', b"\xff"])
def test_limits_that_cannot_be_read_are_measured_anew(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "limits.json").write_bytes(torn)
    assert LimitsFile(tmp_path).read() is None
    LimitsFile(tmp_path).write(LIMITS)
    assert LimitsFile(tmp_path).read() == LIMITS


def test_a_processor_that_cannot_be_measured_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object, **named: object) -> None:
        raise ProbeFailed("it exits with code 1: torch is not installed")

    monkeypatch.setattr(cpu_limits, "ask", failing)
    with pytest.raises(EngineError, match="CPU peak could not be measured: it exits with code 1: torch"):
        measure_cpu()


def test_a_child_measures_products_of_matrices_and_reading(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    torch = pytest.importorskip("torch")
    from engine.devices import measure

    threads = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as small:
            small.setattr(measure, "_SIDE", 64)
            small.setattr(measure, "_READ_BYTES", 1 << 20)
            measure.main(1)
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capfdbinary.readouterr().out)
    assert set(found) == set(DeviceLimits.__struct_fields__)
    assert all(value > 1e6 for value in found.values())
