"""--deterministic: an answer is the same to the last bit whatever else is computed, in bfloat16 too, or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.base import BackendRequest, TokenEvent
from engine.backends.common.native_build import find_compiler
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.native.library import native_isa
from engine.config import AdapterSpec, CacheBits, ModelSpec, SamplingParams
from engine.errors import InvalidRequest
from tests.fakes.tiny_models import make_tiny_model

runs_here = pytest.mark.skipif(native_isa() is None or not find_compiler(), reason="the kernels do not run here")

PAGE_TOKENS = 16
TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=TOKENS, logprobs=3)
SEEDED = SamplingParams(temperature=1.1, top_p=0.97, seed=5, ignore_eos=True, max_tokens=TOKENS, logprobs=3)
Told = list[tuple[int, float]]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("llama"), dtype="bfloat16", with_tokenizer=False, head_dim=16, tie=True
    )


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    return make_tiny_model(folder, "MixtralForCausalLM", dtype="bfloat16", with_tokenizer=False, head_dim=16)


def load(path: Path, *, pages: int = 256, step_tokens: int = 512, **spec: Any) -> TorchBackend:
    backend = TorchBackend()
    settings = {"dtype": "bfloat16", "device": "cpu", "deterministic": True} | spec
    backend.load(
        ModelSpec(path=path, name="tiny", kv_cache_tokens=pages * PAGE_TOKENS, **settings),
        max_prompts=32,
        step_tokens=step_tokens,
        page_tokens=PAGE_TOKENS,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def prompt(salt: int, length: int) -> list[int]:
    return [(17 * position + 31 * salt) % 300 + 3 for position in range(length)]


def asked(name: str, params: SamplingParams, generated: Sequence[int] = ()) -> BackendRequest:
    """The request that every test looks at."""
    return BackendRequest(id=name, prompt_ids=prompt(1, 45), params=params, generated=list(generated))


def others(count: int) -> list[BackendRequest]:
    """Company, of all lengths."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=TOKENS)
    return [BackendRequest(id=f"other {n}", prompt_ids=prompt(n + 2, 3 + 11 * n), params=params) for n in range(count)]


def answers(backend: TorchBackend, *requests: BackendRequest) -> dict[str, Told]:
    """By request the tokens and their log-probabilities, all asked at once; each ends with TOKENS of them."""
    told: dict[str, Told] = {request.id: [] for request in requests}
    left = {request.id: TOKENS - len(request.generated) for request in requests}
    for request in requests:
        backend.submit(request)
    while backend.has_work():
        for event in backend.step():
            told[event.request_id] += _told(event)
            if len(told[event.request_id]) == left[event.request_id]:
                backend.cancel(event.request_id)
    return {name: tokens[: left[name]] for name, tokens in told.items()}


def _told(event: TokenEvent) -> Told:
    assert event.finish != "error", event.message
    if event.token_id is None:
        return []
    return [(event.token_id, event.logprob.logprob if event.logprob is not None else 0.0)]


@runs_here
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_an_answer_is_the_same_alone_in_company_in_chunks_and_resumed(
    llama: Path, params: SamplingParams, dtype: str, bits: CacheBits
) -> None:
    backend = load(llama, dtype=dtype, cache_bits=bits)
    torch.set_num_threads(1)
    alone = answers(backend, asked("alone", params))["alone"]
    assert len(alone) == TOKENS

    torch.set_num_threads(2)
    assert answers(backend, *others(4), asked("late", params), *others(7)[4:])["late"] == alone
    torch.set_num_threads(1)
    resumed = asked("resumed", params, generated=[token for token, _ in alone[:13]])
    assert answers(backend, resumed, *others(3))["resumed"] == alone[13:]
    chunked = load(llama, dtype=dtype, cache_bits=bits, step_tokens=16)
    assert answers(chunked, *others(5), asked("chunked", params))["chunked"] == alone


@runs_here
def test_preemption_changes_no_bit(llama: Path) -> None:
    alone = answers(load(llama), asked("alone", GREEDY))["alone"]
    short = load(llama, pages=16)
    assert answers(short, *others(8), asked("last", GREEDY))["last"] == alone
    assert short.stats().preemptions > 0


@runs_here
def test_guesses_change_no_bit(llama: Path) -> None:
    plain = answers(load(llama), asked("a", GREEDY))["a"]
    guessing = load(llama, ngram_draft=True)
    assert answers(guessing, asked("a", GREEDY))["a"] == plain
    drafted = load(llama, draft_model=llama)
    assert answers(drafted, *others(2), asked("a", GREEDY))["a"] == plain


@runs_here
def test_a_draft_model_that_torch_computes_is_welcome_and_changes_no_bit(llama: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path, dtype="bfloat16", with_tokenizer=False, head_dim=12, seed=3)
    drafted = load(llama, draft_model=draft)
    assert answers(drafted, *others(2), asked("a", GREEDY))["a"] == answers(load(llama), asked("a", GREEDY))["a"]


@runs_here
def test_experts_are_computed_in_a_fixed_order_too(mixtral: Path) -> None:
    backend = load(mixtral)
    alone = answers(backend, asked("alone", SEEDED))["alone"]
    assert answers(backend, *others(9), asked("late", SEEDED))["late"] == alone


@runs_here
@pytest.mark.parametrize(
    ("family", "spec", "reason"),
    [
        ({"head_dim": 12}, {}, "torch attends by gathering pages .*12"),
        ({"head_dim": 24}, {"cache_bits": 8}, "torch attends by gathering pages .*24"),
        ({"head_dim": 16}, {"attention": "gathered"}, "torch attends by gathering pages .set by --attention."),
    ],
)
def test_what_torch_would_compute_by_the_size_of_the_batch_is_refused_by_name(
    tmp_path: Path, family: dict[str, Any], spec: dict[str, Any], reason: str
) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16", with_tokenizer=False, **family)
    with pytest.raises(InvalidRequest, match=f"deterministic is not supported: {reason}"):
        load(folder, **spec)


def test_without_the_kernels_it_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERICLLM_NATIVE", "0")
    with pytest.raises(InvalidRequest, match=r"deterministic .*native kernels cannot be used"):
        load(llama)


@runs_here
def test_no_adapter_can_be_attached_beside_it(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="adapters cannot be attached where deterministic is set"):
        load(llama).attach(AdapterSpec(name="any", path=tmp_path))
