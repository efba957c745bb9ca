"""How a key or value head lies in a page: plain, or as codes of 8 or 4 bits with their scales. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.config import CacheBits
from engine.errors import InsufficientMemory, InvalidRequest

SCALE_BYTES = 2
"""A scale is a float16."""

_LARGEST_GROUPS: Mapping[CacheBits, int] = MappingProxyType({8: 64, 4: 32})
_DIVISOR = 8


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """One head of one token: its elements, or codes of `bits` bits each and then a scale for each `group` of them.

    bits: 16 stands for plain elements of the dtype that computes.  itemsize: bytes of such an element.
    """

    head_dim: int
    bits: CacheBits
    itemsize: int

    @property
    def is_quantised(self) -> bool:
        """True if elements are stored as codes."""
        return self.bits != 16

    @property
    def hadamard_size(self) -> int:
        """Adjacent elements that one Hadamard rotation mixes before they are rounded: all where their number is a
        power of two, else the largest power that divides it."""
        return max(1, self.head_dim & -self.head_dim)

    @property
    def group(self) -> int:
        """Adjacent elements that share a scale."""
        return min(_LARGEST_GROUPS[self.bits], self.hadamard_size)

    @property
    def code_bytes(self) -> int:
        """Bytes of a head's elements without scales."""
        return self.head_dim * self.bits // 8 if self.is_quantised else self.head_dim * self.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of a head in a page."""
        return self.code_bytes + (self.head_dim // self.group * SCALE_BYTES if self.is_quantised else 0)

    @property
    def copied_bytes(self) -> int:
        """Bytes of a head outside of the pages while it is read: as stored, and decoded."""
        return self.head_bytes + (self.head_dim * (self.itemsize + 1) if self.is_quantised else 0)


@dataclass(frozen=True, slots=True)
class ApartCodes:
    """One head of one token in the packed caches of exllamav2: codes above zero, 2 ** (bits - 1) standing for zero, and
    a float16 scale for each 32 elements in a tensor of its own.

    A code of 8 bits is a byte; byte i of 4 bits has element 2 i in its lower half and 2 i + 1 in its upper. Each 64
    elements were rotated before, those at even and at odd places apart, by a Hadamard matrix of ones; decoding rotates
    them back and divides by 32.
    bits, v_bits: of a key's code and of a value's: 8 and 8, 8 and 4 (the "6 bits" of the cache), or 4 and 4.
    """

    head_dim: int
    bits: int
    v_bits: int

    @property
    def group(self) -> int:
        """Adjacent elements that share a scale."""
        return 32

    @property
    def head_bytes(self) -> int:
        """Bytes of a key's codes."""
        return self.head_dim * self.bits // 8


def refuse_format(head_dim: int, bits: CacheBits) -> None:
    """Raise InvalidRequest where heads of `head_dim` elements cannot be kept in `bits` bits."""
    if bits != 16 and bits not in _LARGEST_GROUPS:
        raise InvalidRequest(
            f"cache_bits is {bits}; the torch backend keeps keys and values in 16, 8 or 4 bits",
            param="cache_bits",
            value=bits,
        )
    if bits != 16 and head_dim % _DIVISOR:
        raise InvalidRequest(
            f"cache_bits is {bits}; heads of {head_dim} elements, no multiple of {_DIVISOR}, need 16 bits",
            param="cache_bits",
            value=bits,
        )


# How many KV pages to allocate: those that placement or a person asked for; else what is free decides.

TYPICAL_TOKENS = 2048
"""Tokens of KV that one running request gets on average by default."""

CPU_SHARE = 0.25
"""Of the free RAM: the rest is for other programs, other workers and the working memory of a step."""

CUDA_SHARE = 0.8
"""Of what the weights left free on the device: the rest is head-room for activations, logits and sampling."""

_MIB = 2**20


def default_kv_tokens(max_prompts: int, max_model_len: int, *, fills_device: bool) -> int:
    """Return the most tokens that KV pages hold where nothing is asked: as many as `max_prompts` requests can have on a
    device that they may fill; else TYPICAL_TOKENS for each, and one request of max_model_len at least."""
    if fills_device:
        return max_prompts * max_model_len
    return max(max_prompts * min(max_model_len, TYPICAL_TOKENS), max_model_len)


def kv_pages(
    *,
    asked_tokens: int | None,
    max_prompts: int,
    max_model_len: int,
    page_tokens: int,
    bytes_per_token: int,
    free_bytes: int,
    share: float,
    fills_device: bool = False,
) -> int:
    """Pages that hold `asked_tokens`, as they are; or, where nothing is asked, `default_kv_tokens`, as far as `share`
    of `free_bytes` goes.

    Raises InsufficientMemory where that share holds less than one request of TYPICAL_TOKENS (or max_model_len).
    """
    if asked_tokens is not None:
        return max(1, -(-asked_tokens // page_tokens))
    typical = min(max_model_len, TYPICAL_TOKENS)
    least_pages = -(-typical // page_tokens)
    wanted_pages = -(-default_kv_tokens(max_prompts, max_model_len, fills_device=fills_device) // page_tokens)
    page_bytes = bytes_per_token * page_tokens
    possible_pages = int(free_bytes * share) // page_bytes
    if possible_pages < least_pages:
        needed_bytes = int(least_pages * page_bytes / share)
        raise InsufficientMemory(
            f"the KV pages of one request of {typical} tokens need {needed_bytes // _MIB} MiB free (they use "
            f"{share:.0%}), {free_bytes // _MIB} MiB are",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            short_bytes=needed_bytes - free_bytes,
        )
    return min(wanted_pages, possible_pages)
