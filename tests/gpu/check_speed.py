"""Speed of a backend by itself (prompts, decodes, share of the card's bandwidth), and of the torch backend through the
whole engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.base import Backend, BackendRequest
from engine.backends.paged_attention.choose import ORDER, obstacle
from engine.backends.paged_attention.interface import PagedAttention, implementation
from engine.backends.paged_attention.probe import probe
from engine.config import BackendKind, DtypeName, ModelSpec, SamplingParams
from engine.devices import NvmlProbe
from engine.worker_process.factory import create_backend
from tests.fakes.paged import Call, Case
from tests.gpu.check_attention import fitting, microseconds
from tests.gpu.load import as_they_come, rate_rows, serving
from tests.gpu.models import BILLION, Method, Shape, exl2_model, packed_model, plain_model, weights_bytes
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured

PREFILLS = (2048, 8192)
"""Prompt tokens."""

DECODES = (1, 32)
"""Concurrent requests."""

PACKED: tuple[Method, ...] = ("gptq", "awq", "fp8")

ATTENTION = (
    Case("1 x 1024", (1024,), heads=32, kv_heads=8, head_dim=128, given=False),
    Case("64 x 512", (512,) * 64, heads=32, kv_heads=8, head_dim=128, given=False),
    Case("1 x 16384", (16384,), heads=32, kv_heads=8, head_dim=128, given=False),
    Case("chunk of 2048", (0,), q_len=2048, heads=32, kv_heads=8, head_dim=128, given=False),
)
"""As the torch backend calls it: pages of 16 tokens, in bfloat16, the new keys in the pages already."""

_CONTEXT_TOKENS, _STEPS, _PROMPTS = 64, 48, 3
_STEP_TOKENS = 2048
_KV_TOKENS = 64 * 512


def checks(place: Place) -> Iterator[Row]:
    """Each backend by itself, then torch through the engine, from packed weights, and attention as it calls it."""
    yield from attempt("torch bfloat16", lambda: backend_rows(torch_spec(place, BILLION), "torch bfloat16", BILLION))
    yield from attempt("exllamav2", lambda: backend_rows(exllama_spec(place, BILLION), "exllamav2", BILLION))
    yield from attempt("torch bfloat16", lambda: as_they_come(served(place, torch_spec(place, BILLION), place.clients)))
    for method in PACKED[:1] if place.quick else PACKED:
        yield from attempt(f"torch {method}", partial(packed_rows, place, BILLION, method))
    for case in ATTENTION[:2] if place.quick else ATTENTION:
        yield from attempt(f"attention, {case}", partial(_attention, case))


def packed_rows(place: Place, shape: Shape, method: Method) -> Iterator[Row]:
    """Speed from weights packed by a method, by the torch backend."""
    spec = _spec(packed_model(place, shape, method), "torch", "float16")
    yield from backend_rows(spec, f"torch {method}", shape, prefills=PREFILLS[:1])


def torch_spec(place: Place, shape: Shape) -> ModelSpec:
    """The torch backend with weights in bfloat16."""
    return _spec(plain_model(place, shape, "bfloat16"), "torch", "bfloat16")


def exllama_spec(place: Place, shape: Shape) -> ModelSpec:
    """exllamav2 with EXL2 weights."""
    return _spec(exl2_model(place, shape), "exllamav2", "auto")


def _spec(folder: Path, backend: BackendKind, dtype: DtypeName) -> ModelSpec:
    """With room for the longest prompt, and for the most requests."""
    return ModelSpec(
        path=folder,
        name=folder.name,
        backend=backend,
        device="cuda:0",
        dtype=dtype,
        max_model_len=PREFILLS[-1] + 256,
        kv_cache_tokens=_KV_TOKENS,
    )


def backend_rows(
    spec: ModelSpec,
    name: str,
    shape: Shape,
    *,
    prefills: Sequence[int] = PREFILLS,
    decodes: Sequence[int] = DECODES,
    steps: int = _STEPS,
) -> Iterator[Row]:
    """Prompt tokens per second and time to the first token; milliseconds of a decoding step, and the bandwidth at which
    it reads the weights. In this process, without queue, text and streams."""
    backend = create_backend(spec)
    model = backend.load(
        spec,
        max_prompts=max(decodes),
        step_tokens=_STEP_TOKENS,
        page_tokens=16,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    try:
        detail = ", ".join(part for part in (f"attention {model.attention}", model.linear) if part)
        for tokens in prefills:
            first_s = statistics.median(_first_token_s(backend, tokens, number, shape) for number in range(_PROMPTS))
            ttft = f"first token after {first_s * 1e3:.1f} ms; {detail}"
            yield measured(f"{name}: prompt of {tokens}", tokens / first_s, "tok/s", ttft)
        # All but the embedding, which is looked up; exllamav2's are in memory as they are stored.
        held_bytes = weights_bytes(spec.path) if spec.backend == "exllamav2" else model.weights_bytes
        read_bytes = held_bytes - shape.vocab * shape.hidden * 2
        for count in decodes:
            step_s = _step_s(backend, count, steps, shape)
            yield measured(f"{name}: step of {count}", step_s * 1e3, "ms", f"{count / step_s:.0f} tok/s; {detail}")
            yield bandwidth_row(f"{name}: weights read, step of {count}", read_bytes / step_s, _peak_bytes_per_s())
        drawn_s = _step_s(backend, max(decodes), steps, shape, temperature=0.8, top_p=0.95)
        yield measured(f"{name}: step of {max(decodes)}, top_p", drawn_s * 1e3, "ms", "temperature 0.8, top_p 0.95")
    finally:
        backend.unload()


def bandwidth_row(name: str, bytes_per_s: float, peak: float | None) -> Row:
    """Weights over the time of a step: the least that memory did."""
    share = f"{bytes_per_s / peak:.0%} of the card's {peak / 1e9:.0f}" if peak else "the card's peak is unknown"
    return measured(name, bytes_per_s / 1e9, "GB/s", share)


def _peak_bytes_per_s() -> float | None:
    readings = NvmlProbe().read()
    return readings[0].limits.bytes_per_s if readings and readings[0].limits else None


def _prompt(tokens: int, number: int, shape: Shape) -> list[int]:
    """No two share a page."""
    return [3 + (number * 131 + index * 7 + index * index % 89) % (shape.vocab - 3) for index in range(tokens)]


def _submit(backend: Backend, name: str, prompt: list[int], tokens: int, **params: Any) -> None:
    """Send a request, greedy unless `params` say otherwise."""
    its = SamplingParams(**{"temperature": 0.0} | params, max_tokens=tokens, seed=1, ignore_eos=True)
    backend.submit(BackendRequest(id=name, prompt_ids=prompt, params=its))


def _first_token_s(backend: Backend, tokens: int, number: int, shape: Shape) -> float:
    """Seconds from a prompt to its first token, alone."""
    _submit(backend, "prompt", _prompt(tokens, number + tokens, shape), 1)
    began_s = time.perf_counter()
    while not _tokens(backend):
        pass
    first_s = time.perf_counter() - began_s
    _end(backend, ["prompt"])
    return first_s


def _step_s(backend: Backend, count: int, steps: int, shape: Shape, **params: Any) -> float:
    """The median step of so many requests that all decode."""
    names = [str(number) for number in range(count)]
    for name in names:
        _submit(backend, name, _prompt(_CONTEXT_TOKENS, int(name), shape), 4 * steps, **params)
    begun: set[str] = set()
    while len(begun) < count:
        begun |= set(_tokens(backend))
    took_s = []
    for _ in range(steps):
        began_s = time.perf_counter()
        _tokens(backend)
        took_s.append(time.perf_counter() - began_s)
    _end(backend, names)
    return statistics.median(took_s)


def _end(backend: Backend, names: Sequence[str]) -> None:
    for name in names:
        backend.cancel(name)
    while backend.has_work():
        _tokens(backend)


def _tokens(backend: Backend) -> list[str]:
    """Do a step; the requests that it had tokens for. Raises RuntimeError where one failed or nothing is left."""
    if not backend.has_work():
        raise RuntimeError("the backend has nothing left to do")
    events = backend.step()
    for event in events:
        if event.finish == "error":
            raise RuntimeError(f"request {event.request_id} failed: {event.message}")
    return [event.request_id for event in events if event.token_id is not None]


async def served(place: Place, spec: ModelSpec, clients: Sequence[int]) -> AsyncGenerator[Row, None]:
    """Tokens per second through the whole engine."""
    async with serving(spec, max(clients), _STEP_TOKENS) as serves:
        async for row in rate_rows(place, serves, f"{spec.backend} {spec.dtype}, served", clients):
            yield row


def _attention(case: Case) -> Iterator[Row]:
    """Microseconds of a call of every implementation that fits."""
    facts = probe(torch.device("cuda", 0))
    call = Call(case, torch.bfloat16, "cuda")
    for name in ORDER:
        if not obstacle(name, fitting(case, "bfloat16", facts)):
            attend = in_place(call, implementation(name))
            yield measured(f"attention, {case}, pages of 16, {name}", microseconds(attend), "us")


def in_place(call: Call, attention: PagedAttention) -> Callable[[], Tensor]:
    """The call, again and again, with all keys in the pages."""
    k_pages, v_pages = call.pool.chunk(2, dim=2)
    lengths = torch.tensor(call.case.lengths, dtype=torch.int32, device=call.device) + call.case.q_len
    scale = call.case.head_dim**-0.5
    return partial(attention, call.q, None, None, k_pages, v_pages, lengths, call.table, scale=scale)
