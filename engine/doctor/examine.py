"""From facts to a report. Pure: every machine can be a test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.backends.common.native_kernels import Native, instruction_set
from engine.backends.exllamav2.errors import VERSION
from engine.backends.paged_attention.choose import AttentionFacts, obstacle
from engine.config import BackendKind
from engine.doctor.facts import Cpu, Driver, Facts, Gpu, Package
from engine.doctor.install import MINIMUM_DRIVER, driver_command, system_command, torch_command, version_numbers
from engine.doctor.kernels import exllama_findings, join_names, kernels_in_place, other_release, toolchain_lacks
from engine.doctor.report import Finding, Report, State
from engine.system.install_command import install_extra, pip_install

# Findings about the machine, its GPUs and torch. Pure.

_INSTRUCTION_SETS = (
    ("AMX-BF16", "amx_bf16"),
    ("AVX512-BF16", "avx512_bf16"),
    ("AVX-512", "avx512f"),
    ("AVX2", "avx2"),
    ("BF16", "bf16"),
    ("SVE", "sve"),
    ("NEON", "asimd"),
)
_SLOW = "torch computes several times slower on a processor without AVX2; use a newer one or a GPU."
_HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU; show them again with `unset CUDA_VISIBLE_DEVICES`."
_GIB = 1024**3


def machine_findings(facts: Facts) -> Iterator[Finding]:
    """Python, processor, RAM."""
    cpu = facts.cpu
    yield Finding("Machine", "Python", "ok", ".".join(map(str, facts.python)))
    yield Finding("Machine", "CPU", "ok", cpu.name or facts.machine)
    sets = [name for name, flag in _INSTRUCTION_SETS if flag in cpu.flags]
    slow = facts.machine == "x86_64" and bool(cpu.flags) and "avx2" not in cpu.flags
    yield Finding(
        "Machine", "Instructions", "note" if slow else "ok", ", ".join(sets) or "plain", _SLOW if slow else ""
    )
    yield Finding("Machine", "RAM", "ok", _of_gib(cpu.ram_free_bytes, cpu.ram_total_bytes))


def gpu_findings(facts: Facts) -> Iterator[Finding]:
    """The driver and each GPU."""
    yield driver_finding(facts)
    for index, gpu in enumerate(facts.gpus):
        yield _gpu_finding(index, gpu, facts)


def driver_finding(facts: Facts) -> Finding:
    """The driver, and what to do about each of its ways to be missing."""
    driver = facts.driver
    if driver.state == "ok":
        value = f"{driver.version}, runs CUDA up to {driver.cuda}" if driver.cuda else driver.version
        state: State = "note" if driver.hidden else "ok"
        return Finding("GPU", "NVIDIA driver", state, value, _HIDDEN if driver.hidden else "")
    if driver.state == "absent" and not driver.card:
        return Finding("GPU", "NVIDIA driver", "note", "none, and no NVIDIA card: models run on the CPU")
    return Finding("GPU", "NVIDIA driver", *_without_driver(facts))


def _without_driver(facts: Facts) -> tuple[State, str, str]:
    """State, value and advice where there is a card, or a driver that does not work."""
    driver = facts.driver
    if driver.state == "absent" and driver.container:
        return "missing", "none in this container", "Give the container the GPUs: `docker run --gpus all ...`."
    if driver.state == "absent":
        return "missing", "none", f"Install NVIDIA's driver: {driver_command(facts.package_manager)}, then reboot."
    if driver.state == "not loaded":
        return "broken", "installed, but not loaded", "Load it with `sudo modprobe nvidia`, or reboot."
    if driver.state == "mismatched":
        return "broken", "its library is newer than the one loaded", "Load the new driver: `sudo reboot`."
    return "broken", driver.detail or "it does not answer", "See what the driver says: `sudo dmesg | grep -i nvrm`."


def torch_findings(facts: Facts, *, wanted: bool) -> Iterator[Finding]:
    """torch, and whether it uses the GPUs that are there. wanted: whether it should be one for CUDA."""
    torch = facts.torch
    if not torch.installed:
        yield Finding("torch", "torch", "missing", "not installed", f"Install it: `{pip_install('torch')}`.")
        return
    if torch.error:
        advice = f"Install it anew: `{pip_install('--force-reinstall', 'torch')}`."
        yield Finding("torch", "torch", "broken", f"{torch.version} cannot be imported: {torch.error}".lstrip(), advice)
        return
    if not torch.cuda:
        advice = f"Install torch for CUDA: {torch_command(force=True)}." if wanted else ""
        yield Finding("torch", "torch", "missing" if wanted else "ok", f"{torch.version}, a build for CPUs", advice)
        return
    yield Finding("torch", "torch", "ok", f"{torch.version}, built for CUDA {torch.cuda}")
    if facts.gpus:
        yield use_of_gpus(facts)


def use_of_gpus(facts: Facts) -> Finding:
    """Whether torch sees the GPUs, and why not."""
    torch = facts.torch
    why = why_no_gpu_is_seen(facts)
    if why:
        return Finding("torch", "GPUs", "broken", why, _visibility_advice(facts))
    strangers = [index for index, gpu in enumerate(facts.gpus) if not has_kernels(gpu, torch.architectures)]
    if strangers:
        names = ", ".join(f"GPU{index} ({facts.gpus[index].name})" for index in strangers)
        advice = f"Take a torch that was built for it: {torch_command(force=True)}."
        return Finding("torch", "GPUs", "broken", f"no kernels for {names}", advice)
    return Finding("torch", "GPUs", "ok", f"sees {torch.gpus} of {len(facts.gpus)}")


def why_no_gpu_is_seen(facts: Facts) -> str:
    """Why torch sees no GPU, as a clause; "" where it sees some."""
    torch = facts.torch
    if torch.gpus:
        return ""
    if not torch.cuda:
        return "it is a build for CPUs"
    if driver_too_old(facts.driver, torch.cuda):
        return f"torch needs CUDA {torch.cuda}, and driver {facts.driver.version} runs CUDA {facts.driver.cuda} at most"
    return f"torch sees none of them: {torch.gpu_error or 'it does not say why'}"


def driver_too_old(driver: Driver, cuda: str) -> bool:
    """Whether the driver's CUDA is of an older major version than `cuda`: newer minors of one major run."""
    return bool(driver.cuda) and version_numbers(driver.cuda)[:1] < version_numbers(cuda)[:1]


def _visibility_advice(facts: Facts) -> str:
    """The sentence that makes torch see the GPUs."""
    torch = facts.torch
    if driver_too_old(facts.driver, torch.cuda):
        first = MINIMUM_DRIVER.get(version_numbers(torch.cuda)[0])
        to = f" to {first} or later" if first else ""
        renew = f"Renew the driver{to}: {driver_command(facts.package_manager)}"
        return f"{renew}, or take a torch for this one: {torch_command(force=True)}."
    return "Ask torch itself: `python -c 'import torch; torch.cuda.init()'`."


def has_kernels(gpu: Gpu, architectures: tuple[str, ...]) -> bool:
    """Whether code built for `architectures` runs on `gpu`: a binary on the same major and a minor as high, PTX on
    anything newer (CUDA C++ Programming Guide, compatibility). True where either is not known."""
    if gpu.capability is None or not architectures:
        return True
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        if not number.isdecimal():  # sm_90a: that GPU alone
            number = number.rstrip("abcdefghijklmnopqrstuvwxyz")
            if number and (int(number) // 10, int(number) % 10) == gpu.capability:
                return True
            continue
        built = (int(number) // 10, int(number) % 10)
        if built <= gpu.capability and (kind == "compute" or built[0] == gpu.capability[0]):
            return True
    return False


def _gpu_finding(index: int, gpu: Gpu, facts: Facts) -> Finding:
    capability = "" if gpu.capability is None else ", capability {}.{}".format(*gpu.capability)
    value = f"{gpu.name}{capability}, {_of_gib(gpu.free_bytes, gpu.total_bytes)}"
    return Finding("GPU", f"GPU{index}", "ok", value)


def _of_gib(free: int, total: int) -> str:
    return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"


# What multiplies by a model's weights on the CPU: our own kernels, or torch's. Pure.

_NATIVE_AREA, _NATIVE_NAME = "torch", "linear layers"


def native_finding(facts: Facts) -> Finding:
    """The kernels that a model in bfloat16 would use on this CPU, and what they lack; to lack them is no fault."""
    native, kernels = facts.native, instruction_set(facts.machine, facts.cpu.flags)
    if not kernels:
        return Finding(_NATIVE_AREA, _NATIVE_NAME, "ok", "torch's own kernels: ours need AVX2 on x86-64 Linux")
    if native.off:
        advice = "Use them again: `unset ERICLLM_NATIVE`."
        return Finding(_NATIVE_AREA, _NATIVE_NAME, "note", "torch's own kernels: ERICLLM_NATIVE keeps ours off", advice)
    if kernels in native.kept:
        return Finding(_NATIVE_AREA, _NATIVE_NAME, "ok", f"native {kernels} kernels for bfloat16, compiled")
    if native.compiler and native.folder_problem:
        value = f"torch's own kernels: ours cannot be kept, as {native.folder_problem}"
        return Finding(_NATIVE_AREA, _NATIVE_NAME, "note", value, "Name a folder that can be written in ERICLLM_HOME.")
    if native.compiler:
        value = f"native {kernels} kernels for bfloat16, which the first load compiles with {native.compiler}"
        return Finding(_NATIVE_AREA, _NATIVE_NAME, "ok", value)
    advice = f"To compute faster on the CPU, install one: {system_command(facts.package_manager, 'compiler')}."
    return Finding(
        _NATIVE_AREA, _NATIVE_NAME, "note", "torch's own kernels: there is no C++ compiler to make ours with", advice
    )


def native_attention_problem(machine: str, cpu: Cpu, native: Native) -> str:
    """Why native attention would not compute on this CPU, as a clause; "" where it would."""
    kernels = instruction_set(machine, cpu.flags)
    if not kernels:
        return "the native kernels need AVX2 on x86-64 Linux"
    if native.off:
        return "ERICLLM_NATIVE keeps the native kernels off"
    if kernels in native.kept:
        return ""
    if native.compiler:
        return native.folder_problem
    return "there is no C++ compiler to make the native kernels with"


# Findings about attention: flash-attn, Triton, and which paged attention computes on the GPUs. Pure.

UNKNOWN_FLASH_ATTN = (2, 5, 7)
"""What a flash-attn that does not say its version is taken for: the oldest that has pages."""

_ATTENTION_AREA = "Attention"
_BUILT_IN_KERNELS = "our own paged attention takes its place"


def attention_findings(facts: Facts) -> Iterator[Finding]:
    """The optional libraries, and what is in use."""
    yield flash_attn_finding(facts)
    if facts.gpus:
        yield _triton_finding(facts.triton)
    yield attention_in_use(facts)


def flash_attn_finding(facts: Facts) -> Finding:
    """flash-attn; to lack it is nothing to mend."""
    flash = facts.flash_attn
    if not flash.installed:
        return Finding(_ATTENTION_AREA, "flash-attn", "note", f"not installed, and not needed: {_BUILT_IN_KERNELS}")
    if flash.error:
        advice = "Remove it, or install one that was built for this torch: `pip uninstall flash-attn`."
        value = f"{flash.version} cannot be imported: {flash.error}".lstrip()
        return Finding(_ATTENTION_AREA, "flash-attn", "broken", value, advice)
    version = flash.version or "installed"
    unfit = flash_attn_unfit(facts)
    return Finding(
        _ATTENTION_AREA,
        "flash-attn",
        "note" if unfit else "ok",
        f"{version}; {unfit}, so {_BUILT_IN_KERNELS}" if unfit else version,
    )


def flash_attn_unfit(facts: Facts) -> str:
    """Why flash-attn that can be imported is not used here, as a clause; "" where it is."""
    capabilities = [gpu.capability for gpu in facts.gpus if gpu.capability is not None]
    return obstacle(
        "flash",
        AttentionFacts(
            capability=min(capabilities, default=None),
            torch=version_numbers(facts.torch.version),
            flash=version_numbers(facts.flash_attn.version) or UNKNOWN_FLASH_ATTN,
        ),
    )


def attention_in_use(facts: Facts) -> Finding:
    """The paged attention that computes."""
    attention = facts.attention
    if attention.error:
        return Finding(_ATTENTION_AREA, "in use", "broken", attention.error)
    return Finding(_ATTENTION_AREA, "in use", "ok", f"{attention.name}: {attention.reason}")


def _triton_finding(triton: Package) -> Finding:
    if not triton.installed:
        return Finding(_ATTENTION_AREA, "Triton", "missing", "not installed", f"Install it: `{pip_install('triton')}`.")
    if triton.error:
        advice = f"Install it anew: `{pip_install('--force-reinstall', 'triton')}`."
        return Finding(
            _ATTENTION_AREA, "Triton", "broken", f"{triton.version} cannot be imported: {triton.error}", advice
        )
    return Finding(_ATTENTION_AREA, "Triton", "ok", triton.version)


def examine(facts: Facts, backend: BackendKind) -> Report:
    """What `facts` mean on a machine where `backend` was chosen."""
    wanted = backend == "exllamav2" or bool(facts.gpus) or facts.driver.card
    lacks: dict[BackendKind, str] = {"torch": torch_lacks(facts), "exllamav2": exllama_lacks(facts)}
    findings = (
        *machine_findings(facts),
        *gpu_findings(facts),
        *torch_findings(facts, wanted=wanted),
        native_finding(facts),
        *exllama_findings(facts, wanted=wanted),
        *attention_findings(facts),
        _ray_finding(facts),
        *_backend_findings(facts, lacks, backend),
    )
    return Report(findings=findings, lacks=lacks, backend=backend)


def torch_lacks(facts: Facts) -> str:
    """Why the torch backend could not run, as a clause; "" where it could."""
    return _torch_lacks(facts) or facts.attention.error


def exllama_lacks(facts: Facts) -> str:
    """Why the exllamav2 backend could not run: the first of what it lacks, as a clause; "" where it could."""
    looked_at = (_torch_lacks, _gpu_lacks, _package_lacks, _kernels_lack)
    return next(filter(None, (lacks(facts) for lacks in looked_at)), facts.attention.error)


def _torch_lacks(facts: Facts) -> str:
    if not facts.torch.installed:
        return "torch is not installed"
    return f"torch cannot be imported: {facts.torch.error}" if facts.torch.error else ""


def _package_lacks(facts: Facts) -> str:
    exllama = facts.exllama
    if not exllama.installed:
        return "the package exllamav2 is not installed"
    if exllama.missing_modules:
        return f"exllamav2 imports {join_names(exllama.missing_modules)}, which is not installed"
    if other_release(exllama.version):
        return f"exllamav2 {exllama.version} is installed, and the backend is written for {VERSION}"
    return f"exllamav2 cannot be imported: {exllama.error}" if exllama.error else ""


def _gpu_lacks(facts: Facts) -> str:
    if not facts.gpus:
        return "it computes on NVIDIA GPUs, and none was found"
    if why := why_no_gpu_is_seen(facts):
        return f"torch does not use the GPUs ({why})"
    if not any(has_kernels(gpu, facts.torch.architectures) for gpu in facts.gpus):
        return f"torch has no kernels for {facts.gpus[0].name}"
    return ""


def _kernels_lack(facts: Facts) -> str:
    exllama = facts.exllama
    if exllama.kernels_error:
        return f"its kernels cannot be loaded: {exllama.kernels_error}"
    if kernels_in_place(facts):
        return ""
    lacking = toolchain_lacks(facts)
    return f"its kernels are not compiled, and compiling them lacks {join_names(lacking)}" if lacking else ""


def _backend_findings(facts: Facts, lacks: Mapping[BackendKind, str], chosen: BackendKind) -> Iterator[Finding]:
    gpus = facts.torch.gpus
    place = f"on {gpus} GPUs" if gpus > 1 else "on the GPU" if gpus else "on the CPU"
    for backend, lack in lacks.items():
        mark = "chosen, " if backend == chosen else ""
        if lack:
            yield Finding("Backends", backend, "missing" if mark else "note", f"{mark}cannot run: {lack}")
        else:
            yield Finding("Backends", backend, "ok", f"{mark}can run {place}")


def _ray_finding(facts: Facts) -> Finding:
    if facts.ray.installed:
        return Finding("Cluster", "ray", "ok", facts.ray.version)
    advice = f"For workers on several machines, install it: `{install_extra('ray')}`."
    return Finding("Cluster", "ray", "note", "not installed, and not needed on one machine", advice)
