"""Our paged attention in the place where the library looks for flash-attn's.

The library batches only where its module `attn` has found flash-attn; what it asks of it are three functions and four
flags, which are set here after the import. Its other attentions are never used: the one over torch's SDPA is not
causal (attn.py:889).
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from engine.backends.common.exllama_memory import PAGE_TOKENS
from engine.backends.paged_attention.interface import PREPARED_ROWS, CompiledAttention, PagedAttention
from engine.errors import UnsupportedModel

if TYPE_CHECKING:
    from engine.backends.exllamav2.packed_cache import PackedReads


def install(attn: ModuleType, model: ModuleType, paged: PagedAttention) -> FlashAttention:
    """Make `exllamav2.attn` and `exllamav2.model` compute with `paged` instead of flash-attn. Returns what they call
    now."""
    attention = FlashAttention(paged)
    _set_functions(attn, attention.dense, attention.paged_with_cache, attention.ragged)
    _set_flags(attn, model, window=True, softcap=True)
    return attention


def install_flash(attn: ModuleType, model: ModuleType) -> None:
    """Give `exllamav2.attn` the real flash-attn, whatever an earlier load gave it. Raises ImportError without one."""
    flash_attn = importlib.import_module("flash_attn")
    _set_functions(
        attn, flash_attn.flash_attn_func, flash_attn.flash_attn_with_kvcache, flash_attn.flash_attn_varlen_func
    )
    parameters = inspect.signature(flash_attn.flash_attn_func).parameters
    _set_flags(attn, model, window="window_size" in parameters, softcap="softcap" in parameters)


def model_needs(config: Any) -> dict[str, Any]:
    """Return what a model needs of its attention, by the library's config, as `paged_attention.probe.probe` takes
    it."""
    arch = config.arch.lm
    windowed = config.sliding_window and (arch.swa or arch.alternating_swa)
    return {
        "page_tokens": PAGE_TOKENS,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "softcap": config.attn_logit_softcapping or 0.0,
        "window": config.sliding_window + 1 if windowed else None,
    }


def model_windows(config: Any) -> set[int | None]:
    """Return the windows of a model's layers, by the library's config."""
    window = model_needs(config)["window"]
    return {window, None} if config.arch.lm.alternating_swa else {window}


def prepare(
    paged: PagedAttention, config: Any, devices: Sequence[torch.device], report: Callable[[int, int], None]
) -> None:
    """Compile the kernels of `paged` for a model of the library's `config`, on each of `devices`: of calls that append,
    and of those over pages in a row, where the library has appended."""
    if not isinstance(paged, CompiledAttention):
        return
    needs = model_needs(config)
    windows = model_windows(config)
    for number, (device, appends) in enumerate(itertools.product(devices, (True, False))):
        q, k, v = (
            torch.zeros(PREPARED_ROWS, heads, config.head_dim, dtype=torch.float16, device=device)
            for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        )
        pages = torch.zeros(2, 1, PAGE_TOKENS, *k.shape[1:], dtype=torch.float16, device=device)

        def report_all(done: int, total: int, before: int = number) -> None:
            report(before * total + done, 2 * len(devices) * total)

        new = (k, v) if appends else (None, None)
        paged.prepare(q, *new, *pages, windows=windows, softcap=needs["softcap"], varlen=False, report=report_all)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """The three functions of flash-attn that the library calls, with flash-attn's names of arguments.

    packed: what reads packed caches as they are, by the addresses of the pages of 16 bits that stand for them. It holds
    none, so that a cache ends with its model.
    """

    paged: PagedAttention
    packed: MutableMapping[int, PackedReads] = field(default_factory=WeakValueDictionary)

    def register(self, reads: PackedReads) -> None:
        """Have `reads` attend over its cache from now on."""
        self.packed.update(dict.fromkeys(reads.addresses, reads))

    def paged_with_cache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        """`flash_attn_with_kvcache`: q [rows, new, heads, dim] over pages [pages, 256, kv_heads, dim], appending k and
        v in place where they are given; where they are not, they lie in the pages and cache_seqlens counts them."""
        _require_causal(causal)
        reads = self.packed.get(k_cache.data_ptr()) if self.packed else None
        attend = self.paged if reads is None else reads.attend
        return attend(
            q,
            k,
            v,
            k_cache,
            v_cache,
            cache_seqlens,
            block_table,
            scale=softmax_scale,
            window=_window(window_size),
            softcap=softcap,
        )

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        """`flash_attn_func`: q [rows, new, heads, dim] over k, v [rows, total, kv_heads, dim], which may be slices of a
        larger cache; the last query sees the last key. The library measures memory with it while it loads."""
        _require_causal(causal)
        return dense_attention(q, k, v, scale=softmax_scale, window=_window(window_size), softcap=softcap)

    def ragged(self, *_args: object, **_kwargs: object) -> Tensor:
        """`flash_attn_varlen_func`, which only vision towers call: refused, as images are not taken."""
        raise UnsupportedModel("vision towers are not supported: text only")


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float) -> Tensor:
    """Causal attention of q [rows, new, heads, dim] over k, v [rows, total, kv_heads, dim], aligned at the last token.

    window: keys that a query sees, its own among them; None is all.  softcap: as in Gemma 2 (arXiv:2408.00118, 2.2);
    0.0 is off. Returns [rows, new, heads, dim], contiguous.
    """
    groups = q.shape[2] // k.shape[2]
    queries = q.transpose(1, 2)
    keys, values = (each.transpose(1, 2).repeat_interleave(groups, dim=1) for each in (k, v))
    new, total = queries.shape[2], keys.shape[2]
    narrow = window is not None and window < total
    if softcap:
        visible = _visible(new, total, window, q.device)
        heads = [
            _capped(queries[:, i], keys[:, i], values[:, i], visible, scale, softcap) for i in range(queries.shape[1])
        ]
        return torch.stack(heads, dim=2)
    if new == total and not narrow:
        out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    else:
        mask = None if new == 1 and not narrow else _visible(new, total, window, q.device)
        out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).contiguous()


def _capped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float) -> Tensor:
    """One head, [rows, tokens, dim]: a head at a time, so that no [heads, new, total] scores are ever held."""
    scores = torch.tanh((q.float() @ k.float().mT) * (scale / softcap)) * softcap
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ v.float()).to(q.dtype)


def _visible(new: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """[new, total]: which keys each query sees."""
    seen = torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
    return seen if window is None else seen.triu(total - new - window + 1)


def _window(size: tuple[int, int]) -> int | None:
    """Keys that a query sees: flash-attn counts those to its left, -1 being all, and the query's own comes on top."""
    return None if size[0] < 0 else size[0] + 1


def _require_causal(causal: bool) -> None:
    if not causal:
        raise UnsupportedModel("only causal attention is supported: text only")


def _set_functions(attn: ModuleType, dense: object, paged: object, ragged: object) -> None:
    attn.flash_attn_func = dense  # type: ignore[attr-defined]
    attn.flash_attn_with_kvcache = paged  # type: ignore[attr-defined]
    attn.flash_attn_varlen_func = ragged  # type: ignore[attr-defined]


def _set_flags(attn: ModuleType, model: ModuleType, *, window: bool, softcap: bool) -> None:
    """The library's module `model` has its own copy of the first."""
    attn.has_flash_attn = True  # type: ignore[attr-defined]
    attn.has_flash_attn_with_paged = True  # type: ignore[attr-defined]
    attn.has_flash_attn_with_window = window  # type: ignore[attr-defined]
    attn.has_flash_attn_with_softcap = softcap  # type: ignore[attr-defined]
    model.has_flash_attn = True  # type: ignore[attr-defined]
