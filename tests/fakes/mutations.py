"""What becomes of files that were whole: values replaced by what no reader expects, and bytes changed, by a seed."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 10_001, 2**31, 2**53, 2**63 - 1, 2**63, 10**40, 10**300, -(10**40)),
    *(0.0, -0.0, 0.5, 1e-300, 1e12, 1e300, -1e300),
    *(
        "",
        "x",
        "\x1b[31m",
        "\u202e",
        "\ud800",
        "é" * 50,
        "9" * 5000,
        "../../etc/passwd",
        "model.layers.9",
        "(a+)+$",
    ),
    *([], [0], [[]], ["x"] * 50, [1] * 9, [None, {}, []], {}, {"": {}}, {"type": "x"}, {"rope_type": "yarn"}),
)
"""Values that a reader may not expect where they are."""


def changed(value: Any, random: Random, times: int = 1) -> Any:
    """`value`, which is JSON, with so many of the values in it replaced, removed, doubled or swapped."""
    document = json.loads(json.dumps(value))
    for _ in range(times):
        places = list(_places(document))
        if not places:
            return deepcopy(random.choice(ODD))
        holder, key = random.choice(places)
        match random.randrange(5):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1:
                holder[key] = [holder[key]] * random.choice((1, 2, 30))
            case 2:
                other, its_key = random.choice(places)
                holder[key] = json.loads(json.dumps(other[its_key])) if its_key in _keys(other) else None
            case _:
                holder[key] = deepcopy(random.choice(ODD))
    return document


def damaged(content: bytes, random: Random, times: int = 1) -> bytes:
    """`content` with so many of its bytes changed, removed or doubled."""
    found = bytearray(content)
    for _ in range(times):
        at = random.randrange(len(found) + 1)
        match random.randrange(4):
            case 0:
                del found[at : at + random.choice((1, 2, 50))]
            case 1:
                found[at:at] = found[at : at + random.choice((1, 8, 200))]
            case 2:
                found[at : at + 1] = bytes([random.randrange(256)])
            case _:
                found[at:at] = random.choice((b"\0", b'"', b"{", b"[", b"]", b",", b"\xff", b"9" * 40, b"\\u0000"))
    return bytes(found)


def _places(value: Any) -> Any:
    """Every value within another, as what holds it and its key there."""
    stack = [value]
    while stack:
        holder = stack.pop()
        for key in _keys(holder):
            yield holder, key
            if isinstance(holder[key], dict | list):
                stack.append(holder[key])


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder))) if isinstance(holder, list) else []
