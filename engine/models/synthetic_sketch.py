"""A synthetic model without its weights: config.json, the tokenizer, and safetensors that are a header and a hole."""

from __future__ import annotations

import json
import math
from pathlib import Path

from engine.models.synthetic import ITEM_BYTES, stored_shapes, synthetic_config
from engine.models.synthetic_tokenizer import write_tokenizer


def sketch_synthetic(shape: str, folder: Path) -> Path:
    """Write to `folder` what `make_synthetic` would, as far as it tells the model's size; no byte of a weight is
    written. Raises InvalidRequest where there is no such shape, OSError where the disk refuses."""
    config = synthetic_config(shape)
    vocab_size = config["vocab_size"]
    assert isinstance(vocab_size, int)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, size) in stored_shapes(shape).items():
        start, end = end, end + math.prod(size) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(file.tell() + end)
    write_tokenizer(folder, vocab_size=vocab_size)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
