"""Deterministic models: each row of a batch is computed by one fixed sequence of operations, whatever the other rows,
the chunks of its sequence, and the number of threads.

The native kernels do so; torch's choose operations by the size of the batch. So a model is deterministic where the
native kernels compute all of it, which is known once it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.backends.paged_attention.choose import Choice
from engine.backends.torch.model.decoder import Block, Decoder
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp
from engine.backends.torch.native.layer import NativeLinear
from engine.errors import InvalidRequest

PARAM = "deterministic"


def refuse_nondeterministic(decoder: Decoder, attention: Choice) -> None:
    """Raise InvalidRequest, naming what torch computes, unless the model is deterministic."""
    reason = next(_nondeterministic_parts(decoder, attention), "")
    if reason:
        raise InvalidRequest(f"{PARAM} is not supported: {reason}", param=PARAM)


def adapters_refusal() -> InvalidRequest:
    """Return the error for adapters of a deterministic model."""
    return InvalidRequest(
        f"adapters cannot be attached where {PARAM} is set, as torch computes them depending on the batch size; "
        "one can be merged into the weights with lora",
        param=PARAM,
    )


def _nondeterministic_parts(decoder: Decoder, attention: Choice) -> Iterator[str]:
    """Yield what depends on the batch, as clauses."""
    if attention.name != "native":
        yield f"torch attends by gathering pages ({attention.reason})"
    for stage in decoder.stages:
        for layer, block in enumerate(stage.blocks, stage.first_layer):
            if (part := _torch_part(block)) is not None:
                yield f"torch computes {part} of layer {layer}, not the native kernels"
    if not isinstance(decoder.head, NativeLinear):
        yield "torch computes the head, not the native kernels"
    if decoder.config.traits.logit_softcap:
        yield "torch caps this model's logits"


def _torch_part(block: Block) -> str | None:
    """Return the part of a block that torch computes depending on the batch size; None for none. Norms sum over single
    rows, and residual sums are rounded once."""
    mixture = block.mlp if isinstance(block.mlp, MixtureMlp) else None
    parts: list[tuple[str, object]] = [("the attention's projections", block.qkv), ("the attention's output", block.o)]
    if mixture is not None:
        parts.append(("the router", mixture.router))
        if mixture.shared is not None:
            return "the shared expert's weight"
    for mlp in mixture.experts if mixture is not None else (block.mlp,):
        if not isinstance(mlp, GatedMlp) or (block.fused is None and mlp.fused is None):
            return "the MLP's gate"
        parts.append(("the MLP", mlp.down))
    return next((part for part, linear in parts if not isinstance(linear, NativeLinear)), None)
