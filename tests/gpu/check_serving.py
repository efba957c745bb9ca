"""A backend under way: nothing recorded or compiled while it serves, contexts of 16,000 tokens, too few pages, a step
out of memory, and sampled tokens as on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.backends.base import Backend, BackendRequest
from engine.config import BackendKind, ModelSpec, SamplingParams
from engine.worker_process.factory import create_backend
from tests.gpu.answers import Answers, agreement, ask, prompts
from tests.gpu.check_formats import HALF_NATS
from tests.gpu.models import BILLION, TINY, exl2_model, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise, skipped

BACKENDS: tuple[BackendKind, ...] = ("torch", "exllamav2")
LONG = replace(TINY, name="long", context=32768)
LONG_PROMPT, LONG_TOKENS = 16000, 24
LENGTHS = (5, 12, 40, 300, 700, 1500, 3000)
"""Prompts that come while others decode: chunks of every size, after few and many tokens."""

EXACT_NATS = 0.02
"""How far log-probabilities in float32 may lie apart when prompts are computed in other pieces."""

PARAMS = (
    SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(temperature=1.0, top_k=40, seed=2),
    SamplingParams(temperature=1.0, min_p=0.02, repetition_penalty=1.2, seed=3),
    SamplingParams(temperature=1.1, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, seed=4),
    SamplingParams(temperature=1.0, typical_p=0.9, seed=5),
    SamplingParams(temperature=0.9, dry_multiplier=0.8, seed=6),
    SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.05, seed=7),
    SamplingParams(temperature=1.2, tfs=0.95, logit_bias={7: 3.0}, seed=8),
)
_SAMPLED_TOKENS = 40
_LEFT_BYTES = 64 << 20
_CROWDED_PROMPTS, _CROWDED_TOKENS, _CROWDED_STEP = 8, 2000, 8192


def checks(place: Place) -> Iterator[Row]:
    """Rows of both backends where both do it, else of torch."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for backend in BACKENDS:
        spec = _spec(_folder(place, backend), backend, max_model_len=4096, kv_cache_tokens=16384)
        yield from attempt(f"{backend}: while serving", partial(undisturbed, spec, LENGTHS))
    for backend in BACKENDS:
        yield from attempt(f"{backend}: long context", partial(long_context, place, backend))
    exact = plain_model(place, TINY, "float32")
    yield from attempt("preemption", partial(preempted, exact, "cuda:0"))
    yield from attempt("sampling", partial(sampled, exact, "cuda:0"))
    yield from attempt("prompt logprobs", partial(prompt_logprobs, exact, "cuda:0"))
    crowded = _spec(plain_model(place, BILLION, "bfloat16"), "torch", dtype="bfloat16", kv_cache_tokens=32768)
    yield from attempt("a step out of memory", partial(crowd, crowded, fill_device))


def _folder(place: Place, backend: BackendKind) -> Path:
    return exl2_model(place, TINY) if backend == "exllamav2" else plain_model(place, TINY, "float16")


def _spec(folder: Path, backend: BackendKind, device: str = "cuda:0", **fields: Any) -> ModelSpec:
    return ModelSpec(path=folder, name=folder.name, backend=backend, device=device, **{"dtype": "float16"} | fields)


# --- while serving ----------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """CUDA graphs recorded and Triton kernels compiled, or read from its cache, in the block."""
    found: Counter[str] = Counter()
    begin = torch.cuda.CUDAGraph.capture_begin

    def counting(self: torch.cuda.CUDAGraph, *given: Any, **options: Any) -> None:
        found["graphs"] += 1
        begin(self, *given, **options)

    def compiled(**details: object) -> None:
        found["kernels"] += 1

    compilation = _triton_compilation()
    before = getattr(compilation, "listener", None)
    torch.cuda.CUDAGraph.capture_begin = counting  # type: ignore[method-assign]
    if compilation is not None:
        compilation.listener = compiled
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.capture_begin = begin  # type: ignore[method-assign]
        if compilation is not None:
            compilation.listener = before


def _triton_compilation() -> Any:
    """Triton's settings of compilation; None for a Triton before 3.4."""
    import triton

    return getattr(getattr(triton, "knobs", None), "compilation", None)


def undisturbed(spec: ModelSpec, lengths: Sequence[int]) -> Iterator[Row]:
    """Whether a loaded backend records and compiles nothing more, whatever comes in whatever order."""
    backend = _loaded(spec, max_prompts=len(lengths))
    try:
        with counted() as found:
            left: Counter[str] = Counter()
            for number, length in enumerate(lengths):
                _submit(backend, left, _prompt(length, number), 48, temperature=number % 2, top_p=0.9)
                for _ in range(6):
                    _step(backend, left)
            _finish(backend, left)
    finally:
        backend.unload()
    graphs, kernels = found["graphs"], found["kernels"]
    yield promise(f"{spec.backend}: records no graph while serving", graphs == 0, value=graphs)
    if _triton_compilation() is None:
        yield skipped(f"{spec.backend}: compiles no kernel while serving", "this Triton does not report it")
    else:
        yield promise(f"{spec.backend}: compiles no kernel while serving", kernels == 0, value=kernels)


# --- contexts ---------------------------------------------------------------------------------------------------------


def long_context(
    place: Place, backend: BackendKind, device: str = "cuda:0", length: int = LONG_PROMPT, tokens: int = LONG_TOKENS
) -> list[Row]:
    """Answers to a long and a short prompt, against the torch backend with gathered pages."""
    folder = exl2_model(place, LONG)
    fields = {"max_model_len": length + 256, "kv_cache_tokens": length + 1024}
    asked = [_prompt(length, 1), _prompt(9, 2)]
    expected = ask(_spec(folder, "torch", device, attention="gathered", **fields), asked, tokens)
    got = ask(_spec(folder, backend, device, **fields), asked, tokens)
    return [alike(f"{backend}: answers after {length} tokens", expected, got, HALF_NATS)]


def alike(name: str, expected: Answers, got: Answers, tolerance: float) -> Row:
    """Whether answers agree, half of one at least to the token."""
    found = agreement(expected, got)
    held = found.within(tolerance, len(expected.answers[0]) // 2)
    return promise(name, held, f"{found}; {got.model.attention}", value=found.worst_difference, unit="nats")


# --- pages, memory, sampling ------------------------------------------------------------------------------------------


def preempted(folder: Path, device: str, tokens: int = 120) -> list[Row]:
    """Answers with too few KV pages for all requests against those with enough."""
    asked = [_prompt(100, number) for number in range(8)]
    few, plenty = (
        ask(_spec(folder, "torch", device, dtype="float32", kv_cache_tokens=kv), asked, tokens, page_tokens=16)
        for kv in (100 + 4 * tokens, 8 * (128 + tokens))
    )
    return [
        promise("preemption: requests were preempted", few.preemptions > 0, value=few.preemptions),
        alike("preemption: answers", plenty, few, EXACT_NATS),
    ]


def sampled(folder: Path, device: str, tokens: int = _SAMPLED_TOKENS) -> list[Row]:
    """Tokens that are drawn on `device` against those of the CPU, from one model in float32. A draw on the edge between
    two tokens may fall to either side, so one answer may differ."""
    asked = prompts(len(PARAMS), TINY.vocab)
    cpu, here = (
        ask(_spec(folder, "torch", each, dtype="float32", kv_cache_tokens=8192), asked, tokens, params=PARAMS)
        for each in ("cpu", device)
    )
    other = [number for number, pair in enumerate(zip(cpu.tokens, here.tokens, strict=True)) if pair[0] != pair[1]]
    named = f"; others: {', '.join(_named(PARAMS[number]) for number in other)}" if other else ""
    detail = f"{len(PARAMS) - len(other)} of {len(PARAMS)} answers equal{named}"
    return [promise("sampled tokens as on the CPU", len(other) <= 1, detail, value=len(other))]


def _named(params: SamplingParams) -> str:
    """The parameters that are not neutral."""
    neutral = SamplingParams()
    names = (name for name in params.__struct_fields__ if name not in ("seed", "temperature"))
    return " and ".join(name for name in names if getattr(params, name) != getattr(neutral, name))


def prompt_logprobs(folder: Path, device: str, length: int = 700) -> list[Row]:
    """Log-probabilities of a prompt's own tokens in float16, against the CPU's in float32."""
    expected, got = (
        _prompt_logprobs(_spec(folder, "torch", each, dtype=dtype, kv_cache_tokens=4096), length)
        for each, dtype in (("cpu", "float32"), (device, "float16"))
    )
    worst = max(abs(one - other) for one, other in zip(expected, got, strict=True))
    return [promise("log-probabilities of a prompt", worst <= HALF_NATS, value=worst, unit="nats")]


def _prompt_logprobs(spec: ModelSpec, length: int) -> list[float]:
    """Of all tokens of a prompt but the first, which has none."""
    backend = _loaded(spec, max_prompts=1)
    try:
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=0, prompt_logprobs=0)
        backend.submit(BackendRequest(id="0", prompt_ids=_prompt(length, 1), params=params))
        while backend.has_work():
            for event in backend.step():
                if event.prompt_logprobs:
                    return [each.logprob for each in event.prompt_logprobs[1:] if each is not None]
        raise RuntimeError("no log-probabilities came")
    finally:
        backend.unload()


def fill_device() -> Callable[[], None]:
    """Take all memory of the first GPU but a little; the function that gives it back."""
    torch.cuda.empty_cache()
    held = [torch.empty(max(1, torch.cuda.mem_get_info()[0] - _LEFT_BYTES), dtype=torch.uint8, device="cuda")]

    def give_back() -> None:
        held.clear()
        torch.cuda.empty_cache()

    return give_back


def crowd(
    spec: ModelSpec,
    fill: Callable[[], Callable[[], None]],
    count: int = _CROWDED_PROMPTS,
    length: int = _CROWDED_TOKENS,
) -> Iterator[Row]:
    """Steps are made larger than at load when memory is gone: requests end all the same, and others afterwards."""
    backend = _loaded(spec, max_prompts=count)
    left: Counter[str] = Counter()
    try:
        backend.set_step_tokens(_CROWDED_STEP)
        give_back = fill()
        try:
            for number in range(count):
                _submit(backend, left, _prompt(length, number), 8)
            _finish(backend, left)
        finally:
            give_back()
        stats = backend.stats()
        yield promise("a step out of memory: it is repeated with less", stats.oom_steps > 0, value=stats.oom_steps)
        yield measured("a step out of memory: requests at once then", stats.prompts_limit, "")
        _submit(backend, left, _prompt(40, count), 8)
        _finish(backend, left)
        yield promise("a step out of memory: answers afterwards", True)
    finally:
        backend.unload()


def _loaded(spec: ModelSpec, max_prompts: int) -> Backend:
    backend = create_backend(spec)
    backend.load(
        spec,
        max_prompts=max_prompts,
        step_tokens=512,
        page_tokens=16,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def _prompt(length: int, number: int) -> list[int]:
    """Tokens that every model here has; no two begin alike."""
    return [3 + (number * 131 + index * 7 + index * index % 89) % (TINY.vocab - 3) for index in range(length)]


def _submit(backend: Backend, left: Counter[str], prompt: list[int], tokens: int, **params: Any) -> None:
    """Send a request, greedy unless `params` say otherwise. left: tokens that each request is still to get."""
    name = str(len(left))
    left[name] = tokens
    its = SamplingParams(**{"temperature": 0.0} | params, seed=1, max_tokens=tokens, ignore_eos=True)
    backend.submit(BackendRequest(id=name, prompt_ids=prompt, params=its))


def _step(backend: Backend, left: Counter[str]) -> None:
    """Raises RuntimeError where a request failed."""
    for event in backend.step():
        if event.finish == "error":
            raise RuntimeError(f"request {event.request_id} failed: {event.message}")
        if event.token_id is not None:
            left[event.request_id] -= 1
            if left[event.request_id] == 0:
                backend.cancel(event.request_id)


def _finish(backend: Backend, left: Counter[str]) -> None:
    while backend.has_work():
        _step(backend, left)
    if any(tokens > 0 for tokens in left.values()):
        raise RuntimeError(f"answers ended early: {dict(left)} tokens are missing")
