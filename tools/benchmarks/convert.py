"""The model in the format of an engine that reads no safetensors, in the venv of that engine:
`python -m tools.benchmarks.convert ENGINE --model DIR --to DIR --weights W` makes a folder whole or not at all."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType


def to_openvino(model: Path, to: Path, weights: str) -> None:
    """By optimum's exporter: a model that can generate. weights: fp16, which are computed with in bfloat16, or int8."""
    exporter = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    task = ["--task", "text-generation-with-past", "--weight-format", weights]
    subprocess.run([*exporter, "--model", str(model), *task, str(to)], check=True)


def to_ctranslate2(model: Path, to: Path, weights: str) -> None:
    """By its own converter. Special tokens that the model lacks are named after one that it has, as the library reads
    no null. weights: int8 or float32."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(model)).convert(str(to), quantization=weights)
    file = to / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {key: config["eos_token"] for key in ("bos_token", "unk_token") if config.get(key) is None}
    file.write_text(json.dumps(config), encoding="utf-8")


def to_onnx(model: Path, to: Path, weights: str) -> None:
    """By the model builder of onnxruntime-genai. weights: fp32 or int4."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    paths = ["--input", str(model), "--output", str(to), "--cache_dir", str(to / "cache")]
    subprocess.run([*builder, *paths, "--precision", weights, "--execution_provider", "cpu"], check=True)
    shutil.rmtree(to / "cache", ignore_errors=True)


CONVERTERS: Mapping[str, Callable[[Path, Path, str], None]] = MappingProxyType(
    {"openvino": to_openvino, "ctranslate2": to_ctranslate2, "onnxruntime": to_onnx}
)


def main() -> None:
    """Convert."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=CONVERTERS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    given = parser.parse_args()
    partial: Path = given.to.with_name(f"{given.to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    CONVERTERS[given.engine](given.model, partial, given.weights)
    partial.rename(given.to)


if __name__ == "__main__":
    main()
