"""Check of a GGUF file's tensors against its own metadata, from its header alone."""

from __future__ import annotations

from engine.backends.common.model_config import ModelConfig
from engine.backends.common.tensor_shapes import iterate_shapes
from engine.config import quote_value
from engine.errors import ModelLoadFailed
from engine.models.gguf.file import GgufModel


def refuse_tensors(model: GgufModel, config: ModelConfig) -> None:
    """Raise ModelLoadFailed for the first tensor of `config` that the file lacks, or has in another shape."""
    pieces, file = model.pieces, quote_value(model.header.file.name)
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
