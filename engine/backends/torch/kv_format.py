"""How a key or value head lies in a page: plain, or as codes of 8 or 4 bits with their scales. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.config import CacheBits
from engine.errors import InvalidRequest

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
    def coded(self) -> bool:
        """Whether elements are kept as codes."""
        return self.bits != 16

    @property
    def turned(self) -> int:
        """Adjacent elements that are turned together before they are rounded: all where their number is a power of
        two, else the largest power that divides it."""
        return max(1, self.head_dim & -self.head_dim)

    @property
    def group(self) -> int:
        """Adjacent elements that share a scale."""
        return min(_LARGEST_GROUPS[self.bits], self.turned)

    @property
    def code_bytes(self) -> int:
        """What the elements of a head take without scales."""
        return self.head_dim * self.bits // 8 if self.coded else self.head_dim * self.itemsize

    @property
    def head_bytes(self) -> int:
        """What a head takes in a page."""
        return self.code_bytes + (self.head_dim // self.group * SCALE_BYTES if self.coded else 0)

    @property
    def copied_bytes(self) -> int:
        """What a head takes outside of the pages while it is read: as it lies there, and decoded."""
        return self.head_bytes + (self.head_dim * (self.itemsize + 1) if self.coded else 0)


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
            f"cache_bits is {bits}; heads of {head_dim} elements, which {_DIVISOR} does not divide, can be kept in "
            "16 bits alone",
            param="cache_bits",
            value=bits,
        )
