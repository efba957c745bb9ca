"""A small model to quantise, and no settings but those of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tiny_models import make_tiny_model


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ERICLLM_CONFIG", raising=False)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", num_hidden_layers=1)
