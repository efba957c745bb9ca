"""What an exception out of torch, or of a library over it, says of the device."""

from __future__ import annotations

import pytest
import torch

from engine.backends.torch_device import ends_worker, is_device_lost, is_out_of_memory
from engine.errors import WorkerFailed

_ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call."
_CUBLAS = "CUDA error: {} when calling `cublasGemmEx(handle, opa, opb, m, n, k)`"

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError(f"CUDA error: out of memory{_ADVICE}"),
    RuntimeError(f"CUDA error: out of memory{_ADVICE}"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]
LOST = [
    torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{_ADVICE}"),
    RuntimeError(f"CUDA error: unspecified launch failure{_ADVICE}"),
    RuntimeError(_CUBLAS.format("CUBLAS_STATUS_EXECUTION_FAILED")),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: misaligned address\nCompile PTX with an invalid argument to see more."),
]
NEITHER = [
    RuntimeError("The size of tensor a (4) must match the size of tensor b (5)"),
    torch.AcceleratorError(f"CUDA error: operation not permitted when stream is capturing{_ADVICE}"),
    torch.AcceleratorError(f"CUDA error: operation failed due to a previous error during capture{_ADVICE}"),
    torch.AcceleratorError(f"CUDA error: no kernel image is available for execution on the device{_ADVICE}"),
    torch.AcceleratorError(f"CUDA error: too many resources requested for launch{_ADVICE}"),
    RuntimeError(_CUBLAS.format("CUBLAS_STATUS_NOT_SUPPORTED")),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    RuntimeError("Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain."),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_out_of_memory_is_no_lost_device(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_device_lost(error)


@pytest.mark.parametrize("error", LOST, ids=repr)
def test_what_every_later_call_fails_with_is_a_lost_device(error: Exception) -> None:
    assert is_device_lost(error)
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", NEITHER, ids=repr)
def test_what_fails_alone_is_neither(error: Exception) -> None:
    assert not is_device_lost(error)
    assert not is_out_of_memory(error)


def test_a_lost_device_ends_the_worker_and_nothing_else_does() -> None:
    with pytest.raises(WorkerFailed, match="lost its device: CUDA error: an illegal memory") as ended, ends_worker():
        raise LOST[0]
    assert "\n" not in ended.value.message
    for error in (*OUT_OF_MEMORY, *NEITHER):
        with pytest.raises(type(error)) as passed, ends_worker():
            raise error
        assert passed.value is error
