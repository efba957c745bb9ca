"""The backends that keep the contract, each with a way to make its steps fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.prompt_logprobs import ReadPromptStates
from engine.backends.torch.runner import ModelRunner
from engine.config import BackendKind, ModelSpec
from tests.contract.driving import Subject
from tests.fakes.exllama import FakeExllama, RealExllama
from tests.fakes.exllama3 import RealExllama3
from tests.fakes.tiny_models import make_tiny_model

EXLLAMA: dict[str, Callable[[], FakeExllama]] = {
    "exllamav2": lambda: FakeExllama(max_model_len=512),
    "exllamav2 with drafts": lambda: FakeExllama(max_model_len=512, draft_tokens=3),
    "exllamav2's own generator": lambda: RealExllama(max_model_len=512),
    "exllamav2's own generator with a draft model": lambda: RealExllama(max_model_len=512, draft_tokens=3),
    "exllamav2's own generator with n-grams": lambda: RealExllama(max_model_len=512, draft_tokens=3, ngram=True),
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer model of 320 tokens and a context of 512."""
    return make_tiny_model(tmp_path_factory.mktemp("contract"), with_tokenizer=False)


EXLLAMA3: dict[str, Callable[[], RealExllama3]] = {
    "exllamav3's own generator": lambda: RealExllama3(max_model_len=512),
    "exllamav3's own generator with a draft model": lambda: RealExllama3(max_model_len=512, draft_tokens=3),
    "exllamav3's own generator with n-grams": lambda: RealExllama3(max_model_len=512, draft_tokens=3, ngram=True),
}


@pytest.fixture(params=["torch", *EXLLAMA, *EXLLAMA3])
def subject(request: pytest.FixtureRequest, tiny_model: Path) -> Subject:
    """Each backend in turn, over a context of 512 tokens."""
    if request.param == "torch":
        return _torch(tiny_model)
    if request.param in EXLLAMA:
        return _exllama(tiny_model, EXLLAMA[request.param](), "exllamav2")
    return _exllama(tiny_model, EXLLAMA3[request.param](), "exllamav3")


def _torch(folder: Path) -> Subject:
    errors: list[Exception] = []

    class FailingRunner(ModelRunner):
        """Raises what the test put into `errors`."""

        def forward(
            self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: torch.Tensor | None = None
        ) -> torch.Tensor:
            if errors:
                raise errors.pop()
            return super().forward(chunks, tell, drawn)

    return Subject(
        create=lambda: TorchBackend(FailingRunner),
        spec=ModelSpec(path=folder, name="tiny", dtype="float32", kv_cache_tokens=4096),
        fail_next_step=errors.append,
    )


def _exllama(folder: Path, fakes: FakeExllama | RealExllama3, backend: BackendKind) -> Subject:
    fail: Callable[[Exception], None] = lambda error: fakes.faults.add("iterate", error)  # noqa: E731
    return Subject(
        create=fakes.backend,
        spec=ModelSpec(path=folder, name="tiny", backend=backend, kv_cache_tokens=4096),
        fail_next_step=fail,
    )
