"""Greedy tokens and log-probabilities of every attention, of the library with and without CUDA graphs, and of ours.

Each comes from a process of its own, where the environment decides what the library does: `python -m
tests.gpu.check_tokens SPEC.json ANSWERS.json TOKENS PROMPTS`.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from engine.config import AttentionName, BackendName, ModelSpec
from tests.gpu.answers import Answers, agreement, ask, prompts
from tests.gpu.models import TINY, exl2_model
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, promise, skipped

TOKENS, GRAPH_STEPS = 260, 206
"""Tokens per answer, and how many of one answer must be compared: the library replays CUDA graphs after 204 steps."""

KERNELS_NATS, BACKENDS_NATS = 0.05, 0.1
"""How far log-probabilities may lie apart: of one backend with two attentions, and of two backends. Both compute in
float16, the library with atomics whose order varies."""

_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class Variant:
    """A backend with an attention, and the environment that it needs."""

    name: str
    backend: BackendName
    attention: AttentionName = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)

    def spec(self, folder: Path) -> ModelSpec:
        """What to load: `folder` in float16 with room for every prompt, on the GPU that placement names; `life` leaves
        that to the library."""
        return ModelSpec(
            path=folder,
            name=self.name,
            backend=self.backend,
            attention=self.attention,
            dtype="float16",
            max_model_len=2048,
            kv_cache_tokens=16384,
            device="cuda:0",
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """A row: the variant `name` against another, which may lie apart by `tolerance` nats."""

    title: str
    name: str
    against: str
    tolerance: float


REFERENCE = Variant("torch, gathered", "torch", "gathered")
GRAPHS_OFF = {"EXLLAMA_NO_GRAPHS": "1"}


def variants(has_flash: bool, has_varlen: bool) -> Iterator[Variant]:
    """Everything that is compared with the reference, on a machine with these attentions."""
    names: list[AttentionName] = ["triton", "gathered"]
    names += ["varlen"] if has_varlen else []
    yield from (Variant(f"torch, {name}", "torch", name) for name in names if name != "gathered")
    yield from (Variant(f"exllamav2, {name}", "exllamav2", name) for name in names)
    yield Variant("exllamav2, triton, no graphs", "exllamav2", "triton", GRAPHS_OFF)
    if has_flash:
        yield Variant("exllamav2, flash", "exllamav2", "flash")


def checks(place: Place) -> Iterable[Row]:
    """A row for each variant against the torch backend, and for flash and graphs against our own attention; each as
    soon as both of its sides are there."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    folder, count = exl2_model(place, TINY), 4 if place.quick else 8
    every = [REFERENCE, *variants(has_flash, _has_varlen())]
    left = [Pair(each.name, each.name, REFERENCE.name, BACKENDS_NATS) for each in every[1:]]
    left += [Pair("graphs off against on", "exllamav2, triton, no graphs", "exllamav2, triton", KERNELS_NATS)]
    if has_flash:
        left += [Pair("flash against triton", "exllamav2, flash", "exllamav2, triton", KERNELS_NATS)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = {pool.submit(_witness, place, each, folder, count): each.name for each in every}
        answers: dict[str, Future[Answers]] = {}
        for future in as_completed(asked):
            answers[asked[future]] = future
            for pair in [each for each in left if each.name in answers and each.against in answers]:
                left.remove(pair)
                yield from attempt(pair.title, partial(_rows, pair, answers))
    if not has_flash:
        yield skipped("flash against triton", "flash-attn is not installed")


def _rows(pair: Pair, answers: Mapping[str, Future[Answers]]) -> list[Row]:
    """Whether two variants agree. Raises what either of them raised."""
    got, expected = answers[pair.name].result(), answers[pair.against].result()
    found = agreement(expected, got)
    attention = f"; attention: {got.model.attention}" if got.model.attention else ""
    held = found.within(pair.tolerance, GRAPH_STEPS)
    return [promise(pair.title, held, f"{found}{attention}", value=found.worst_difference, unit="nats")]


def _witness(place: Place, variant: Variant, folder: Path, count: int) -> Answers:
    """Its answers. Raises RuntimeError with what the process said last."""
    stem = place.folder / "witness" / variant.name.replace(", ", "-").replace(" ", "-")
    stem.parent.mkdir(exist_ok=True)
    spec, found = stem.with_suffix(".spec.json"), stem.with_suffix(".answers.json")
    save_spec(variant.spec(folder), spec)
    command = [sys.executable, "-m", "tests.gpu.check_tokens", str(spec), str(found), str(TOKENS), str(count)]
    done = subprocess.run(
        command,
        env={**os.environ, **variant.environment},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"{variant.name}: {lines[-1] if lines else f'ended with {done.returncode}'}")
    return read_answers(found)


def _has_varlen() -> bool:
    """Whether torch's own paged attention takes a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen_attn).parameters


def save_spec(spec: ModelSpec, file: Path) -> None:
    """Write what the process is to load."""
    file.write_bytes(msgspec.json.encode(spec, enc_hook=str))


def read_answers(file: Path) -> Answers:
    """What the process found."""
    return msgspec.json.decode(file.read_bytes(), type=Answers)


def witness(arguments: list[str]) -> None:
    """Load, ask, save."""
    spec_file, answers_file, tokens, count = arguments
    spec = msgspec.json.decode(Path(spec_file).read_bytes(), type=ModelSpec, dec_hook=lambda kind, value: kind(value))
    answers = ask(spec, prompts(int(count), TINY.vocab), int(tokens))
    Path(answers_file).write_bytes(msgspec.json.encode(answers))


if __name__ == "__main__":
    witness(sys.argv[1:])
