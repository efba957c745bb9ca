"""Machines as facts: one for each way in which an install goes well or wrong."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.backends.common.native_kernels import Native
from engine.backends.exllamav2.doctor import Exllama
from engine.backends.exllamav3.doctor import Exllama3
from engine.backends.paged_attention.doctor import Attention
from engine.doctor.facts import Cpu, Driver, Facts, Gpu, Package, Toolchain, Torch

GIB = 1024**3
KEPT = "/home/op/.cache/ericllm/kernels/exllamav20.3.2-torch2.9.1/exllamav2_ext/exllamav2_ext.so"

H100 = Gpu(name="NVIDIA H100 80GB HBM3", capability=(9, 0), total_bytes=80 * GIB, free_bytes=79 * GIB)
RTX_2080_TI = Gpu(name="NVIDIA GeForce RTX 2080 Ti", capability=(7, 5), total_bytes=11 * GIB, free_bytes=10 * GIB)

WITHOUT_GPU = Facts(
    python=(3, 11, 9),
    machine="x86_64",
    kernel_cache="/home/op/.cache/ericllm/kernels",
    site_packages="/venv/lib/python3.11/site-packages",
    package_manager="apt",
    cpu=Cpu(
        name="AMD EPYC 9334, 16 cores",
        cores=16,
        flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
        ram_total_bytes=128 * GIB,
        ram_free_bytes=100 * GIB,
    ),
    torch=Torch(installed=True, version="2.13.0+cpu"),
)

TOOLS = Toolchain(
    nvcc="/usr/local/cuda/bin/nvcc",
    nvcc_version="12.8",
    compiler="/usr/bin/c++",
    compiler_version="g++ 12.2.0",
    ninja="/usr/bin/ninja",
    python_headers=True,
)

BACKENDS: dict[str, type[msgspec.Struct]] = {
    "exllama": Exllama,
    "exllama3": Exllama3,
    "attention": Attention,
    "native": Native,
}


def changed(facts: Facts, **parts: Any) -> Facts:
    """`facts` with parts changed, those of backends by the names above: a dict changes fields of a part, anything else
    takes its place."""
    before: dict[str, Any] = {name: facts.backend(kind) for name, kind in BACKENDS.items()}
    before |= {name: getattr(facts, name) for name in facts.__struct_fields__}
    after = {
        name: msgspec.structs.replace(before[name], **value) if isinstance(value, dict) else value
        for name, value in parts.items()
    }
    backends = tuple((before | after)[name] for name in BACKENDS)
    machine = {name: value for name, value in after.items() if name not in BACKENDS}
    return msgspec.structs.replace(facts, **machine, backends=backends)


H100_WITH_EVERYTHING = changed(
    WITHOUT_GPU,
    driver=Driver(state="ok", version="580.65.06", cuda="13.0", card=True),
    gpus=(H100,),
    torch=Torch(installed=True, version="2.9.1+cu128", cuda="12.8", gpus=1, architectures=("sm_80", "sm_90")),
    toolchain=TOOLS,
    ray=Package(installed=True, version="2.49.0"),
    exllama=Exllama(installed=True, version="0.3.2", kernels="prebuilt", kept_at=KEPT),
    exllama3=Exllama3(installed=True, version="1.6.5+cu128.torch2.9.0", kernels="prebuilt"),
    attention=Attention(
        name="flash",
        reason="flash-attn is installed",
        flash_attn=Package(installed=True, version="2.8.3"),
        triton=Package(installed=True, version="3.5.1"),
    ),
)

H100_TO_COMPILE = changed(H100_WITH_EVERYTHING, exllama=Exllama(installed=True, version="0.3.2", kept_at=KEPT))

TURING = changed(
    H100_WITH_EVERYTHING,
    gpus=(RTX_2080_TI,),
    torch=Torch(installed=True, version="2.9.1+cu128", cuda="12.8", gpus=1, architectures=("sm_75", "sm_80")),
    attention={
        "name": "gathered",
        "reason": "flash-attn is not installed; Triton supports 8.0 and newer",
        "flash_attn": Package(),
    },
)

CPU_TORCH_ON_A_GPU_MACHINE = changed(
    H100_WITH_EVERYTHING,
    torch=Torch(installed=True, version="2.13.0+cpu"),
    exllama=Exllama(),
    attention=Attention(triton=Package(installed=True, version="3.5.1")),
)
