"""The whole engine on a GPU: a worker that is killed, grammars, what NVML says of memory, and a second GPU."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from engine.backends.base import LoadedModel
from engine.config import BackendKind, DeviceShare, ModelSpec, SamplingParams
from engine.config.sampling import Grammar
from engine.devices import NvmlProbe
from engine.engine import Engine, GenerateRequest
from engine.snapshot import DeviceReading
from tests.gpu.answers import agreement, ask, prompts
from tests.gpu.check_formats import HALF_NATS
from tests.gpu.check_serving import BACKENDS
from tests.gpu.load import as_they_come, serving
from tests.gpu.models import BILLION, TINY, exl2_model, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise, skipped

TOKENS, BEFORE_KILL = 200, 20
TOTALS_MAY_DIFFER = 0.01
_MIB = 1 << 20
_TAKEN_BYTES, _SLACK_BYTES = 1 << 30, 64 << 20
_PATIENCE_S = 60.0
_DIGITS = Grammar(kind="regex", source="[0-9]{3}-[0-9]{4}")
_SCHEMA = Grammar(
    kind="json_schema",
    source=json.dumps(
        {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        }
    ),
)
_CHOICE = Grammar(kind="choice", source='["left", "right"]')
GRAMMARS: tuple[tuple[Grammar, Callable[[str], bool]], ...] = (
    (_DIGITS, lambda text: re.fullmatch(_DIGITS.source, text) is not None),
    (_SCHEMA, lambda text: re.fullmatch(r"\{\s*\"yes\"\s*:\s*(true|false)\s*\}", text) is not None),
    (_CHOICE, lambda text: text in ("left", "right")),
)
"""Formats, and whether a text has them."""


def checks(place: Place) -> Iterator[Row]:
    """Memory first, while nothing else is on the card; then both backends."""
    yield from attempt("NVML", memory)
    for backend in BACKENDS:
        yield from attempt(backend, partial(_served, place, backend))
        yield from attempt(f"{backend}: cuda:1", partial(second_gpu, place, backend))


def spec(place: Place, backend: BackendKind, device: str = "cuda:0") -> ModelSpec:
    """The tiny model: in float32 where tokens are to be equal, in EXL2 for its library."""
    exl2 = backend == "exllamav2"
    return ModelSpec(
        path=exl2_model(place, TINY) if exl2 else plain_model(place, TINY, "float32"),
        name="tiny",
        backend=backend,
        device=device,
        dtype="auto" if exl2 else "float32",
        max_model_len=1024,
        kv_cache_tokens=4096,
    )


def _served(place: Place, backend: BackendKind) -> Iterator[Row]:
    return as_they_come(served(spec(place, backend)))


async def served(model_spec: ModelSpec) -> AsyncGenerator[Row, None]:
    """Rows of one engine with one worker."""
    name = model_spec.backend
    async with serving(model_spec, 4) as (engine, model):
        for grammar, fits in GRAMMARS:
            yield await shaped(engine, name, grammar, fits)
        yield await shown(engine, name, model)
        for row in await killed(engine, name, exact=model_spec.dtype == "float32"):
            yield row


async def shaped(engine: Engine, name: str, grammar: Grammar, fits: Callable[[str], bool]) -> Row:
    """Whether an answer has the format that was asked for."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=200, grammar=grammar)
    stream = engine.submit(GenerateRequest(prompt_ids=[5, 6, 7], params=params))
    deltas = [delta async for delta in stream]
    text = "".join(delta.text for delta in deltas)
    held = deltas[-1].finish == "stop" and fits(text)
    return promise(f"{name}: {grammar.kind}", held, f"{text!r}, ended by {deltas[-1].finish}")


async def shown(engine: Engine, name: str, model: LoadedModel) -> Row:
    """Whether the snapshot shows the model's weights on its device."""
    wanted, devices = model.devices[0], tuple[DeviceReading, ...]()
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        devices = engine.publish().devices
        if any(device.id == wanted and device.weights_bytes for device in devices):
            break
        await asyncio.sleep(0.1)
    found = next((device for device in devices if device.id == wanted), None)
    if found is None:
        return promise(f"{name}: memory on {wanted}", False, f"{wanted} is not among the devices")
    parts = ("weights", "kv", "work", "others", "free")
    sizes = ", ".join(f"{part} {getattr(found, f'{part}_bytes') / _MIB:.0f}" for part in parts)
    listed = "its process is listed" if found.own else "its process is not listed"
    held = 0 < found.weights_bytes <= model.weights_bytes
    return promise(f"{name}: memory on {wanted}", held, f"MiB: {sizes}; {listed}")


async def killed(engine: Engine, name: str, *, exact: bool) -> list[Row]:
    """A worker is killed in the middle of an answer: it goes on in the next one, to the same tokens where arithmetic
    is exact enough."""
    whole, _ = await _answer(engine)
    (before,) = (worker.pid for worker in engine.publish().workers)
    if before is None:
        raise RuntimeError("the worker has no process")
    again, waited_s = await _answer(engine, after=BEFORE_KILL, do=lambda: os.kill(before, signal.SIGKILL))
    (after,) = (worker.pid for worker in engine.publish().workers)
    same = again == whole if exact else len(again) == len(whole)
    return [
        promise(f"{name}: the answer of a killed worker goes on", same and after != before, f"{len(again)} tokens"),
        measured(f"{name}: until a worker is ready again", waited_s, "s"),
    ]


async def _answer(
    engine: Engine, after: int = TOKENS, do: Callable[[], None] = lambda: None
) -> tuple[list[int], float]:
    """Tokens of a greedy answer, and the longest time between two of its deltas. do: called once, after so many."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    tokens: list[int] = []
    longest_s, last_s = 0.0, time.perf_counter()
    async with asyncio.timeout(_PATIENCE_S):
        async for delta in engine.submit(GenerateRequest(prompt_ids=[5, 6, 7, 8], params=params)):
            if delta.finish == "error":
                raise RuntimeError(f"the answer failed: {delta.error}")
            done, now_s = len(tokens) >= after, time.perf_counter()
            tokens += delta.token_ids
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            if not done and len(tokens) >= after:
                do()
    return tokens, longest_s


# --- memory -----------------------------------------------------------------------------------------------------------


def memory() -> list[Row]:
    """What NVML says of the first GPU beside what CUDA says, and of memory that this process takes."""
    torch.zeros(1, device="cuda").item()  # the context is there from now on
    probe = NvmlProbe()
    before = probe.read({os.getpid()})[0]
    taken = torch.empty(_TAKEN_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    after = probe.read({os.getpid()})[0]
    cuda_total = torch.cuda.mem_get_info()[1]
    del taken
    torch.cuda.empty_cache()
    return memory_rows(before, after, cuda_total)


def memory_rows(before: DeviceReading, after: DeviceReading, cuda_total: int) -> list[Row]:
    """Rows of two readings between which this process took 1 GiB. cuda_total: bytes, as CUDA has them."""
    off = abs(after.total_bytes - cuda_total) / cuda_total
    grown = before.free_bytes - after.free_bytes
    seen = abs(grown - _TAKEN_BYTES) <= _SLACK_BYTES
    named = f"{after.id}, {after.name}"
    rows = [
        promise("NVML's total is CUDA's", off <= TOTALS_MAY_DIFFER, named, value=100 * off, unit="% apart"),
        promise("NVML sees 1 GiB that torch takes", seen, value=grown / _MIB, unit="MiB"),
    ]
    if not after.own:
        return [*rows, skipped("NVML lists this process", "it does not, as in a container")]
    mine = after.work_bytes - before.work_bytes
    held = abs(mine - _TAKEN_BYTES) <= _SLACK_BYTES
    return [*rows, promise("NVML lists this process with what it takes", held, value=mine / _MIB, unit="MiB")]


_FIRST_GPU_GB = 0.4
"""Less than the weights of the model of about 1B parameters."""


def second_gpu(place: Place, backend: BackendKind) -> Sequence[Row]:
    """Answers from the second GPU, and by torch from layers on both, against the CPU's."""
    name = f"{backend}: cuda:1"
    if torch.cuda.device_count() < 2:
        return [skipped(name, "there is one GPU")]
    rows = [elsewhere(name, spec(place, backend, "cuda:1"))]
    if backend == "torch":
        return [*rows, elsewhere("torch: layers on two GPUs", split(spec(place, backend), "cuda:0", "cuda:1"))]
    one = msgspec.structs.replace(spec(place, backend), path=exl2_model(place, BILLION))
    two = msgspec.structs.replace(one, device="auto", gpu_split_gb=(_FIRST_GPU_GB, 4.0))
    return [*rows, *across("exllamav2: layers on two GPUs", one, two)]


def across(name: str, one: ModelSpec, two: ModelSpec) -> list[Row]:
    """Answers of a model on two GPUs against those on one, and whether both have a part of it."""
    asked = prompts(4, BILLION.vocab)
    expected, got = ask(one, asked, 24), ask(two, asked, 24)
    found = agreement(expected, got)
    return [
        promise(name, found.within(HALF_NATS, 12), str(found), value=found.worst_difference, unit="nats"),
        promise(f"{name}: both have layers", len(got.model.devices) == 2, ", ".join(got.model.devices)),
    ]


def split(whole: ModelSpec, *devices: str) -> ModelSpec:
    """The same with as many layers on each device."""
    layers = TINY.layers // len(devices)
    shares = tuple(DeviceShare(device=device, layers=layers, working_bytes=_TAKEN_BYTES) for device in devices)
    return msgspec.structs.replace(whole, device="auto", shares=shares)


def elsewhere(name: str, there: ModelSpec) -> Row:
    """Answers of a spec against the torch backend's on the CPU."""
    asked = prompts(4, TINY.vocab)
    fields: dict[str, Any] = {"max_model_len": 1024, "kv_cache_tokens": 4096, "native": False}
    cpu = ModelSpec(path=there.path, name="cpu", backend="torch", device="cpu", dtype="float32", **fields)
    found = agreement(ask(cpu, asked, 24), ask(there, asked, 24))
    return promise(name, found.within(HALF_NATS, 12), str(found), value=found.worst_difference, unit="nats")
