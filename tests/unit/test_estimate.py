"""What a load would take, before it is tried: the numbers, and `ericllm estimate` as a shell sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from console.cli.main import main
from console.runtime.estimate import as_text, estimate_for
from console.settings.schema import Settings
from console.text import device_label
from engine.backends.torch.runner import ModelRunner
from engine.config import BackendKind, ModelSpec
from engine.devices import HostProbe, simulated_readings
from engine.errors import InvalidRequest, UnsupportedModel
from engine.models.inspect import Part
from engine.models.resolve import resolve
from engine.placement.estimate import Estimate, estimate
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import Correction, Workload
from engine.snapshot import DeviceReading
from tests.fakes.gguf_headers import field
from tests.fakes.gguf_headers import model as gguf
from tests.fakes.hostile_folders import FOLDERS
from tests.fakes.model_folders import write_model
from tests.fakes.quantised_folders import Method, make_twins
from tests.unit.test_cli import ericllm

pytestmark = pytest.mark.long

MIB = 2**20
DEMO = resolve("demo", ())


def estimated(
    *gib: float,
    workers: int = 1,
    max_prompts: int = 16,
    others_bytes: int = 0,
    problem: str = "",
    cores: int = 0,
    **settings: Any,
) -> Estimate:
    spec = ModelSpec(path=DEMO, name="demo", backend="torch", **settings)
    devices: list[DeviceReading] = [
        msgspec.structs.replace(device, free_bytes=device.free_bytes - others_bytes)
        for device in simulated_readings(gib)
    ]
    return estimate(
        read_facts(spec),
        devices,
        spec,
        workers=workers,
        workload=Workload(max_prompts=max_prompts),
        problem=problem,
        cores=cores,
    )


def test_more_workers_than_cores_that_compute_for_them_are_warned_of() -> None:
    said = "3 workers share 2 CPU cores and slow each other down."
    assert (estimated(24, 24, workers=3, cores=2).warning, estimated(24, 24, workers=2, cores=2).warning) == (said, "")
    assert estimated(24, workers=3, cores=0).warning == ""
    assert said in as_text(estimated(24, 24, workers=3, cores=2))


def quantised_warning(backend: BackendKind, max_prompts: int, *, bits: float = 3.0) -> str:
    """The warning of a model whose two layers have 2**30 weights of these bits."""
    layer = Part(elements=2**29, packed_bytes=int(bits * 2**26))
    facts = read_facts(ModelSpec(path=DEMO, name="demo", backend="torch"))
    parts = msgspec.structs.replace(facts.parts, layers=(layer, layer))
    facts = msgspec.structs.replace(facts, backend=backend, parts=parts)
    spec = ModelSpec(path=DEMO, name="demo", backend=backend, dtype="float16")
    workload = Workload(max_prompts=max_prompts)
    return estimate(facts, simulated_readings((24,)), spec, workers=1, workload=workload).warning


def test_more_requests_than_exllamav2_multiplies_packed_weights_for_are_warned_of() -> None:
    assert quantised_warning("exllamav2", 33) == (
        "max_prompts is 33: a step of more than 32 requests unpacks all weights to 16 bits on exllamav2, 4.0 GiB of "
        "memory traffic more."
    )
    assert quantised_warning("exllamav2", 32) == quantised_warning("exllamav3", 33) == ""
    assert quantised_warning("exllamav2", 33, bits=16) == ""


@pytest.mark.parametrize(
    ("method", "kind", "factor"),
    [
        ("exl2", "cuda", "2.8"),
        ("gptq", "simulated", "3.1"),
        ("gptq", "cuda", ""),
        ("awq", "cuda", ""),
        ("fp8", "cuda", "2.0"),  # in blocks that the kernels do not take
    ],
)
def test_quantised_folders_that_cuda_computes_from_codes_are_not_warned_of(
    tmp_path: Path, method: Method, kind: Literal["cuda", "simulated"], factor: str
) -> None:
    folder = make_twins(tmp_path, method, num_hidden_layers=1, with_tokenizer=False).quantised
    spec = ModelSpec(path=folder, name="m", backend="torch", dtype="float16")
    name = "cuda:0" if kind == "cuda" else "sim:0"
    devices = [msgspec.structs.replace(each, id=name, kind=kind) for each in simulated_readings((24,))]
    found = estimate(read_facts(spec), devices, spec, workers=1, workload=Workload())
    said = f"Quantised layers are decoded at load: {factor} times the memory of their files."
    assert found.warning == (said if factor else "")
    assert (said in as_text(found)) == bool(factor)


def test_quantised_weights_that_torch_decodes_are_warned_of() -> None:
    said = "Quantised layers are decoded at load: 5.3 times the memory of their files."
    assert (quantised_warning("torch", 8), quantised_warning("torch", 8, bits=16)) == (said, "")


def test_what_a_device_holds_kept_free_and_left_sums_to_its_total() -> None:
    for device in estimated(1, 2, workers=3, others_bytes=100 * MIB).devices:
        assert device.others_bytes == 100 * MIB
        parts = (device.weights_bytes, device.kv_bytes, device.working_bytes, device.others_bytes)
        assert sum(parts) + device.headroom_bytes + device.free_bytes == device.total_bytes


def test_the_verdict_says_how_many_tokens_each_worker_holds() -> None:
    found = estimated(24, 24, workers=3)
    assert found.verdict == "Fits: 3 workers, KV cache for 32,768 tokens each."
    assert (found.fits, found.can_load, found.simulated) == (True, True, True)
    assert sum(share.layers for share in found.placements[0].shares) == 6


def test_what_does_not_fit_says_what_each_device_lacks() -> None:
    found = estimated(0.1, 0.08, workers=2)
    assert not found.can_load
    assert found.verdict.startswith("Does not fit: SIM")
    lacking = [device for device in found.devices if device.short_bytes]
    assert lacking
    assert [f"{device_label(device)}: needed" in found.verdict for device in found.devices] == [
        device in lacking for device in found.devices
    ]


def test_memory_that_others_hold_counts() -> None:
    assert estimated(0.25).fits
    assert not estimated(0.25, others_bytes=200 * MIB).fits


def test_simulated_devices_hold_no_more_workers_than_the_machine_that_computes_for_them() -> None:
    spec = ModelSpec(path=DEMO, name="demo", backend="torch")
    host = DeviceReading(id="cpu", name="", kind="cpu", utilisation=None, total_bytes=4096 * MIB, free_bytes=4096 * MIB)
    devices = (*simulated_readings((24, 24)), host)
    few, many = (estimate(read_facts(spec), devices, spec, workers=workers, workload=Workload()) for workers in (3, 64))
    assert (few.fits, many.fits) == (True, False)
    assert many.verdict.startswith("Does not fit in host RAM, which simulated devices use: CPU: needed ")
    assert [device.id for device in many.devices] == ["sim:0", "sim:1", "cpu"]


def test_a_problem_beyond_memory_is_the_verdict() -> None:
    found = estimated(24, problem="it has three heads")
    assert (found.fits, found.can_load) == (True, False)
    assert found.verdict == "Cannot be loaded: it has three heads"


def test_what_earlier_loads_taught_is_counted_and_said() -> None:
    spec = ModelSpec(path=DEMO, name="demo", backend="torch")
    learned = Correction(weights_factor=2.0, working_bytes=MIB, loads=3)
    before, after = (
        estimate(read_facts(spec), simulated_readings((24,)), spec, workers=1, workload=Workload(), correct=correct)
        for correct in (lambda identity: Correction(), lambda identity: learned)
    )
    assert after.learned == learned
    assert after.devices[0].weights_bytes == 2 * before.devices[0].weights_bytes
    assert after.devices[0].working_bytes == before.devices[0].working_bytes + MIB


def test_each_of_two_ranks_takes_half_of_a_model() -> None:
    whole, split = estimated(24, 24), estimated(24, 24, tensor_parallel_size=2)
    norms = split.weights_bytes - whole.weights_bytes
    assert 0 < norms < whole.weights_bytes / 100
    assert [device.weights_bytes for device in split.devices[:2]] == [split.weights_bytes // 2] * 2
    assert split.kv_token_bytes == whole.kv_token_bytes
    assert [(share.device, share.layers, share.ranks) for share in split.placements[0].shares] == [
        ("sim:0", 6, 2),
        ("sim:1", 6, 2),
    ]
    with pytest.raises(InvalidRequest, match="tensor_parallel_size is 2; that takes 2 GPUs of one machine"):
        estimated(24, tensor_parallel_size=2)


# -- the command -------------------------------------------------------------------------------------------------------


def run(*argv: str, state: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return ericllm("estimate", *argv, XDG_STATE_HOME=str(state), ERICLLM_CONFIG="", HF_HUB_OFFLINE="1", **env)


def test_the_command_prints_a_table_a_line_per_worker_and_a_verdict(tmp_path: Path) -> None:
    result = run("demo", "--workers", "3", "--devices", "sim:1,1", "--gpu_balance", state=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "demo: torch, " + lines[0].split(", ")[1] + ", context 2,048 tokens, 3 workers × 16 max prompts"
    assert [line.split()[0] for line in lines[3:6]] == ["device", "sim:0", "sim:1"]
    assert "w2  3 layers on sim:0 + 3 layers on sim:1, KV cache for 32,768 tokens" in lines
    assert "The devices are simulated: workers compute on the CPU." in lines
    assert lines[-1] == "Fits: 3 workers, KV cache for 32,768 tokens each."


def test_the_command_says_which_part_of_each_layer_a_device_has(tmp_path: Path) -> None:
    result = run("demo", "--tensor-parallel-size", "2", "--devices", "sim:1,1", state=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "6 layers (1/2 of each) on sim:0 + 6 layers (1/2 of each) on sim:1, KV cache for" in result.stdout


def test_the_exit_code_is_1_where_it_does_not_fit_or_cannot_be_loaded(tmp_path: Path) -> None:
    result = run("demo", "--devices", "sim:0.05", state=tmp_path)
    assert (result.returncode, "short by" in result.stdout) == (1, True)
    odd = write_model(tmp_path / "odd", architectures=["OddForCausalLM"])
    result = run(str(odd), "--devices", "sim:8", state=tmp_path)
    assert result.returncode == 1
    said = " ".join(result.stdout.split())
    assert "Cannot be loaded: unsupported architecture: OddForCausalLM" in said


@pytest.mark.parametrize("flag", ["--max_prompts", "--max-prompts"])
def test_json_is_for_programs_and_flags_have_their_twins(tmp_path: Path, flag: str) -> None:
    result = run("demo", flag, "4", "--max_model_len=512", "--devices=sim:2", "--json", state=tmp_path)
    found = json.loads(result.stdout)
    assert (found["can_load"], found["max_prompts"], found["context_tokens"]) == (True, 4, 512)
    assert found["placements"][0]["kv_tokens"] == 4 * 512


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("nosuch",), "no model is called nosuch"),
        (("some/model",), "some/model is not on this machine; 'ericllm --model some/model' downloads it"),
        (("/",), "/ has no config.json"),
        (("demo", "--devices", "sim:x"), "is not a number of GiB"),
        (("demo", "--devices", "sim:1", "--gpu_split", "1,1"), "gpu_split names 2 GPUs; this machine has 1: sim:0"),
        (("demo", "--workers", "0"), "num_workers"),
        (("demo", "--no-such-flag"), "there is no --no-such-flag"),
    ],
)
def test_what_cannot_be_estimated_is_one_line_and_exit_code_2(
    tmp_path: Path, argv: tuple[str, ...], message: str
) -> None:
    result = run(*argv, state=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_every_hostile_folder_is_told_of_in_a_line_and_never_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (name, (spoil, _)) in enumerate(FOLDERS.items()):
        folder = write_model(tmp_path / f"hostile{number}")
        spoil(folder)
        assert main(["estimate", str(folder), "--devices", "sim:8"]) in (1, 2), name
        said = capsys.readouterr()
        assert "Traceback" not in said.err, name
        assert "annot be loaded: " in said.out or said.err.count("\n") == 1, name


def test_weights_in_fewer_bits_of_float16_are_refused_as_the_load_refuses_them(tmp_path: Path) -> None:
    settings = Settings(model="demo", weights="int4", dtype="float16")
    devices = [device for device in HostProbe().read() if device.kind == "cpu"]
    found = estimate_for(settings, devices)
    spec = ModelSpec(path=DEMO, name="demo", backend="torch", weights="int4", dtype="float16")
    with pytest.raises(InvalidRequest) as refused:
        ModelRunner.load(DEMO, spec, report=lambda progress: None, cancelled=lambda: False)
    assert not found.can_load
    assert found.verdict == f"Cannot be loaded: {refused.value.message}"


def test_a_gguf_file_without_a_tokenizer_or_with_an_odd_number_cannot_be_loaded_and_the_estimate_says_why(
    tmp_path: Path,
) -> None:
    file = tmp_path / "model.gguf"
    for content, why in (
        (gguf(without=("tokenizer.ggml.tokens",)), "model.gguf has no tokenizer: it lacks tokenizer.ggml.tokens"),
        (gguf(without=("tokenizer.ggml.merges",)), "model.gguf has no tokenizer.ggml.merges for its tokenizer"),
    ):
        file.write_bytes(content)
        found = estimate_for(Settings(model=str(file)), simulated_readings((24,)))
        assert (found.can_load, found.verdict) == (False, f"Cannot be loaded: {why}")
    file.write_bytes(gguf(field("llama.attention.head_count", 0)))
    with pytest.raises(UnsupportedModel, match=r"model\.gguf has llama\.attention\.head_count = 0; it must be"):
        estimate_for(Settings(model=str(file)), simulated_readings((24,)))


@pytest.mark.parametrize(("backend", "library_prompts", "prompts"), [("torch", 32, 64), ("exllamav2", 32, 32)])
def test_an_estimate_has_the_max_prompts_that_a_load_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: BackendKind, library_prompts: int, prompts: int
) -> None:
    monkeypatch.setattr("engine.devices._torch_has_cuda", lambda: True)
    gpu = DeviceReading(id="cuda:0", name="GPU", kind="cuda", utilisation=None, total_bytes=8 << 30, free_bytes=8 << 30)
    settings = Settings(model=str(write_model(tmp_path)), backend=backend, max_prompts=64)
    assert estimate_for(settings, [gpu], library_prompts=library_prompts).max_prompts == prompts
    assert estimate_for(settings, [gpu]).max_prompts == 64
    small = msgspec.structs.replace(gpu, free_bytes=1 << 20)  # which is too little for either
    assert estimate_for(settings, [small], library_prompts=library_prompts).max_prompts == 32


def test_nothing_heavy_is_imported_for_it() -> None:
    script = (
        "import sys; from console.cli.main import main; main(['estimate', 'demo', '--json', '--devices', 'sim:1']); "
        "heavy = {'torch', 'exllamav2', 'textual', 'aiohttp', 'tokenizers', 'transformers', 'numpy'}; "
        "heavy &= set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
