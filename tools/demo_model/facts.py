"""Facts for the demo model: the TOML files of `tools/demo_model/facts/`, read into plain records."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTS_DIR = Path(__file__).resolve().parent / "facts"


@dataclass(frozen=True)
class Fact:
    """One thing worth knowing: ways to ask for it (phrases of `tools.demo_model.grammar`) and its answers.

    `about` holds noun phrases, `do` verb phrases; both are put into the shared question frames. `ask` holds
    whole questions. `weight` is the relative share of the corpus; `plain` questions get no lead-in or ending.
    """

    id: str
    answers: tuple[str, ...]
    about: tuple[str, ...] = ()
    do: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    weight: float = 1.0
    plain: bool = False


@dataclass(frozen=True)
class FollowUp:
    """A second question that makes sense only after one of the facts named in `after`."""

    after: tuple[str, ...]
    ask: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Frames:
    """Question frames around `{x}`, and what people put before and after a question."""

    about: tuple[str, ...]
    do: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class KnowledgeBase:
    """Everything the corpus is made from."""

    facts: tuple[Fact, ...]
    follow_ups: tuple[FollowUp, ...]
    frames: Frames
    systems: tuple[str, ...]
    classes: dict[str, list[str]]
    synonyms: dict[str, list[str]]


def load_knowledge(folder: Path = FACTS_DIR) -> KnowledgeBase:
    """Read every TOML file of `folder`, in name order; raises `ValueError` on a fact without questions."""
    facts: list[Fact] = []
    follow_ups: list[FollowUp] = []
    classes: dict[str, list[str]] = {}
    synonyms: dict[str, list[str]] = {}
    wrap: dict[str, list[str]] = {}
    systems: list[str] = []
    for path in sorted(folder.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        facts.extend(Fact(**_tuples(entry)) for entry in table.get("fact", ()))
        follow_ups.extend(FollowUp(**_tuples(entry)) for entry in table.get("follow", ()))
        classes.update(table.get("classes", {}))
        synonyms.update(table.get("synonyms", {}))
        wrap.update(table.get("wrap", {}))
        systems.extend(table.get("system", {}).get("prompts", ()))
    _check(facts, follow_ups)
    return KnowledgeBase(tuple(facts), tuple(follow_ups), Frames(**_tuples(wrap)), tuple(systems), classes, synonyms)


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


def _check(facts: list[Fact], follow_ups: list[FollowUp]) -> None:
    ids = {fact.id for fact in facts}
    if len(ids) != len(facts):
        raise ValueError("two facts share an id")
    for fact in facts:
        if not (fact.about or fact.do or fact.ask):
            raise ValueError(f"fact {fact.id!r} has no questions")
    for follow_up in follow_ups:
        unknown = set(follow_up.after) - ids
        if unknown:
            raise ValueError(f"a follow-up names unknown facts: {sorted(unknown)}")
