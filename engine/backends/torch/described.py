"""What a load of the torch backend says of the model."""

from __future__ import annotations

from engine.backends.base import LoadedModel
from engine.backends.torch.draft_model import DraftModel
from engine.backends.torch.pages import PagePool
from engine.backends.torch.runner import ModelRunner


def described(
    runner: ModelRunner, pool: PagePool, kv_bytes: int, draft: DraftModel | None = None, *, step_s: float
) -> LoadedModel:
    """A model whose KV pages are allocated, and take so many bytes. The bytes are those of its draft model too."""
    return LoadedModel(
        backend="torch",
        architecture=runner.config.architecture,
        dtype=runner.dtype_name,
        devices=runner.devices,
        vocab_size=runner.config.vocab_size,
        max_model_len=runner.config.max_model_len,
        kv_tokens=pool.num_pages * pool.page_tokens,
        page_tokens=pool.page_tokens,
        weights_bytes=runner.weights_bytes,
        kv_bytes=kv_bytes,
        parameters=runner.parameters,
        active_parameters=runner.active_parameters,
        shared_bytes=runner.shared_bytes + (draft.runner.shared_bytes if draft is not None else 0),
        attention=runner.attention.name if runner.attention else "",
        attention_reason=runner.attention.reason if runner.attention else "",
        linear=runner.linear,
        native=runner.native,
        shares=runner.shares,
        adapters_per_request=True,
        hidden_size=runner.config.hidden_size,
        step_s=step_s,
    )
