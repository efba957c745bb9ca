"""Tiny models of every architecture, made once for all who ask them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model


@pytest.fixture(scope="session", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), request.param, with_tokenizer=False)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), with_tokenizer=False)
