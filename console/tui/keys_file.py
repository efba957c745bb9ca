"""keys.toml: a person's own keys, by the ids of what they do. `ericllm keys` prints all of them.

"workers.more" = "w"
"requests.filter" = ["slash", "ctrl+f"]
"""

from __future__ import annotations

import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from platformdirs import user_config_path
from textual.dom import DOMNode
from textual.keys import KEY_NAME_REPLACEMENTS, Keys, key_to_character

from console.settings.values import did_you_mean
from console.text import class_title
from console.tui.binding_index import DeclaredBinding

_MODIFIERS = frozenset({"ctrl", "shift", "alt", "super", "hyper", "meta"})
_NAMED = frozenset({key.value for key in Keys} | set(KEY_NAME_REPLACEMENTS.values()))

Owner = type[DOMNode] | None
Meets = Callable[[Owner, Owner], bool]


@dataclass(frozen=True, slots=True)
class KeysFile:
    """Contents of a keys.toml: keys by id, as in Textual's keymap; and a sentence for each mistake."""

    keys: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def keys_path() -> Path:
    """Where a person's own keys are."""
    return user_config_path("ericllm") / "keys.toml"


def read_keys(path: Path) -> KeysFile:
    """The file as it stands, nothing where there is none; a mistake in the TOML is the one problem it has."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return KeysFile()
    except (OSError, ValueError) as error:
        return KeysFile(problems=(f"it cannot be read: {error}",))
    keys: dict[str, str] = {}
    problems: list[str] = []
    for name, value in _flat(tables):
        listed = value if isinstance(value, list) else [value]
        if not listed or not all(isinstance(key, str) and key.strip() for key in listed):
            problems.append(f"{name}: a key is a name such as {_quote('ctrl+k')}, or a list of them")
        else:
            keys[name] = ",".join(_long(part) for key in listed for part in _split(key))
    return KeysFile(keys, tuple(problems))


def check_keys(file: KeysFile, bound: Sequence[DeclaredBinding], meets: Meets) -> KeysFile:
    """The file without what cannot be honoured, with a sentence for each: unknown ids and keys, keys that clash."""
    ids = {each.id for each in bound}
    problems, good = list(file.problems), dict(file.keys)
    for name, keys in file.keys.items():
        if name not in ids:
            problems.append(f"{name} is not an action{did_you_mean(name, ids)}")
            del good[name]
        elif wrong := [key for key in keys.split(",") if not is_key(key)]:
            problems.append(f"{name}: {_quote(wrong[0])} is not a key{did_you_mean(wrong[0], _NAMED)}")
            del good[name]
    clashes = list(_clashes(good, bound, meets))
    for one, other, key in clashes:
        problems.append(f"{_quote(key)} is bound to both {one} and {other}")
    spoilt = {name for one, other, _ in clashes for name in (one, other)}
    return KeysFile({name: keys for name, keys in good.items() if name not in spoilt}, tuple(dict.fromkeys(problems)))


def is_key(key: str) -> bool:
    """Return whether a terminal could send such a key: "w", "ctrl+k", "f5", "question_mark"."""
    *modifiers, last = key.split("+") if not key.endswith("+") else (*key[:-1].split("+")[:-1], "plus")
    if not set(modifiers) <= _MODIFIERS:
        return False
    return len(last) == 1 or last in _NAMED or key_to_character(last) is not None


def sample(bound: Iterable[DeclaredBinding]) -> str:
    """A keys.toml in which every action stands commented out, with the keys that it has."""
    lines = [
        f"# Keys of the console. Save as {keys_path()} and uncomment lines to change.",
        '# A key is a name such as "w", "ctrl+k", "f5" or "question_mark"; several go into a list.',
        "# Changes apply within a second.",
    ]
    place: str | None = None
    seen: set[str] = set()
    for each in bound:
        if each.id in seen:
            continue
        seen.add(each.id)
        if (where := "Everywhere" if each.owner is None else class_title(each.owner.__name__)) != place:
            place = where
            lines += ["", f"# --- {place} " + "-" * max(3, 60 - len(place))]
        keys = ", ".join(map(_quote, each.keys))
        lines.append(f"# {_quote(each.id)} = {keys if len(each.keys) == 1 else f'[{keys}]'}  # {each.tooltip}")
    return "\n".join(lines) + "\n"


def _clashes(mine: Mapping[str, str], bound: Sequence[DeclaredBinding], meets: Meets) -> Iterator[tuple[str, str, str]]:
    """Pairs of ids that one key would mean in one place, and that key, where the file is to blame."""
    for one, other in combinations(bound, 2):
        if one.id == other.id or one.action == other.action or not {one.id, other.id} & set(mine):
            continue
        shared = _keys(one, mine) & _keys(other, mine)
        before = set(one.keys) & set(other.keys)
        if shared - before and meets(one.owner, other.owner):
            yield one.id, other.id, min(shared - before)


def _keys(bound: DeclaredBinding, mine: Mapping[str, str]) -> set[str]:
    return set(mine[bound.id].split(",") if bound.id in mine else bound.keys)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`workers.more = "w"` is a table in TOML, and an id here."""
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _split(keys: str) -> list[str]:
    return [keys.strip()] if len(keys.strip()) == 1 else [key.strip() for key in keys.split(",")]


def _long(key: str) -> str:
    """ "?" -> "question_mark"; names stay."""
    if len(key) != 1 or key.isalnum():
        return key
    name = unicodedata.name(key, key).lower().replace("-", "_").replace(" ", "_")
    return KEY_NAME_REPLACEMENTS.get(name, name)


def _quote(word: str) -> str:
    return f'"{word}"'
