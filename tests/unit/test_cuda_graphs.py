"""What recordings leave behind on a device: streams, and the workspaces that cuBLAS keeps of them."""

from __future__ import annotations

import pytest
import torch

from engine.backends import torch_device
from engine.backends.exllama.load import Gpus
from engine.backends.torch.cuda.decode_graphs import CudaRecorder
from tests.fakes.cuda import WORKSPACE_BYTES, FakeCuda

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.mark.parametrize("sizes", [4, 11])
def test_a_model_s_recordings_keep_one_workspace_of_their_own_however_many_they_are(cuda: FakeCuda, sizes: int) -> None:
    for recorder in (CudaRecorder(DEVICE), CudaRecorder(DEVICE)):  # a model's, and its draft model's
        for _ in range(sizes):
            recorder.record(cuda.multiply)
            cuda.multiply()
    assert cuda.workspaces == {0}
    assert cuda.owned == {1: WORKSPACE_BYTES, 2: WORKSPACE_BYTES}


def test_a_recording_that_fails_leaves_other_work_on_its_stream(cuda: FakeCuda) -> None:
    before = cuda.current
    cuda.broken = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
    with pytest.raises(torch.AcceleratorError):
        CudaRecorder(DEVICE).record(cuda.multiply)
    assert cuda.current is before


@pytest.mark.parametrize("give_back", [lambda: torch_device.give_back(DEVICE), Gpus().give_back], ids=["torch", "exl2"])
def test_memory_given_back_has_the_workspaces_with_it(cuda: FakeCuda, give_back) -> None:  # type: ignore[no-untyped-def]
    cuda.multiply()
    give_back()
    assert cuda.allocated == 0


@pytest.mark.parametrize("give_back", [lambda: torch_device.give_back(DEVICE), Gpus().give_back], ids=["torch", "exl2"])
def test_memory_of_a_lost_device_is_left_to_the_end_of_the_process(cuda, give_back, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    def raising(error: Exception) -> None:
        raise error

    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: raising(lost))
    give_back()
    assert "an illegal memory access" in caplog.text
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: raising(ValueError("something else")))
    with pytest.raises(ValueError, match="something else"):
        give_back()
