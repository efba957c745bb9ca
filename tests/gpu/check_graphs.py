"""Steps that are recorded against the same ones launched kernel by kernel; and drafts of a draft model on CUDA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.base import BackendRequest
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.cuda.adapter_slots import adapters_problem
from engine.backends.torch.cuda.decode_graphs import ReplayedStep
from engine.backends.torch.cuda.layer_ops import DTYPES
from engine.backends.torch.runner import ModelRunner
from engine.config import AdapterSpec, DeviceShare, ModelSpec, SamplingParams
from tests.fakes.adapters import make_adapter
from tests.gpu.models import TINY, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise, skipped

TOLERANCE = 6e-2
"""Largest difference of a logit in float16: kernels of another size of batch may sum in another order."""

_PAGE_TOKENS = 16
_PROMPT_TOKENS, _STEPS = 40, 24
_TOKENS = 128
_STEP_TOKENS = 64
_CONTEXTS = (40, 1000, 3900)


def checks(place: Place) -> Iterable[Row]:
    """Rows for each number of sequences, with long contexts and prompts among them, then for a draft model."""
    folder = plain_model(place, TINY, "float16")
    for sequences in (1, 3, 8, 21):
        yield from attempt(f"{sequences} sequences", partial(recorded, folder, "cuda:0", sequences))
    for dtype in DTYPES:
        yield from attempt(f"adapters, {dtype}", partial(_adapter_kernels, dtype))
    adapter = make_adapter(place.folder / "graphs adapter", folder).folder
    yield from attempt("adapters", partial(recorded, folder, "cuda:0", 8, adapter=adapter))
    if torch.cuda.device_count() > 1:
        shares = tuple(
            DeviceShare(device=f"cuda:{number}", layers=TINY.layers // 2, working_bytes=1 << 30) for number in range(2)
        )
        yield from attempt("two GPUs", partial(recorded, folder, "auto", 8, shares=shares))
    else:
        yield skipped("two GPUs: 8 sequences are recorded", "there is one GPU")
    yield from attempt("contexts", partial(contexts, folder, "cuda:0"))
    yield from attempt("recording", partial(loaded, folder, "cuda:0"))
    yield from attempt("draft model", partial(guessed, plain_model(place, TINY, "float32"), "cuda:0"))


def _adapter_kernels(dtype: torch.dtype) -> list[Row]:
    """Whether the kernels that add updates of adapters pass the trial of a load, and why not."""
    problem = adapters_problem([torch.device("cuda:0")], dtype)
    return [promise(f"adapters, {str(dtype).removeprefix('torch.')}: kernels", not problem, problem)]


def recorded(
    folder: Path, device: str, sequences: int, *, adapter: Path | None = None, shares: tuple[DeviceShare, ...] = ()
) -> list[Row]:
    """Whether so many sequences' decodes are recorded, give the same logits, and how long they take. adapter: every
    second sequence has this LoRA adapter.  shares: of the devices that the layers are split over."""
    spec = ModelSpec(path=folder, name="tiny", device=device, dtype="float16", shares=shares)
    name = f"{sequences} sequences" + (" with adapters" if adapter else "") + (" on two GPUs" if shares else "")
    runner = ModelRunner.load(folder, spec, report=lambda progress: None, cancelled=lambda: False)
    try:
        each = -(-(_PROMPT_TOKENS + _STEPS) // _PAGE_TOKENS)
        runner.allocate_kv(sequences * each, _PAGE_TOKENS, report=lambda progress: None)
        key = "" if adapter is None else runner.adapters.attach(AdapterSpec(name="a", path=adapter)).key
        plain, plain_s = _decode(runner, sequences, each, key)
        mixed, mixed_s = _mixed(runner, sequences, each, key)
        runner.record_decodes(sequences + 4, _STEP_TOKENS)
        if missing := _unrecorded(runner):
            reason = runner.attention.reason if runner.attention is not None else "none"
            detail = f"no recording of {', '.join(map(str, missing))} tokens; attention: {reason}"
            return [promise(f"{name} are recorded", False, detail)]
        with _replays(runner) as replayed:
            again, again_s = _decode(runner, sequences, each, key)
            remixed, remixed_s = _mixed(runner, sequences, each, key)
    finally:
        runner.unload()
    limit = f"largest difference, max {TOLERANCE:g}"
    return [
        promise(f"{name}: all steps but the prompts are replayed", all(replayed[1:])),
        promise(f"{name}: logits", _worst(plain, again) <= TOLERANCE, limit),
        promise(f"{name}: logits with a prompt and drafts", _worst(mixed, remixed) <= TOLERANCE, limit),
        measured(f"{name}: launched", plain_s * 1e3, "ms a step"),
        measured(f"{name}: recorded", again_s * 1e3, "ms a step"),
        measured(f"{name} with a prompt and drafts: launched", mixed_s * 1e3, "ms a step"),
        measured(f"{name} with a prompt and drafts: recorded", remixed_s * 1e3, "ms a step"),
    ]


@contextmanager
def _replays(runner: ModelRunner) -> Iterator[list[bool]]:
    """For each step inside, whether it is replayed."""
    graphs, found = runner._graphs, list[bool]()
    assert graphs is not None
    replay = graphs.replay

    def noted(chunks: Sequence[ChunkInput], drawn: Tensor | None = None) -> ReplayedStep | None:
        step = replay(chunks, drawn)
        found.append(step is not None)
        return step

    graphs.replay = noted  # type: ignore[method-assign]
    yield found


def _worst(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of a logit."""
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


def contexts(folder: Path, device: str) -> list[Row]:
    """Whether one recording serves short and long contexts, alone and in one step."""
    spec = ModelSpec(path=folder, name="tiny", device=device, dtype="float16")
    runner = ModelRunner.load(folder, spec, report=lambda progress: None, cancelled=lambda: False)
    pages = -(-max(_CONTEXTS) // _PAGE_TOKENS)
    try:
        runner.allocate_kv(1 + len(_CONTEXTS) * pages, _PAGE_TOKENS, report=lambda progress: None)
        own = [range(1 + number * pages, 1 + (number + 1) * pages) for number in range(len(_CONTEXTS))]
        for tokens, each in zip(_CONTEXTS, own, strict=True):
            runner.forward([ChunkInput([5 + at % 290 for at in range(tokens - 1)], 0, each, sample=True)])
        decodes = [ChunkInput([9], tokens - 1, each, sample=True) for tokens, each in zip(_CONTEXTS, own, strict=True)]
        steps = [decodes, *([each] for each in decodes)]
        plain = [runner.forward(step).cpu().clone() for step in steps]
        runner.record_decodes(len(_CONTEXTS), len(_CONTEXTS))
        if missing := _unrecorded(runner):
            return [promise("contexts: recorded", False, f"no recording of {', '.join(map(str, missing))} tokens")]
        with _replays(runner) as replayed:
            again = [runner.forward(step).cpu().clone() for step in steps]
    finally:
        runner.unload()
    detail = f"{', '.join(f'{tokens:,}' for tokens in _CONTEXTS)} tokens; largest difference, max {TOLERANCE:g}"
    return [promise("contexts: logits", all(replayed) and _worst(plain, again) <= TOLERANCE, detail)]


def loaded(folder: Path, device: str) -> list[Row]:
    """Seconds and memory of all recordings of a load with the defaults for CUDA."""
    spec = ModelSpec(path=folder, name="tiny", device=device, dtype="float16")
    runner = ModelRunner.load(folder, spec, report=lambda progress: None, cancelled=lambda: False)
    try:
        runner.allocate_kv(256, _PAGE_TOKENS, report=lambda progress: None)
        runner.forward([ChunkInput([1] * 512, 0, range(32), sample=True)] * 4)
        torch.cuda.empty_cache()
        free_bytes, began_s = torch.cuda.mem_get_info(device)[0], time.perf_counter()
        runner.record_decodes(64, 2048)
        took_s = time.perf_counter() - began_s
        used_bytes = free_bytes - torch.cuda.mem_get_info(device)[0]
        missing = _unrecorded(runner)
    finally:
        runner.unload()
    return [
        promise("recording: every size of up to 512 tokens", not missing, ", ".join(map(str, missing))),
        measured("recording: at load", took_s, "s"),
        measured("recording: memory", used_bytes / (1 << 20), "MiB"),
    ]


def _unrecorded(runner: ModelRunner) -> list[int]:
    """The sizes of steps that there is no recording of."""
    graphs = runner._graphs
    return [1] if graphs is None else sorted(set(graphs.sizes) - set(graphs.recorded))


def _decode(runner: ModelRunner, sequences: int, each: int, adapter: str = "") -> tuple[list[Tensor], float]:
    """Logits of some steps that feed fixed tokens, and the median seconds of one. adapter: of every second sequence."""
    keys = [adapter if number % 2 == 0 else "" for number in range(sequences)]
    pages = [list(range(number * each, (number + 1) * each)) for number in range(sequences)]
    prompts = [[(7 * at + 13 * number) % 300 + 3 for at in range(_PROMPT_TOKENS)] for number in range(sequences)]
    rows = zip(prompts, pages, keys, strict=True)
    runner.forward([ChunkInput(ids, 0, own, sample=True, adapter=key) for ids, own, key in rows])
    found, took_s = [], []
    for step in range(_STEPS):
        began_s = time.perf_counter()
        chunks = [
            ChunkInput([5 + step], _PROMPT_TOKENS + step, own, sample=True, adapter=key)
            for own, key in zip(pages, keys, strict=True)
        ]
        found.append(runner.forward(chunks).cpu().clone())
        took_s.append(time.perf_counter() - began_s)
    return found, statistics.median(took_s)


def _mixed(runner: ModelRunner, sequences: int, each: int, adapter: str = "") -> tuple[list[Tensor], float]:
    """Logits of some steps in which the first sequence computes part of its prompt anew, the second has two drafts and
    the others decode, and the median seconds of one."""
    pages = [list(range(number * each, (number + 1) * each)) for number in range(sequences)]
    found, took_s = [], []
    for step in range(_STEPS // 2):
        began_s = time.perf_counter()
        chunks = [
            ChunkInput([7 + step] * 24, 16, pages[0], sample=True, adapter=adapter),
            *(ChunkInput([9, 5, step], _PROMPT_TOKENS, own, sample=True, num_drafts=2) for own in pages[1:2]),
            *(ChunkInput([5 + step], _PROMPT_TOKENS, own, sample=True) for own in pages[2:]),
        ]
        found.append(runner.forward(chunks).cpu().clone())
        took_s.append(time.perf_counter() - began_s)
    return found, statistics.median(took_s)


def guessed(folder: Path, device: str) -> list[Row]:
    """Whether greedy answers are the same with a draft model, the model itself, and how many guesses held."""
    torch.backends.cuda.matmul.allow_tf32 = False
    plain, guessing = (_answers(folder, device, draft) for draft in (None, folder))
    stats = guessing[1]
    return [
        promise("draft model: greedy tokens in float32", plain[0] == guessing[0]),
        promise("draft model: it guessed", stats[0] > 0),
        measured("draft model: guesses that held", stats[1] / max(1, stats[0]), "of each"),
    ]


def _answers(folder: Path, device: str, draft: Path | None) -> tuple[list[Sequence[int]], tuple[int, int]]:
    backend = TorchBackend()
    spec = ModelSpec(path=folder, name="tiny", device=device, dtype="float32", kv_cache_tokens=4096, draft_model=draft)
    backend.load(
        spec,
        max_prompts=16,
        step_tokens=512,
        page_tokens=_PAGE_TOKENS,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    try:
        found: dict[str, list[int]] = {}
        for number in range(3):
            prompt = [(7 * at + 13 * number) % 300 + 3 for at in range(_PROMPT_TOKENS)]
            params = SamplingParams(temperature=0, max_tokens=_TOKENS)
            backend.submit(BackendRequest(id=str(number), prompt_ids=prompt, params=params))
            found[str(number)] = []
        while backend.has_work():
            for event in backend.step():
                if event.token_id is not None:
                    found[event.request_id].append(event.token_id)
                if len(found[event.request_id]) >= _TOKENS:
                    backend.cancel(event.request_id)
        stats = backend.stats()
        return [found[name][:_TOKENS] for name in sorted(found)], (stats.draft_tokens, stats.draft_accepted)
    finally:
        backend.unload()
