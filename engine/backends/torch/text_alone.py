"""Checkpoints of multimodal models, seen as if they were those of their model of text."""

from __future__ import annotations

from dataclasses import replace

from engine.backends.torch.checkpoint import Checkpoint, TensorInfo

_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
"""What stands before the names of the text's tensors, as transformers writes them now and as it did, and what a model
of text alone has in its place."""


def text_alone(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint`, its model of text under the names that such a model has by itself."""
    found: dict[str, TensorInfo] = {}
    for name in checkpoint:
        for prefix, plain in _PREFIXES:
            if name.startswith(prefix):
                found[plain + name.removeprefix(prefix)] = replace(checkpoint.info(name), stored_as=name)
                break
    return checkpoint.with_pieces(found) if found else checkpoint
