"""The built-in demo model. How it is made: `tools/demo_model`."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""The shipped Hugging Face folder: config.json, tokenizer.json, generation_config.json, model.safetensors."""


def model_path() -> Path:
    """Return the folder of the demo model; raises `FileNotFoundError` when the installation lacks it."""
    if not (MODEL_DIR / "model.safetensors").is_file():
        raise FileNotFoundError(f"the demo model is missing from this installation: {MODEL_DIR}")
    return MODEL_DIR
