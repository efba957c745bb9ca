"""Packed pages of the library's caches of 8, 6 and 4 bits, read by our attention as they are.

The library decodes a layer's pages to 16 bits before each attention, and packs the new tokens after it (cache.py:455,
cache_q.cuh). For steps of few tokens, decodes and drafts, our attention has the new tokens packed first, and then reads
all of them from the codes; the library's decoding is left out.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.backends.common.exllama_memory import PAGE_TOKENS
from engine.backends.common.kv_format import ApartCodes
from engine.backends.exllamav2.library import MAX_Q_SIZE
from engine.backends.torch_device import is_device_lost
from engine.errors import WorkerFailed, first_line

if TYPE_CHECKING:
    from engine.backends.paged_attention.triton_attention import TritonAttention

_logger = logging.getLogger(__name__)

CODE_BITS = {8: (8, 8), 6: (8, 4), 4: (4, 4)}
"""Bits of a key's and of a value's code, by the library's name for them."""

_ROTATED = 64
"""Elements that are rotated together, and never across heads if they divide a head."""
_TRIAL_TOKENS = 700
"""Enough to be split over programs, the last page in part."""
_TOLERANCE = 0.02
"""Of a row's largest value: the library decodes in float16, five roundings deep."""


class PackedReads:
    """Attention over one cache of the library's, put into its way by `engage`.

    Raises ValueError, with a clause that says why, for a cache that cannot be read so.
    """

    def __init__(self, cache: Any, paged: TritonAttention) -> None:
        if problem := _obstacle(cache):
            raise ValueError(problem)
        self._cache, self._paged = cache, paged
        self._form = ApartCodes(cache.head_dim, *CODE_BITS[cache.wbits])
        self._layers = [
            [_pages(each) for each in tensors]
            for tensors in zip(cache.key_states, cache.value_states, cache.key_scales, cache.value_scales, strict=True)
        ]
        self._rotations = {
            keys.device: (
                rotation(cache.head_dim, self._form.bits).div(8).to(keys),
                rotation(cache.head_dim, self._form.v_bits).T.div(32).contiguous().to(keys),
            )
            for keys, _ in cache.temp_tensors.values()
        }
        self._call: tuple[Any, ...] = ()
        self._is_stored = False

    def engage(self) -> None:
        """Have the library's attention leave decoding and packing to `attend`."""
        self._cache.get_kv_state, self._cache.store_kv_state = self._get, self._store

    @property
    def addresses(self) -> list[int]:
        """Of the key pages of 16 bits that the library hands to attention, one on each device."""
        return [keys.data_ptr() for keys, _ in self._cache.temp_tensors.values()]

    def _get(
        self,
        layer: int,
        batch: int,
        offset: int,
        width: int,
        page_size: int = 0,
        cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> Any:
        """`get_kv_state`, which decodes nothing for attention over pages: `attend` does, where it has to."""
        self._is_stored = False
        if not page_size:
            return self._decode(layer, batch, offset, width)
        self._call = layer, batch, width, cache_seqlens, block_table
        return self._decode(layer, batch, offset, 0, page_size, cache_seqlens, block_table)

    def _store(self, *call: Any) -> None:
        """`store_kv_state`, but for new tokens that `attend` has stored."""
        if not self._is_stored:
            self._pack(*call)
        self._is_stored = False

    def _decode(self, *call: Any) -> Any:
        return type(self._cache).get_kv_state(self._cache, *call)

    def _pack(self, *call: Any) -> None:
        type(self._cache).store_kv_state(self._cache, *call)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        k_pages: Tensor,
        v_pages: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float,
    ) -> Tensor:
        """`interface.PagedAttention` for the layer that the library has asked for last; k_pages, v_pages: its pages of
        16 bits, which are filled for longer steps alone."""
        layer, batch, width, before, table = self._call
        q_len = q.shape[1]
        if q_len > MAX_Q_SIZE:  # a block of rows would decode codes that others have decoded
            self._decode(layer, batch, 0, width, PAGE_TOKENS, before, table)
            return self._paged(
                q, k, v, k_pages, v_pages, lengths, block_table, scale=scale, window=window, softcap=softcap
            )
        if k is not None and v is not None:
            self._paged.append(k, v, k_pages, v_pages, lengths, block_table)
        self._pack(layer, batch, 0, q_len, PAGE_TOKENS, before, table)
        self._is_stored = True
        k_codes, v_codes, k_scales, v_scales = self._layers[layer]
        turn, turn_back = self._rotations[q.device]
        attended = self._paged.attend_apart(
            q @ turn,
            (k_codes, v_codes),
            (k_scales, v_scales),
            lengths,
            block_table,
            form=self._form,
            added=0 if k is None else q_len,
            scale=scale / 4,  # 8 of the 32 that a product of rotated heads is too large by are in `turn`
            window=window,
            softcap=softcap,
        )
        return attended @ turn_back

    # --- the trial --------------------------------------------------------------------------------------------------

    @torch.inference_mode()  # in which the library makes its caches while it loads
    def failure(self, heads: int, windows: set[int | None], softcap: float) -> str:
        """Return why it does not work with `heads` query heads, as a clause; "" where it gives what the library's
        decoding and our attention over 16 bits give, on each device. Also compiles the kernels that any call needs.

        Overwrites the first pages. Raises WorkerFailed where it loses a device.
        """
        layers = {each[0].device: number for number, each in enumerate(self._layers)}
        calls = itertools.product(layers.items(), windows, (1, 2, 4, MAX_Q_SIZE), (False, True))
        try:
            for (device, layer), window, q_len, appends in calls:
                off = self._difference(layer, heads, window, softcap, q_len, appends=appends)
                if not off <= _TOLERANCE:
                    return f"what was tried on {device} is off by {off:.3g}"
        except Exception as error:  # whatever a compiler, a driver or a library raises
            if is_device_lost(error):
                raise WorkerFailed(f"reading a packed KV cache broke {device}: {first_line(error)}") from error
            return f"what was tried on {device} failed: {type(error).__name__}: {first_line(error)}"
        finally:
            self._is_stored = False
        return ""

    def _difference(
        self, layer: int, heads: int, window: int | None, softcap: float, q_len: int, *, appends: bool
    ) -> float:
        """Return the largest difference, as a part of the largest value of its row, for a long sequence and one that
        has no token before."""
        k_pages, v_pages = (_pages(each) for each in self._temporary(layer))
        device, (pages, _, kv_heads, size) = k_pages.device, k_pages.shape
        width = min(-(-(_TRIAL_TOKENS + MAX_Q_SIZE) // PAGE_TOKENS), pages - 1)
        context = min(_TRIAL_TOKENS, width * PAGE_TOKENS - MAX_Q_SIZE)
        rows = [*range(width, 0, -1)], [0] * width
        table = torch.tensor(rows, dtype=torch.int32, device=device)
        before = torch.tensor([context, 0], dtype=torch.int32, device=device)
        generator = torch.Generator().manual_seed(q_len)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(k_pages)

        for each in (k_pages, v_pages):
            each[: width + 1] = drawn(width + 1, *each.shape[1:])
        self._pack(layer, 2, 0, context, PAGE_TOKENS, torch.zeros_like(before), table)
        q, k, v = (drawn(2, q_len, number, size) for number in (heads, kv_heads, kv_heads))
        options: dict[str, Any] = {"scale": size**-0.5, "window": window, "softcap": softcap}
        self._call, totals = (layer, 2, context, before, table), before + q_len
        k_new, v_new, lengths = (k, v, before) if appends else (None, None, totals)
        found = self.attend(q, k_new, v_new, k_pages, v_pages, lengths, table, **options).float()
        self._decode(layer, 2, 0, context + q_len, PAGE_TOKENS, totals, table)
        expected = self._paged(q, None, None, k_pages, v_pages, totals, table, **options).float()
        return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())

    def _temporary(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the pages of 16 bits into which the library decodes a layer."""
        keys, values = self._decode(layer, 1, 0, 0, PAGE_TOKENS)
        return keys, values


def read_packed(
    cache: Any,
    paged: TritonAttention,
    heads: int,
    windows: set[int | None],
    softcap: float,
    register: Callable[[PackedReads], None],
) -> None:
    """Have attention read `cache` as it is, and `register` what does; or log why the library decodes it. heads: query
    heads of the model.  windows, softcap: of its layers. Raises WorkerFailed where the trial loses a device."""
    try:
        reads = PackedReads(cache, paged)
        problem = reads.failure(heads, windows, softcap)
    except ValueError as error:
        problem = str(error)
    if problem:
        _logger.warning("exllamav2 decodes its packed KV cache in every layer and step: %s", problem)
        return
    reads.engage()
    register(reads)


def rotation(head_dim: int, bits: int) -> Tensor:
    """Return [D, D] of ones and minus ones: a row of heads times it is rotated as the library rotates keys, in the
    order of elements that `TritonAttention.attend_apart` has for codes of `bits` bits."""
    hadamard = torch.ones(1, 1)
    while len(hadamard) < _ROTATED // 2:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    whole = torch.block_diag(*[torch.kron(hadamard, torch.eye(2))] * (head_dim // _ROTATED))
    return whole if bits == 8 else torch.cat([whole[:, ::2], whole[:, 1::2]], 1)


def _obstacle(cache: Any) -> str:
    """Return why a cache of the library's cannot be read as it is, as a clause; "" where it can."""
    if not hasattr(cache, "wbits"):
        return "layers that are split over GPUs attend in the library's own code"
    if cache.head_dim % _ROTATED:
        return (
            f"heads of {cache.head_dim} elements, no multiple of {_ROTATED}, are rotated together with their neighbours"
        )
    if cache.q_block != 1:
        return (
            f"{cache.num_key_value_heads} key heads of {cache.head_dim} elements, no multiple of 512, are packed "
            f"together with those of other tokens"
        )
    if cache.max_seq_len < 2 * PAGE_TOKENS:
        return "one page has no room to try it out"
    return ""


def _pages(tensor: Tensor) -> Tensor:
    """Return [pages, 256, heads, n] of [1, tokens, heads, n]; bytes as int8."""
    pages = tensor.view(-1, PAGE_TOKENS, *tensor.shape[2:])
    return pages.view(torch.int8) if pages.dtype == torch.uint8 else pages
