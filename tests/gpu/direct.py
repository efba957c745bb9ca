"""The library's own generator, driven directly, in a process of its own:
`python -m tests.gpu.direct MODEL CACHE_TOKENS flash|ours|own`.

It reads a JSON line {"clients": 8, "requests": 16, "first": 0} and answers one with the generated tokens per second.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from engine.backends.exllamav2.library import Library
from tests.gpu.library import AttentionKind, config_of, generator_over, imported, with_attention
from tests.gpu.load import OUTPUT_TOKENS, prompt

MAX_SEQ_LEN = 2048


class DirectProcess:
    """The process, from the side that measures. Loading is done when it is made."""

    def __init__(self, model: Path, cache_tokens: int, kind: AttentionKind, log: Path) -> None:
        self._log = log.open("wb")
        command = [sys.executable, "-m", "tests.gpu.direct", str(model), str(cache_tokens), kind]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.attention: str = self._read()["attention"]

    def rate(self, clients: int, requests: int, first: int) -> float:
        """Generated tokens per second. Raises RuntimeError where the process is gone."""
        stream = self._stream(self._child.stdin)
        stream.write(json.dumps({"clients": clients, "requests": requests, "first": first}) + "\n")
        stream.flush()
        return float(self._read()["tokens_per_s"])

    def close(self) -> None:
        """End it: it stops where its input does."""
        self._stream(self._child.stdin).close()
        self._child.wait(30)
        self._log.close()

    def _read(self) -> dict[str, Any]:
        for line in self._stream(self._child.stdout):
            if line.startswith("{"):  # the library prints now and then
                answer: dict[str, Any] = json.loads(line)
                return answer
        last = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"the library alone: {last[-1] if last else 'ended'}")

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


def rate(library: Library, generator: Any, clients: int, requests: int, first: int) -> float:
    """A closed loop over `iterate`: a new job for each that ends, `clients` at a time, greedy, no end tokens."""
    numbers = iter(range(first, first + requests))

    def enqueue() -> None:
        number = next(numbers, None)
        if number is not None:
            generator.enqueue(
                library.job(
                    input_ids=torch.tensor([prompt(number)]),
                    max_new_tokens=OUTPUT_TOKENS,
                    gen_settings=library.settings.greedy(),
                )
            )

    started, tokens = time.perf_counter(), 0
    for _ in range(clients):
        enqueue()
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            if result["eos"]:
                tokens += result["new_tokens"]
                enqueue()
    return tokens / (time.perf_counter() - started)


def main(arguments: list[str]) -> None:
    """Load, say so, and measure until the input ends."""
    model, cache_tokens = arguments[:2]
    kind = msgspec.convert(arguments[2], AttentionKind)
    library = imported()
    torch.set_num_threads(1)  # as whoever imports the library has it; ours undoes that
    config = config_of(library, Path(model), MAX_SEQ_LEN)
    library = with_attention(library, config, kind)
    generator = generator_over(library, config, int(cache_tokens), kind)
    print(json.dumps({"attention": library.attention}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"tokens_per_s": rate(library, generator, **json.loads(line))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
