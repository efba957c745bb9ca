"""Perplexity of one GGUF file here and in llama.cpp (xllamacpp), of the same tokens of Python's manual:
`python -m tools.performance.gguf_perplexity FILE [--tokens N] [--window N] [--dtype D ...]`

Each window is read from an empty context, token by token as answers are generated; all but its first token count.
Printed are the perplexities, and how much ours is above llama.cpp's with its standard error. llama.cpp says one token's
log-probability per request.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.runner import ModelRunner
from engine.config import DtypeName, ModelSpec
from engine.system.child_process import child_environment
from engine.text.tokenizer import Tokenizer

_PAGE_TOKENS = 16
_USUAL_PROBS = 2000
"""Tokens that llama.cpp is asked for at first: the one that follows is rarely less likely."""

_TIMEOUT_S = 300.0

Ask = Callable[[dict[str, Any]], dict[str, Any]]


def text_windows(tokenizer: Tokenizer, tokens: int, window: int) -> list[list[int]]:
    """Token ids of the manual's topics, `tokens` in all, in windows."""
    ids: list[int] = []
    for name in sorted(topics):
        if len(ids) >= tokens:
            break
        ids += tokenizer.encode(topics[name] + "\n\n")
    windows = [ids[at : min(at + window, tokens)] for at in range(0, min(len(ids), tokens), window)]
    return [each for each in windows if len(each) > 1]


def our_scores(file: Path, dtype: DtypeName, windows: Sequence[Sequence[int]]) -> Tensor:
    """Log-probabilities of all tokens but the windows' first, window by window; all windows side by side."""
    spec = ModelSpec(path=file, name=file.stem, dtype=dtype, device="cpu")
    runner = ModelRunner.load(file, spec, report=lambda progress: None, cancelled=lambda: False)
    count = -(-max(map(len, windows)) // _PAGE_TOKENS)
    runner.allocate_kv(count * len(windows), _PAGE_TOKENS, report=lambda progress: None)
    pages = [list(range(number * count, (number + 1) * count)) for number in range(len(windows))]
    found: list[list[float]] = [[] for _ in windows]
    for step in range(max(map(len, windows)) - 1):
        rows = [number for number, ids in enumerate(windows) if step + 1 < len(ids)]
        chunks = [ChunkInput([windows[number][step]], step, pages[number], sample=True) for number in rows]
        for number, scores in zip(rows, runner.forward(chunks).log_softmax(-1), strict=True):
            found[number].append(float(scores[windows[number][step + 1]]))
    return torch.tensor([score for scores in found for score in scores], dtype=torch.float64)


@contextmanager
def llama_cpp(file: Path, context: int, port: int) -> Iterator[Ask]:
    """Serve the file by llama.cpp; what is given sends a body to /completion and returns the answer."""
    serve = ("--serve", "--port", str(port), "--clients", "1", "--context", str(context))
    command = (sys.executable, "-m", "tools.performance.gguf_http", str(file), *serve)
    with subprocess.Popen(
        command,
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            address = next((line.strip() for line in server.stdout if line.startswith("http://")), "")
            if not address:
                raise RuntimeError(f"llama.cpp does not load {file}")

            def ask(body: dict[str, Any]) -> dict[str, Any]:
                headers = {"content-type": "application/json"}
                request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                    found: dict[str, Any] = json.load(answer)
                return found

            yield ask
        finally:
            server.kill()


def their_scores(ask: Ask, vocab: int, windows: Sequence[Sequence[int]]) -> Tensor:
    """Likewise, by llama.cpp. vocab: number of its tokens."""
    scores: list[float] = []
    for number, ids in enumerate(windows, 1):
        scores += (_their_score(ask, vocab, ids, count) for count in range(1, len(ids)))
        sys.stderr.write(f"llama.cpp: window {number} of {len(windows)}\n")
    return torch.tensor(scores, dtype=torch.float64)


def _their_score(ask: Ask, vocab: int, ids: Sequence[int], count: int) -> float:
    for most in (_USUAL_PROBS, vocab):
        body = {"prompt": list(ids[:count]), "n_predict": 1, "temperature": 0, "n_probs": most, "cache_prompt": True}
        for each in ask(body)["completion_probabilities"][0]["top_logprobs"]:
            if each["id"] == ids[count]:
                return float(each["logprob"])
    raise RuntimeError(f"llama.cpp names no probability of token {ids[count]}")


def main(given: Sequence[str] | None = None) -> None:
    """Print a line for llama.cpp and one for each dtype here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=10_240, help="of the text (default: 10,240)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window (default: 512)")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--port", type=int, default=8620, help="of llama.cpp's server (default: 8620)")
    arguments = parser.parse_args(given)
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = Tokenizer.from_folder(arguments.file)
    windows = text_windows(tokenizer, arguments.tokens, arguments.window)
    with llama_cpp(arguments.file, arguments.window + 16, arguments.port) as ask:
        theirs = their_scores(ask, tokenizer.vocab_size, windows)
    perplexity = math.exp(-float(theirs.mean()))
    sys.stdout.write(f"{arguments.file.name}, {len(theirs):,} tokens, {arguments.window} of a window\n")
    sys.stdout.write(f"llama.cpp: perplexity {perplexity:.4f}\n")
    for dtype in arguments.dtype:
        difference = theirs - our_scores(arguments.file, dtype, windows)
        above = math.expm1(float(difference.mean()))
        error = float(difference.std()) / math.sqrt(len(difference))
        own = perplexity * (1 + above)
        sys.stdout.write(f"{dtype}: perplexity {own:.4f}, {above:+.3%} (standard error {error:.3%})\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
