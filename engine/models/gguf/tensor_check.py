"""Check of a GGUF file's tensors against its own metadata, from its header alone."""

from __future__ import annotations

from engine.backends.common.model_config import ModelConfig
from engine.backends.common.tensor_shapes import iterate_shapes
from engine.config import quote_value
from engine.errors import ModelLoadFailed, UnsupportedModel
from engine.models.gguf.file import GgufModel

_OF_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become part of the config."""


def refuse_tensors(model: GgufModel, config: ModelConfig) -> None:
    """Raise ModelLoadFailed for the first tensor of `config` that the file lacks, or has in another shape, and
    UnsupportedModel for one that `config` has no use for: what it would change is not computed."""
    pieces, file = model.pieces, quote_value(model.header.file.name)
    used: set[int] = set()
    for name, shape in iterate_shapes(config):
        piece = pieces.get(name)
        if piece is None:
            own = model.name_in_file(name)
            if own in model.tensors:
                found = "x".join(map(str, model.tensors[own].shape))
                raise ModelLoadFailed(
                    f"the tensor {own} in {file} is {found}, less than its architecture needs", tensor=own
                )
            raise ModelLoadFailed(f"{file} has no tensor {own}, which its architecture needs", tensor=own)
        if piece.shape != shape:
            own, whole = model.name_in_file(name), piece.shape_in_file(shape)
            found, wanted = ("x".join(map(str, each)) for each in (piece.tensor.shape, whole))
            raise ModelLoadFailed(f"the tensor {own} in {file} is {found}; its metadata makes it {wanted}", tensor=own)
        used.add(id(piece.tensor))
    for own, tensor in model.tensors.items():
        if id(tensor) not in used and own not in _OF_ROPE:
            own = quote_value(own)
            raise UnsupportedModel(f"{file} has a tensor {own}, which its architecture has no use for", tensor=own)
