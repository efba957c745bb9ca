"""Gains and costs of speculative decoding. `python -m tools.performance.speculation [--shape demo | 0.5b] [--requests
N]`

The backend alone answers N requests at once, greedily, without guesses and with each kind of them, interleaved; one
that is done makes room for another. Printed are medians of generated tokens per second, from where the first N have a
token until there is no other, and the share of guesses that held.

demo: the demo model answers conversations that no training saw; it looks them up (ngram), or has a draft model of two
random layers that is never right (useless).  A synthetic shape: its layers from the third on change next to nothing, so
that its first two, as a model of their own, are a draft model that is mostly right (close); random ones are useless.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.backends.base import BackendRequest
from engine.backends.torch.backend import TorchBackend
from engine.config import ModelSpec, SamplingParams
from engine.demo import model_path
from tools.demo_model.corpus import make_corpus
from tools.demo_model.examples import encode
from tools.synthetic_models import SHAPES, make_synthetic

KEPT_LAYERS, DAMPED, SEED = 2, 0.02, 977
LENGTHS = 3
"""Requests of a round, for each that is answered at once."""

MAX_PROMPTS = 64
_ENDS = ("o_proj.weight", "down_proj.weight")
Weights = Mapping[str, torch.Tensor]


def write(folder: Path, like: Path, weights: Weights, layers: int) -> Path:
    """A model of `weights`, everything else as in `like`."""
    folder.mkdir()
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((like / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def models(shape: str, folder: Path) -> tuple[Path, dict[str, dict[str, object]]]:
    """The model to answer, and by name the settings that it is to be tried with."""
    source = model_path() if shape == "demo" else make_synthetic(shape, folder / "source")
    weights = load_file(source / "model.safetensors")
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    first = {name: weight for name, weight in weights.items() if _layer(name) < KEPT_LAYERS}
    generator = torch.Generator().manual_seed(SEED)
    noise = {
        name: (torch.randn(weight.shape, generator=generator) * weight.float().std()).to(weight.dtype)
        if weight.ndim > 1
        else weight
        for name, weight in first.items()
    }
    useless = {"draft_model": write(folder / "useless", source, noise, KEPT_LAYERS)}
    if shape == "demo":
        return source, {"none": {}, "ngram": {"ngram_draft": True}, "useless": useless}
    damped = {
        name: weight * DAMPED if _layer(name) >= KEPT_LAYERS and name.endswith(_ENDS) else weight
        for name, weight in weights.items()
    }
    close = {"draft_model": write(folder / "close", source, first, KEPT_LAYERS)}
    return write(folder / "main", source, damped, layers), {"none": {}, "close": close, "useless": useless}


def _layer(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def load(folder: Path, settings: Mapping[str, object], tokens: int) -> TorchBackend:
    """The model in bfloat16, with room for as many guesses as are worth their time."""
    backend = TorchBackend()
    spec = ModelSpec(
        path=folder,
        name="m",
        dtype="bfloat16",
        device="cpu",
        kv_cache_tokens=MAX_PROMPTS * (192 + tokens),
        **settings,  # type: ignore[arg-type]
    )
    backend.load(
        spec,
        max_prompts=MAX_PROMPTS,
        step_tokens=512,
        page_tokens=16,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def prompts(shape: str, count: int) -> list[list[int]]:
    """As many as there are requests in all rounds, no two alike."""
    if shape != "demo":
        return [[3 + (number * 131 + at * 7) % 290 for at in range(128)] for number in range(count)]
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    examples = [encode(conversation, tokenizer, 512) for conversation in make_corpus(count, SEED)]
    return [each.ids[: max(2, each.answer.index(True) if any(each.answer) else 2)] for each in examples]


def rate(backend: TorchBackend, asked: Sequence[Sequence[int]], at_once: int, tokens: int) -> float:
    """Tokens per second while `requests` requests are answered at once, one that is done making room for the next."""
    params = SamplingParams(temperature=0, max_tokens=tokens)
    received: dict[str, int] = {}
    waiting = iter(asked)

    def submit() -> bool:
        ids = next(waiting, None)
        if ids is not None:
            name = str(len(received))
            received[name] = 0
            backend.submit(BackendRequest(id=name, prompt_ids=list(ids), params=params))
        return ids is not None

    for _ in range(at_once):
        submit()
    began_s, before, full = 0.0, 0, True
    while full:
        for event in backend.step():
            received[event.request_id] += event.token_id is not None
            if received[event.request_id] >= tokens:
                backend.cancel(event.request_id)
            if event.finish is not None or received[event.request_id] >= tokens:
                full = submit() and full
        if not began_s and all(received.values()):
            began_s, before = time.perf_counter(), sum(received.values())
    taken_s = time.perf_counter() - began_s
    for name in received:
        backend.cancel(name)
    return (sum(received.values()) - before) / taken_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("demo", *SHAPES), default="demo")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as made:
        folder, kinds = models(given.shape, Path(made))
        backends = {name: load(folder, settings, given.tokens) for name, settings in kinds.items()}
        each = LENGTHS * given.requests
        asked = prompts(given.shape, each * (given.rounds + 1))
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(given.rounds + 1):
            some = asked[number * each : (number + 1) * each]
            for name in [*kinds][number % len(kinds) :] + [*kinds][: number % len(kinds)]:
                found = rate(backends[name], some, given.requests, given.tokens if number else min(24, given.tokens))
                if number:
                    rates[name].append(found)
        for name, found_rates in rates.items():
            stats = backends[name].stats()
            share = stats.draft_accepted / stats.draft_tokens if stats.draft_tokens else 0.0
            spread = ", ".join(f"{each:.0f}" for each in found_rates)
            print(f"{given.requests:3} {name:8} {statistics.median(found_rates):7.1f} tok/s ({spread}); "
                  f"{stats.draft_tokens} draft tokens, {share:.0%} accepted")  # fmt: skip


if __name__ == "__main__":
    main()
