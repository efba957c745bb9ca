"""The last block computes the rows alone whose logits are wanted, and those are the same as if it computed all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.model.decoder import Decoder
from engine.backends.torch.model.step_plan import StepPlan
from engine.backends.torch.native.library import Kernels
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights import model_loader
from tests.fakes.families import make_family
from tests.fakes.oracle import load_runner
from tests.fakes.tiny_models import make_tiny_model

PAGE_TOKENS = 16
STEP = (
    ChunkInput(list(range(5, 26)), 0, [4, 1], sample=True),
    ChunkInput(list(range(40, 70)), 0, [0, 2, 5], sample=False),
    ChunkInput([9], 0, [3], sample=True),
)


@pytest.mark.parametrize("kernels", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("model", ["llama", "olmo2", "granite", "stablelm 2"])
def test_wanted_rows_are_what_they_are_among_all(
    model: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(model_loader, "find_kernels", lambda *_, **__: Kernels(problem="unwanted"))
    runner = _loaded(make_tiny_model(tmp_path) if model == "llama" else make_family(tmp_path, model))
    found = runner.forward(STEP)
    computed: list[int] = []
    _compute_all(monkeypatch, computed)
    runner._stack = None  # which computes a step without `Decoder.hidden`
    torch.testing.assert_close(found, runner.forward(STEP), atol=0 if kernels else 1e-5, rtol=0)
    assert computed == [sum(len(chunk.token_ids) for chunk in STEP)]


def test_a_step_without_a_wanted_row_has_no_logits(tmp_path: Path) -> None:
    runner = _loaded(make_tiny_model(tmp_path))
    assert len(runner.forward([STEP[1]])) == 0


def _loaded(folder: Path) -> ModelRunner:
    runner = load_runner(folder)
    runner.allocate_kv(8, PAGE_TOKENS, report=lambda progress: None)
    return runner


def _compute_all(monkeypatch: pytest.MonkeyPatch, computed: list[int]) -> None:
    """Have the last block compute every row; how many those were."""
    hidden = Decoder.hidden

    def all_rows(self: Decoder, plan: StepPlan, kv: KvPool, rows: Tensor | None, watch: object) -> Tensor:
        assert rows is not None
        states = hidden(self, plan, kv)
        computed.append(len(states))
        return states.index_select(0, rows)

    monkeypatch.setattr(Decoder, "hidden", all_rows)
