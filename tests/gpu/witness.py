"""One backend's greedy answers from a process of its own, where the environment decides what the library does:
`python -m tests.gpu.witness SPEC.json ANSWERS.json TOKENS PROMPTS`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from engine.config import ModelSpec
from tests.gpu.answers import Answers, ask, prompts
from tests.gpu.models import TINY


def save_spec(spec: ModelSpec, file: Path) -> None:
    """Write what the process is to load."""
    file.write_bytes(msgspec.json.encode(spec, enc_hook=str))


def read_answers(file: Path) -> Answers:
    """What the process found."""
    return msgspec.json.decode(file.read_bytes(), type=Answers)


def main(arguments: list[str]) -> None:
    """Load, ask, save."""
    spec_file, answers_file, tokens, count = arguments
    spec = msgspec.json.decode(Path(spec_file).read_bytes(), type=ModelSpec, dec_hook=lambda kind, value: kind(value))
    answers = ask(spec, prompts(int(count), TINY.vocab), int(tokens))
    Path(answers_file).write_bytes(msgspec.json.encode(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
