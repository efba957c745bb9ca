"""Bytes of weights and KV caches: what the library will allocate, worked out before it does. Pure; no torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from engine.backends.common.kv_format import TYPICAL_TOKENS
from engine.backends.common.step_memory import split_keys_bytes
from engine.config import CacheBits
from engine.errors import InsufficientMemory
from engine.models.headers import TensorHeader

PAGE_TOKENS = 256
"""Tokens per KV page of the library; not a choice."""

PACKED_ROWS = 32
"""Max rows of a step that exllamav2 multiplies with quantised weights as they are packed (MAX_Q_GEMM_ROWS in its
config.h). In a step of more it unpacks each matrix to 16 bits first. A sequence is a row, as is each draft token."""

CACHE_SHARE = Fraction(9, 10)
"""Of the memory that weights and work space leave: the rest is head-room for activations and fragmentation."""

_FIXED_WORK_BYTES = 512 << 20
"""CUDA context growth, the library's hard reserve of 256 MiB while it splits, and its small buffers."""

_MAX_UNPACKED_ELEMENTS = 512 << 20
_ELEMENT_BYTES = {16: Fraction(2), 8: Fraction(17, 16), 6: Fraction(13, 16), 4: Fraction(9, 16)}
_PACKED_HELPERS = (
    *(".q_scale", ".q_scale_max", ".q_groups", ".q_group_map", ".q_perm", ".q_invperm"),  # exl2
    *(".suh", ".svh", ".su", ".sv", ".mcg", ".mul1"),  # exl3
    *(".qzeros", ".scales", ".g_idx"),  # gptq
)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a cache, which decides its size: layers, KV heads per layer, elements per head, bits per element."""

    layers: int
    kv_heads: int
    head_dim: int
    bits: CacheBits

    @property
    def layer_page_bytes(self) -> int:
        """Keys and values of one page in one layer. Packed elements carry a 2-byte scale per 32 of them; 6 bits are
        8-bit keys and 4-bit values."""
        elements = 2 * PAGE_TOKENS * self.kv_heads * self.head_dim
        return math.ceil(elements * _ELEMENT_BYTES[self.bits])

    @property
    def page_bytes(self) -> int:
        """Keys and values of one page in all layers."""
        return self.layers * self.layer_page_bytes

    @property
    def unpacked_page_bytes(self) -> int:
        """Bytes that a packed cache adds per page on each device: one layer's keys and values in 16 bits."""
        return 0 if self.bits == 16 else 2 * 2 * PAGE_TOKENS * self.kv_heads * self.head_dim


def page_bytes_by_device(shape: CacheShape, layers_by_device: Mapping[int, int]) -> dict[int, int]:
    """Bytes that one page takes on each device, given how many layers each holds."""
    return {
        device: layers * shape.layer_page_bytes + shape.unpacked_page_bytes
        for device, layers in layers_by_device.items()
        if layers
    }


def work_bytes(
    *, hidden_size: int, intermediate_size: int, vocab_size: int, chunk_tokens: int, triton_head_dim: int = 0
) -> int:
    """An upper estimate of what a device needs besides weights and cache: the buffer into which the largest matrix is
    unpacked, the states of one chunk of `chunk_tokens`, and what attention with Triton keeps for heads of
    `triton_head_dim` elements (0: another attention)."""
    unpacked = 2 * min(hidden_size * max(vocab_size, intermediate_size), _MAX_UNPACKED_ELEMENTS)
    states = 2 * chunk_tokens * (6 * hidden_size + 3 * intermediate_size)
    split_keys = split_keys_bytes(triton_head_dim) if triton_head_dim else 0
    return unpacked + states + split_keys + _FIXED_WORK_BYTES


def unpacking_warning(max_prompts: int, elements: int) -> str:
    """Return the cost of `max_prompts` requests at once with exllamav2 and `elements` quantised weights, as a sentence;
    "" for none. Each weight that it unpacks is written and read in 16 bits."""
    if max_prompts <= PACKED_ROWS:
        return ""
    return (
        f"max_prompts is {max_prompts}: a step of more than {PACKED_ROWS} requests unpacks all weights to 16 bits on "
        f"exllamav2, {4 * elements / 2**30:.1f} GiB of memory traffic more."
    )


def cache_pages(
    *,
    asked_tokens: int | None,
    max_prompts: int,
    max_model_len: int,
    page_bytes: Mapping[str, int],
    free_bytes: Mapping[str, int],
) -> int:
    """Pages of the cache: those that hold `asked_tokens`; or, where nothing is asked, pages for `max_prompts` requests
    of up to TYPICAL_TOKENS and for one of max_model_len at least, as far as CACHE_SHARE of each device's free bytes
    goes (`page_bytes`: what a page takes of each).

    Raises InsufficientMemory where a device cannot hold one request of TYPICAL_TOKENS (or max_model_len).
    """
    if asked_tokens is not None:
        return max(1, -(-asked_tokens // PAGE_TOKENS))
    least_pages = -(-min(max_model_len, TYPICAL_TOKENS) // PAGE_TOKENS)
    wanted = max(max_prompts * least_pages, -(-max_model_len // PAGE_TOKENS))
    for device, each in page_bytes.items():
        possible = int(free_bytes[device] * CACHE_SHARE) // each
        if possible < least_pages:
            raise _cache_does_not_fit(device, math.ceil(least_pages * each / CACHE_SHARE), free_bytes[device])
        wanted = min(wanted, possible)
    return wanted


def module_bytes(tensors: Mapping[str, TensorHeader], modules: Sequence[Sequence[str]]) -> list[int]:
    """Bytes of each of the library's modules, in load order. modules: the key prefixes that each reads.

    A tensor belongs to the module with the longest prefix of its name, to the first of those that share one; what
    belongs to none (names that the library translates) is spread evenly, so that the sum is always that of the files.
    """
    owner: dict[str, int] = {}
    for number, keys in enumerate(modules):
        for key in keys:
            owner.setdefault(key, number)
    sizes = [0] * len(modules)
    unowned = 0
    for name, tensor in tensors.items():
        key = name
        while key and key not in owner:
            key = key.rpartition(".")[0]
        if key:
            sizes[owner[key]] += tensor.stored_bytes
        else:
            unowned += tensor.stored_bytes
    return [size + unowned * (i + 1) // len(sizes) - unowned * i // len(sizes) for i, size in enumerate(sizes)]


def stored_bytes(tensors: Mapping[str, TensorHeader]) -> int:
    """Bytes of all tensors as they lie in their files."""
    return sum(tensor.stored_bytes for tensor in tensors.values())


def loaded_bytes(tensors: Mapping[str, TensorHeader]) -> int:
    """Bytes of all tensors as the library keeps them: floats of 32 bits become ones of 16."""
    return sum(tensor.stored_bytes // (2 if tensor.dtype == "F32" else 1) for tensor in tensors.values())


def parameters(tensors: Mapping[str, TensorHeader]) -> int:
    """How many weights of the model the stored tensors stand for; packed ones stand for more than their elements."""
    return sum(_parameters(name, tensor, tensors) for name, tensor in tensors.items())


def active_parameters(tensors: Mapping[str, TensorHeader], *, experts: int, per_token: int) -> int:
    """Those that a token is computed with: of a layer's experts, `per_token`."""
    every = parameters(tensors)
    if not per_token or experts <= per_token:
        return every
    of_experts = parameters({name: each for name, each in tensors.items() if ".experts." in name})
    return every - of_experts * (experts - per_token) // experts


def _parameters(name: str, tensor: TensorHeader, tensors: Mapping[str, TensorHeader]) -> int:
    stem, _, kind = name.rpartition(".")
    if kind == "q_weight":  # exl2: [packed rows, columns]; its permutation has one entry per row
        rows = tensors.get(f"{stem}.q_invperm")
        return rows.elements * tensor.shape[-1] if rows and tensor.shape else 0
    if kind == "trellis":  # exl3: [tiles of rows, tiles of columns, words of a tile], of 16 x 16 weights
        return 256 * math.prod(tensor.shape[:2])
    if kind == "qweight":  # gptq: eight 4-bit values in each 32-bit word
        return tensor.elements * 8
    return 0 if name.endswith(_PACKED_HELPERS) else tensor.elements


def _cache_does_not_fit(device: str, needed_bytes: int, free_bytes: int) -> InsufficientMemory:
    return InsufficientMemory(
        f"the KV pages of one request need {needed_bytes // _MIB} MiB on {device}, "
        f"{max(free_bytes, 0) // _MIB} MiB are free: reduce the cache bits or max_model_len",
        device=device,
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
        short_bytes=needed_bytes - free_bytes,
    )
