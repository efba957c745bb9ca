"""What holds for one plain runner holds for every family over devices, over pages, with adapters and in accounts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from engine.backends.paged_attention import gathered
from engine.backends.paged_attention.choose import AttentionFacts, Choice
from engine.backends.paged_attention.probe import probe
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec
from engine.placement.model_facts import read_facts
from tests.fakes.adapters import make_adapter
from tests.fakes.allocations import peak_bytes
from tests.fakes.families import FAMILIES, make_family
from tests.fakes.oracle import Driver, ignore_progress, load_runner, never
from tests.integration.test_lora import assert_equals_merged
from tests.unit.test_torch_multi_device import answers, assert_equal, shares
from tools.exl2_writer.quantize import open_source

PAGES, PAGE_TOKENS = 200, 16


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("family"), request.param)


def test_a_split_family_gives_the_logits_of_the_whole_to_the_bit(family: Path) -> None:
    whole = load_runner(family)
    layers = whole.config.layers
    parted = load_runner(family, shares=shares(1, layers - 2, 1), device="auto")
    assert_equal(answers(parted), answers(whole))


def test_what_a_family_weighs_is_planned_to_the_byte(family: Path) -> None:
    facts = read_facts(ModelSpec(path=family, name="m", backend="torch"))
    parts = (facts.parts.embedding, *facts.parts.layers, facts.parts.norm, facts.parts.head)
    assert load_runner(family).parameters == sum(part.elements for part in parts)


@pytest.mark.parametrize("name", ["gemma2", "gemma3 scaled", "granite", "phi4 mini"])
def test_scores_are_scaled_and_capped_alike_where_pages_are_read_as_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = make_family(tmp_path, name)
    expected = answers(load_runner(folder))
    choice = Choice("gathered", "the test wants it")
    monkeypatch.setattr(ModelRunner, "pick_attention", lambda *_: (choice, gathered.paged_attention))
    for ours, theirs in zip(answers(load_runner(folder)), expected, strict=True):
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["phi3", "gemma2", "olmo2", "stablelm 2"])
def test_an_adapter_of_a_family_computes_what_merged_weights_compute(tmp_path: Path, name: str) -> None:
    model = make_family(tmp_path / "model", name)
    with safe_open(model / "model.safetensors", framework="pt") as opened:
        shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    linears = {key: shape for key, shape in shapes.items() if key.endswith("_proj.weight")}
    adapter = make_adapter(tmp_path / "adapter", model, shapes=linears, targets=("_proj",))
    assert_equals_merged(model, adapter, tmp_path / "merged")


def test_soft_capped_steps_take_no_more_than_their_bound(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "gemma2", max_position_embeddings=4096)
    spec = ModelSpec(path=folder, name="tiny", dtype="float32", device="cpu")
    draw = random.Random(0)
    for step in ([(512, 0)], [(64, 2000)], [(1, 500)] * 32, [(1, 200), (30, 100), (400, 300)]):
        runner = ModelRunner.load(folder, spec, report=ignore_progress, cancelled=never)
        runner.allocate_kv(PAGES, PAGE_TOKENS, report=ignore_progress)
        chunks = [
            ChunkInput([5] * count, start, [draw.randrange(PAGES) for _ in range(-(-(start + count) // 16))], True)
            for count, start in step
        ]
        taken = peak_bytes(lambda ours=runner, fed=chunks: ours.forward(fed))  # type: ignore[misc]
        [share] = runner.shares
        assert taken <= share.working_bytes, step


def test_attention_is_chosen_among_what_knows_the_models_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_runner(make_family(tmp_path, "gemma2"))
    seen: list[float] = []

    def noted(*devices: torch.device, **facts: Any) -> AttentionFacts:
        seen.append(facts["softcap"])
        return probe(*devices, **facts)

    monkeypatch.setattr("engine.backends.torch.runner.probe", noted)
    runner.pick_attention(256)
    assert seen == [3.0]


def test_gemmas_norms_weigh_the_quantisers_inputs_by_one_more_than_is_stored(tmp_path: Path) -> None:
    offsets = {
        name: {linear.norm_offset for linear in open_source(make_family(tmp_path / name, name)).linears if linear.norm}
        for name in ("gemma2", "granite")
    }
    assert offsets == {"gemma2": {1.0}, "granite": {0.0}}


def test_a_driver_feeds_more_than_one_sequence_of_a_family_alike(family: Path) -> None:
    runner = load_runner(family)
    alone, together = Driver(runner), Driver(runner)
    prompts = [[5 * position % 300 + 3 for position in range(length)] for length in (30, 9, 17)]
    expected = [alone.feed((alone.add(prompt), None))[0] for prompt in prompts]
    found = together.feed(*((together.add(prompt), None) for prompt in prompts))
    torch.testing.assert_close(found, torch.stack(expected), atol=3e-4, rtol=1e-4)
