"""Whether a model's answers depend on nothing but themselves: every row of a batch computed by one fixed sequence of
operations, whatever the other rows, the chunks in which its sequence came, and the threads.

Our own kernels do; torch's choose theirs by the size of the batch. So a model is deterministic where the kernels
compute all of it, which is known once it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.backends.paged_attention.choose import Choice
from engine.backends.torch.model.decoder import Block, Decoder
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp
from engine.backends.torch.native.layer import NativeLinear
from engine.errors import InvalidRequest

PARAM = "deterministic"


def refuse_undetermined(decoder: Decoder, attention: Choice) -> None:
    """Raise InvalidRequest, naming what torch computes, unless every row's result is its own affair."""
    reason = next(_undetermined(decoder, attention), "")
    if reason:
        raise InvalidRequest(f"{PARAM} cannot be honoured: {reason}", param=PARAM)


def refuse_adapters() -> InvalidRequest:
    """Why no adapter can be attached beside a deterministic model."""
    return InvalidRequest(
        f"adapters cannot be attached where {PARAM} is set: torch computes them, by the size of the batch; one can be "
        "merged into the weights with lora",
        param=PARAM,
    )


def _undetermined(decoder: Decoder, attention: Choice) -> Iterator[str]:
    """What depends on the batch, in words."""
    if attention.name != "native":
        yield f"torch attends by gathering pages ({attention.reason})"
    for stage in decoder.stages:
        for layer, block in enumerate(stage.blocks, stage.first_layer):
            if (what := _of_block(block)) is not None:
                yield f"torch computes {what} of layer {layer}, not the native kernels"
    if not isinstance(decoder.head, NativeLinear):
        yield "torch computes the head, not the native kernels"
    if decoder.config.traits.logit_cap:
        yield "torch caps this model's logits"


def _of_block(block: Block) -> str | None:
    """What of a block torch computes by the size of the batch; None where nothing. Its norms are sums over single rows,
    and what it adds is rounded once."""
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
    return next((what for what, linear in parts if not isinstance(linear, NativeLinear)), None)
