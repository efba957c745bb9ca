"""The library's own generator as a load makes it: how much it drafts, how its logits come back, what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.common.exllama_memory import PACKED_ROWS
from engine.backends.exllama.generator_backend import COUNT_S, GeneratorBackend
from engine.backends.exllamav2 import generator as generators
from engine.backends.exllamav2.backend import ExllamaBackend
from tests.contract.driving import TOKENS, Drive, ask, params, prompt
from tests.fakes.exllama import FakeExllama, RealExllama
from tests.fakes.exllama_generator import PADDED_TO, foretell
from tests.fakes.model import VOCAB_SIZE
from tests.integration.exllama_backend.loaded import load

DRAFTS = 4
PADDED_VOCAB = -(-VOCAB_SIZE // PADDED_TO) * PADDED_TO
ngram = pytest.mark.parametrize("ngram", [False, True], ids=["draft model", "n-grams"])


def drafting(*, ngram: bool, requests: int, packed: bool = True) -> tuple[RealExllama, Drive]:
    """A loaded backend with so many requests, and its library."""
    fakes = RealExllama(draft_tokens=DRAFTS, ngram=ngram, pages=2 * requests + 2, places=64)
    fakes.packed = packed
    drive = Drive(load(fakes, max_prompts=64), *(ask(str(salt), prompt(salt)) for salt in range(requests)))
    return fakes, drive


def steps_of(fakes: RealExllama) -> list[tuple[int, int]]:
    """Sequences, and tokens of each, of the steps so far that gave tokens."""
    forwarded: list[tuple[int, int]] = fakes.generators[-1].model.forwarded
    return forwarded


@ngram
@pytest.mark.parametrize(
    ("requests", "drafts"), [(1, 4), (6, 4), (7, 3), (8, 3), (10, 2), (16, 1), (17, 0), (32, 0), (40, 0)]
)
def test_drafts_fill_the_rows_that_packed_weights_are_multiplied_with(ngram: bool, requests: int, drafts: int) -> None:
    fakes, drive = drafting(ngram=ngram, requests=requests)
    drive.step()
    assert steps_of(fakes)[-1] == (requests, 1 + drafts)
    assert drive.to_end() == {str(salt): foretell(prompt(salt), TOKENS, VOCAB_SIZE) for salt in range(requests)}
    assert all(rows * tokens <= max(rows, PACKED_ROWS) for rows, tokens in steps_of(fakes))


@ngram
def test_weights_that_are_not_packed_do_not_limit_drafts(ngram: bool) -> None:
    fakes, drive = drafting(ngram=ngram, requests=20, packed=False)
    drive.step()
    assert steps_of(fakes)[-1] == (20, 1 + DRAFTS)


def test_a_draft_model_knows_the_tokens_of_steps_without_drafts() -> None:
    fakes, drive = drafting(ngram=False, requests=20)
    drive.add(ask("long", prompt(99), params(max_tokens=200)))
    drive.until(lambda stats: stats.decoding == 1)
    assert drive.finish.keys() == {str(salt) for salt in range(20)}
    known, before = len(drive.tokens["long"]), len(steps_of(fakes))
    tokens = drive.to_end()["long"]
    assert tokens == foretell(prompt(99), 200, VOCAB_SIZE)
    assert len(steps_of(fakes)) - before < 0.5 * (200 - known)


class Copies(TorchDispatchMode):
    """Records what logits are converted or copied. of: their last dimension."""

    def __init__(self, of: int) -> None:
        super().__init__()
        self._of = of
        self.converted: list[Tensor] = []
        self.copied: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[1].shape[-1:] == (self._of,):
            self.copied.append(args[:2])
        elif isinstance(result, Tensor) and result.dtype == torch.float32:
            self.converted += [each for each in args if isinstance(each, Tensor) and each.dtype == torch.float16]
        return result


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_logits_are_converted_where_they_are_computed_and_copied_to_pinned_memory_in_one_piece(
    draft_tokens: int,
) -> None:
    buffers: list[Tensor] = []

    def pinned(elements: int) -> Tensor:
        buffers.append(torch.empty(elements))
        return buffers[-1]

    fakes = RealExllama(draft_tokens=draft_tokens)
    fakes.pinned, fakes.dtype = pinned, torch.float16
    drive = Drive(load(fakes), ask("a", prompt(0)), ask("b", prompt(1)))
    steps = len(steps_of(fakes))
    with Copies(PADDED_VOCAB) as copies:
        drive.to_end()
    steps = len(steps_of(fakes)) - steps
    assert len(copies.copied) == len(copies.converted) == steps > 5
    [buffer] = buffers
    for logits, (target, source) in zip(copies.converted, copies.copied, strict=True):
        assert logits.dtype == torch.float16  # as they leave the model, and so on its device
        assert source.dtype == target.dtype == torch.float32
        assert source.is_contiguous() and target.is_contiguous()
        assert target.data_ptr() == buffer.data_ptr()
        assert target.numel() <= buffer.numel()


def test_the_memory_for_logits_is_pinned_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory: asked.append((shape, pin_memory)))
    generators.pinned_floats(64)
    assert asked == [((64,), True)]


def test_more_requests_than_at_the_load_get_a_larger_buffer() -> None:
    sizes: list[int] = []

    def pinned(elements: int) -> Tensor:
        sizes.append(elements // PADDED_VOCAB)
        return torch.empty(elements)

    fakes = RealExllama()
    fakes.pinned = pinned
    backend = load(fakes, max_prompts=2)
    backend.set_max_prompts(5)
    requests = [ask(str(salt), prompt(salt)) for salt in range(5)]
    assert Drive(backend, *requests).to_end() == {
        each.id: foretell(each.prompt_ids, TOKENS, VOCAB_SIZE) for each in requests
    }
    assert sizes == [2, 10]


@pytest.mark.parametrize("fakes", [FakeExllama(), RealExllama()], ids=["fake", "real"])
def test_cached_pages_are_counted_once_a_second_while_requests_run(fakes: FakeExllama) -> None:
    now_s = [0.0]
    fakes.backend = lambda: ExllamaBackend(fakes.import_library, fakes.load_parts, lambda: now_s[0])  # type: ignore[method-assign]
    backend: GeneratorBackend = load(fakes)
    drive = Drive(backend, ask("long", prompt(0), params(max_tokens=200)), ask("short", prompt(1, 600)))
    drive.until(lambda stats: "short" in drive.finish)
    assert backend.stats().pages_cached == 0
    now_s[0] += COUNT_S
    assert backend.stats().pages_cached == 3
    drive.to_end()
    assert backend.stats().pages_cached == 4
