"""What loads of the exllamav2 backend are tested with: a small folder and one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.exllama_model import GIB, FakeGpus
from tests.fakes.tiny_models import make_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "main", dtype="float16", max_position_embeddings=4096)


@pytest.fixture
def gpus() -> FakeGpus:
    return FakeGpus(8 * GIB)
