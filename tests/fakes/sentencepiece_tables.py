"""SentencePiece's table of characters and what stands for them (precompiled_charsmap), made without it."""

from __future__ import annotations

from collections.abc import Mapping

_BLOCK = 256
_LEAF, _VALUE = 1 << 8, 1 << 31


def charsmap(replacements: Mapping[str, str]) -> bytes:
    """Return the table: the size of a double-array trie (Darts-clone: units of 32 bits) and the trie, then the
    replacements, each with a 0 behind it. The children of a node are a block of 256 of their own."""
    texts, units = b"", [0] * _BLOCK
    nodes: dict[bytes, int] = {b"": 0}
    blocks: dict[bytes, int] = {}
    for text, replacement in sorted(replacements.items()):
        key = text.encode()
        for length in range(len(key)):
            prefix, child = key[:length], key[: length + 1]
            _open_block(units, nodes, blocks, prefix)
            if child not in nodes:
                nodes[child] = blocks[prefix] ^ key[length]
                units[nodes[child]] |= key[length]
        _open_block(units, nodes, blocks, key)
        units[nodes[key]] |= _LEAF
        units[blocks[key]] = _VALUE | len(texts)
        texts += replacement.encode() + b"\0"
    trie = b"".join(unit.to_bytes(4, "little") for unit in units)
    return len(trie).to_bytes(4, "little") + trie + texts


def _open_block(units: list[int], nodes: Mapping[bytes, int], blocks: dict[bytes, int], prefix: bytes) -> None:
    """Give a node its block of children, where it has none."""
    if prefix not in blocks:
        blocks[prefix] = len(units)
        units.extend([0] * _BLOCK)
        units[nodes[prefix]] |= (nodes[prefix] ^ blocks[prefix]) << 10
