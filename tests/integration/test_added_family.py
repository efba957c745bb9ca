"""A family added as one file, as an extension would: inspected, estimated, loaded and generating; refused elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.runtime.estimate import estimate_for
from console.runtime.loading import choose_model
from console.settings.schema import Settings
from engine.backends.common import families
from engine.backends.common.exllamav2_checkpoint import read_folder
from engine.config import ModelSpec, SamplingParams
from engine.devices.simulated import simulated_readings
from engine.engine import Engine
from engine.errors import UnsupportedModel
from engine.models.discover import discover
from engine.models.inspect import inspect
from tests.fakes.engines import all_ready, ask, config, read
from tests.fakes.tiny_models import make_tiny_model

NAME = "ExampleForCausalLM"
FAMILY = f'''"""Example: Llama's block with a window in every other layer, and a scale for its logits."""

from engine.backends.common.config_values import number
from engine.backends.common.families.base import Architecture, Traits, typed_windows

EXAMPLE = Architecture(
    "{NAME}",
    lambda raw, layers: Traits(
        windows=typed_windows(raw, layers, every=2), logit_scale=number(raw, "logits_multiplier", 1.0)
    ),
)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model of the family."""
    return make_tiny_model(tmp_path / "example", NAME, sliding_window=4, logits_multiplier=0.5)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The family's file, where families are looked for."""
    place = tmp_path / "families"
    place.mkdir()
    (place / "example.py").write_text(FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(place)])
    yield
    sys.modules.pop(f"{families.__name__}.example", None)
    vars(families).pop("example", None)


async def generated(path: Path) -> list[int]:
    """Tokens of one greedy answer on the torch backend, longer than the window."""
    engine = Engine(config())
    await engine.start()
    try:
        await engine.load(ModelSpec(path=path, name="tiny", threads=1, kv_cache_tokens=1024, dtype="float32"))
        await all_ready(engine)
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return (await read(engine.submit(ask(list(range(3, 20)), params=params)))).token_ids
    finally:
        await engine.close()


def test_without_its_file_the_family_is_refused(folder: Path) -> None:
    assert f"unsupported architecture: {NAME}" in inspect(folder).problem


@pytest.mark.usefixtures("added")
def test_its_models_are_listed_taken_by_the_flag_and_their_fit_is_known(folder: Path) -> None:
    entry = inspect(folder)
    assert (entry.architecture, entry.backend, entry.problem) == (NAME, "torch", "")
    assert [each.name for each in discover((folder.parent,)) if each.architecture == NAME] == ["example"]
    settings = Settings(model=str(folder))
    assert choose_model(settings).spec is not None
    fit = estimate_for(settings, simulated_readings((1.0,)))
    assert fit.can_load
    assert fit.placements[0].kv_tokens > 0


@pytest.mark.usefixtures("added")
async def test_its_models_generate_with_what_the_file_says_of_them(folder: Path, tmp_path: Path) -> None:
    """Windows of 4 tokens give other tokens than Llama of the same weights, whose layers all see the whole prompt."""
    llama = make_tiny_model(tmp_path / "llama")
    tokens = await generated(folder)
    assert len(tokens) == 12
    assert tokens != await generated(llama)


@pytest.mark.usefixtures("added")
def test_exllamav2_refuses_its_models_by_their_architecture(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"unsupported architecture: {NAME}"):
        read_folder(folder)
    assert f"unsupported architecture: {NAME}" in inspect(folder, lambda quantisation, path: "exllamav2").problem
