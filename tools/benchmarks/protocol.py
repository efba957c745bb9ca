"""Messages between the driver and an engine's runner: one JSON object a line. Needs the standard library alone.

A runner says what it is ({"about": {"precision": "bf16", "versions": {"torch": "2.13"}}}) once it is ready, or why it
cannot run ({"error": ...}); then it answers each work ({"clients": 8, "output_tokens": 128, "prompts": [[ids], ...]})
with {"tokens": 1024, "seconds": 3.2}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class Work:
    """A closed loop: `clients` of them ask the prompts (token ids) in order, each as soon as its last answer is whole.

    Every answer is greedy and has exactly `output_tokens` tokens. An engine without a queue of its own gets the prompts
    in batches of `clients`.
    """

    clients: int
    output_tokens: int
    prompts: tuple[tuple[int, ...], ...]

    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Work:
        """The work of a line."""
        fields = json.loads(line)
        return cls(fields["clients"], fields["output_tokens"], tuple(map(tuple, fields["prompts"])))

    def batches(self) -> list[tuple[tuple[int, ...], ...]]:
        """The prompts, `clients` at a time."""
        return [self.prompts[first : first + self.clients] for first in range(0, len(self.prompts), self.clients)]


@dataclass(frozen=True)
class Done:
    """How many tokens were generated, and how long all of the work took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Given:
    """The arguments of a runner. max_tokens: of a prompt and its answer together."""

    model: Path
    clients: int
    max_tokens: int
    threads: int
    mode: str

    def arguments(self) -> list[str]:
        """As a command line."""
        return [argument for key, value in asdict(self).items() for argument in (f"--{key}", str(value))]

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Given:
        """Parse a command line."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", type=Path, required=True)
        for name in ("clients", "max_tokens", "threads"):
            parser.add_argument(f"--{name}", type=int, required=True)
        parser.add_argument("--mode", default="")
        return cls(**vars(parser.parse_args(arguments)))


Generate = Callable[[Work], int]
"""Does the work and returns the number of tokens that were generated."""


@dataclass(frozen=True)
class Ready:
    """An engine with its model. precision: of the numbers that its linear layers multiply: "bf16", "f32" or "int8"."""

    generate: Generate
    precision: str


@dataclass(frozen=True)
class About:
    """The loaded engine: its precision as `Ready` has it, and the versions of its packages."""

    precision: str
    versions: dict[str, str]


Loaded = Callable[[Given], AbstractContextManager[Ready]]
"""Loads the model, and lets go of it in the end."""


def serve(loaded: Loaded, packages: Sequence[str] = ()) -> None:
    """Be a runner: load the model; then work until standard input ends.

    Whatever the engine prints goes to standard error. packages: those whose versions are reported.
    """
    answers = _take_stdout()
    try:
        with loaded(Given.from_arguments(sys.argv[1:])) as ready:
            about = About(ready.precision, {package: version(package) for package in packages})
            _say(answers, {"about": asdict(about)})
            for line in sys.stdin:
                work = Work.from_line(line)
                began = time.perf_counter()
                tokens = ready.generate(work)
                _say(answers, asdict(Done(tokens, time.perf_counter() - began)))
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def _take_stdout() -> TextIO:
    """The real standard output; from here on, file descriptor 1 is standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
