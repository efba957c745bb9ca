"""The cost of fewer bits, for keys and values or, with --weights or --exl2, for weights.
`python -m tools.performance.perplexity [--weights | --exl2 BITS ...] [--conversations N] [--dtype D]`

The demo model answers conversations that no training saw. Each answer token is fed by itself over the pages, as when
answers are generated; printed are the answers' perplexity, the mean KL divergence of the next token to that of 16 bits,
how often the likeliest token is another one, and what a token's keys and values or the weights take. Of quantised
weights it also says what they cost alone, with rows that are not rounded to 8 bits. --exl2 makes an EXL2
folder for each of these bits per weight, as `python -m tools.exl2_writer` does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.backends.common.packed_weights import Bits
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.model.linear import Linear, LinearFactory, PlainLinear
from engine.backends.torch.native.library import Rows, concatenate, shape_of
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights import model_loader
from engine.backends.torch.weights.store import OwnWeights, WeightStore
from engine.config import CacheBits, DtypeName, ModelSpec, WeightsName
from engine.demo import model_path
from tools.demo_model.corpus import make_corpus
from tools.demo_model.examples import Example, encode
from tools.exl2_writer.quantize import quantize_folder

SEED = 977
PAGE_TOKENS = 16
BITS: tuple[CacheBits, ...] = (16, 8, 4)
WEIGHTS: tuple[WeightsName, ...] = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Log probabilities [answer tokens, vocab] in order, and of each answer token itself."""

    predicted: Tensor
    of_answers: Tensor


def held_out(count: int, longest: int) -> list[Example]:
    """`count` conversations of a seed that no training uses, those longer than `longest` tokens cut there."""
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    return [encode(conversation, tokenizer, longest) for conversation in make_corpus(count, SEED)]


def load(
    dtype: DtypeName,
    examples: Sequence[Example],
    *,
    bits: CacheBits = 16,
    weights: WeightsName = "auto",
    folder: Path | None = None,
) -> ModelRunner:
    """The demo model, or what was made of it in `folder`, with pages for all of `examples`."""
    spec = ModelSpec(
        path=folder or model_path(), name="demo", dtype=dtype, device="cpu", cache_bits=bits, weights=weights
    )
    runner = ModelRunner.load(spec.path, spec, report=lambda progress: None, cancelled=lambda: False)
    return with_pages(runner, examples)


@contextmanager
def rows_as_they_are() -> Iterator[None]:
    """Load quantised weights meanwhile so that torch multiplies by what they are rounded to."""
    made = LinearFactory._make_quantised

    def plain(self: LinearFactory, weight: Rows, bias: Tensor | None, bits: Bits, interleave: bool) -> Linear:
        layer = made(self, weight, bias, bits, interleave)
        dtype = concatenate(weight).dtype
        return PlainLinear(layer(torch.eye(shape_of(weight)[1], dtype=dtype)).T.contiguous(), bias)

    @contextmanager
    def own(*_: object) -> Iterator[WeightStore]:
        yield OwnWeights()

    with patch.object(LinearFactory, "_make_quantised", plain), patch.object(model_loader, "weight_store", own):
        yield


def with_pages(runner: ModelRunner, examples: Sequence[Example]) -> ModelRunner:
    """`runner` with pages for all of `examples`."""
    pages = sum(-(-len(example.ids) // PAGE_TOKENS) for example in examples)
    runner.allocate_kv(pages, PAGE_TOKENS, report=lambda progress: None)
    return runner


def outcome(runner: ModelRunner, examples: Sequence[Example]) -> Outcome:
    """Feed what is before the first answers, then the rest token by token, all conversations side by side."""
    predicted, of_answers = [], []
    for chunks, wanted in steps(examples):
        rows = runner.forward(chunks).log_softmax(-1)
        pairs = [(row, token) for row, token in zip(rows, wanted, strict=True) if token is not None]
        predicted += [row for row, _ in pairs]
        of_answers += [row[token] for row, token in pairs]
    return Outcome(torch.stack(predicted), torch.stack(of_answers))


def steps(examples: Sequence[Example]) -> Iterator[tuple[list[ChunkInput], list[int | None]]]:
    """Chunks of each step, and for each the token that follows where it belongs to an answer."""
    starts = [max(1, example.answer.index(True)) if any(example.answer) else len(example.ids) for example in examples]
    first_page = 0
    tables: list[list[int]] = []
    for example in examples:
        count = -(-len(example.ids) // PAGE_TOKENS)
        tables.append(list(range(first_page, first_page + count)))
        first_page += count
    for step in range(max(len(example.ids) for example in examples)):
        chunks: list[ChunkInput] = []
        wanted: list[int | None] = []
        for example, start, pages in zip(examples, starts, tables, strict=True):
            begin, end = (0, start) if step == 0 else (start + step - 1, start + step)
            if end < len(example.ids):
                chunks.append(ChunkInput(example.ids[begin:end], begin, pages, sample=True))
                wanted.append(example.ids[end] if example.answer[end] else None)
        if chunks:
            yield chunks, wanted


def compared(
    ways: Mapping[str, Callable[[], ModelRunner]], examples: Sequence[Example], size: Callable[[ModelRunner], str]
) -> None:
    """Print one line for each of `ways`, the first being what the others are held against."""
    plain: Outcome | None = None
    for name, loaded in ways.items():
        runner = loaded()
        found = outcome(runner, examples)
        plain = plain or found
        perplexity = math.exp(-float(found.of_answers.double().mean()))
        divergence = float((plain.predicted.exp() * (plain.predicted - found.predicted)).sum(-1).mean())
        others = float((plain.predicted.argmax(-1) != found.predicted.argmax(-1)).float().mean())
        print(
            f"{name}: perplexity {perplexity:.4f}, KL {divergence:.6f}, another likeliest token {others:.2%}, "
            f"{size(runner)} ({len(found.of_answers)} answer tokens)",
            flush=True,
        )


def compared_exl2(dtype: DtypeName, examples: Sequence[Example], widths: Sequence[float]) -> None:
    """Print a line for the demo model, and one for an EXL2 folder of each of some bits per weight."""
    with TemporaryDirectory() as folder:
        ways = {"as it is": partial(load, dtype, examples)}
        for width in widths:
            target = Path(folder, f"{width:g}")
            quantize_folder(model_path(), target, bits=width)
            ways[f"{width:g} bits"] = partial(load, dtype, examples, folder=target)
        compared(ways, examples, weights_size)


def weights_size(runner: ModelRunner) -> str:
    """Return the size of its weights."""
    return f"{runner.weights_bytes / 2**20:.1f} MiB of weights"


def main() -> None:
    """Print one line for each number of bits, or for each kind of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made = parser.add_mutually_exclusive_group()
    made.add_argument("--weights", action="store_true")
    made.add_argument("--exl2", nargs="+", type=float, metavar="BITS")
    parser.add_argument("--conversations", type=int, default=160)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    examples, dtype = held_out(given.conversations, 512), given.dtype
    if given.exl2:
        return compared_exl2(dtype, examples, given.exl2)
    if not given.weights:
        by_bits = {f"{bits:>2} bits": partial(load, dtype, examples, bits=bits) for bits in BITS}
        return compared(by_bits, examples, lambda runner: f"{runner.kv_bytes_per_token()} bytes per token")

    def with_rows(weights: WeightsName) -> ModelRunner:
        with rows_as_they_are():
            return load(dtype, examples, weights=weights)

    ways = {name: partial(load, dtype, examples, weights=name) for name in ("auto", *WEIGHTS)}
    alone = {f"{name}, rows as they are": partial(with_rows, name) for name in WEIGHTS}
    return compared(ways | alone, examples, weights_size)


if __name__ == "__main__":
    main()
