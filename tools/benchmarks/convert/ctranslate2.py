"""To CTranslate2's format, by its own converter. weights: int8 or float32."""

from __future__ import annotations

import json
from pathlib import Path

from ctranslate2.converters import TransformersConverter

from tools.benchmarks.convert.command import run


def convert(model: Path, to: Path, weights: str) -> None:
    """Convert; special tokens that the model lacks are named after one that it has, as the library reads no null."""
    TransformersConverter(str(model)).convert(str(to), quantization=weights)
    file = to / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {key: config["eos_token"] for key in ("bos_token", "unk_token") if config.get(key) is None}
    file.write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    run(convert)
