"""What names and annotations of ours stand for, as far as a library's objects may be behind them.

A kind is a string: "module:Class" an object of that class; "class module:Class" the class; "module attn" a module;
"method module:Class.name"; "dict NAME" a dict with string keys; "[] KIND" several, "=> KIND" a callable that returns
one; "our Name" a class of ours; PLAIN something that is not the library's own; "? module:Class.name" something of the
library's that no table explains.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PLAIN = "plain"
_UNTYPED = {"Any", "ModuleType"}
_CONTAINERS = {"list", "tuple", "set", "dict", "Sequence", "Mapping", "Iterable", "Iterator", "Generator"}


@dataclass(frozen=True, slots=True)
class Use:
    """One thing asked of the library. owner: "module:Class", "module NAME" or "dict NAME".  call: how it is called."""

    where: str
    owner: str
    name: str
    call: tuple[int, tuple[str, ...]] | None = None
    starred: bool = False


@dataclass
class Findings:
    """Everything that was found in our sources. roots: those that some annotation needed.  unexplained: what a table
    has no row for.  unknown: attributes of things that are not known to be anybody's, by name, with the places."""

    uses: set[Use] = field(default_factory=set)
    roots: set[str] = field(default_factory=set)
    types: set[str] = field(default_factory=set)
    unexplained: set[str] = field(default_factory=set)
    unknown: dict[str, set[str]] = field(default_factory=dict)


class Ours:
    """Our own classes: the kinds of their fields, and of what their methods and properties return."""

    def __init__(self, findings: Findings, roots: Mapping[str, str]) -> None:
        self._findings, self._roots = findings, roots
        self._names: set[str] = set()
        self.members: dict[tuple[str, str], str | None] = {}
        self.functions: dict[str, str | None] = {}
        self.constants: dict[str, str] = {}

    def note_names(self, tree: ast.Module) -> None:
        """Classes, and constants that are strings."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._names.add(node.name)
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                self.constants |= {each.id: node.value.value for each in node.targets if isinstance(each, ast.Name)}

    def note_members(self, stem: str, tree: ast.Module) -> None:
        """What fields are annotated as, and what methods and functions return."""
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = self.kind(node.returns, f"{stem}: {node.name}()")
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in classes:
            for child in node.body:
                if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                    context = f"{stem}: {node.name}.{child.target.id}"
                    self.members[node.name, child.target.id] = self.kind(child.annotation, context)
                elif isinstance(child, ast.FunctionDef):
                    is_property = any(ast.unparse(each) == "property" for each in child.decorator_list)
                    returned = self.kind(child.returns, f"{stem}: {node.name}.{child.name}()")
                    self.members[node.name, child.name] = returned if is_property else f"=> {returned}"

    def kind(self, annotation: ast.expr | None, context: str) -> str | None:
        """What an annotation says; for `Any`, the root of `context`, which is reported where there is none."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.Name):
            if annotation.id in _UNTYPED:
                return self.root(context, annotation.id)
            return f"our {annotation.id}" if annotation.id in self._names else None
        if isinstance(annotation, ast.BinOp):
            return self.kind(annotation.left, context) or self.kind(annotation.right, context)
        if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
            parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            inner = next((kind for part in reversed(parts) if (kind := self.kind(part, context))), None)
            if inner in (None, PLAIN):
                return inner
            if annotation.value.id == "Callable":
                return f"=> {inner}"
            return f"[] {inner}" if annotation.value.id in _CONTAINERS else inner
        return None

    def root(self, context: str, said: str) -> str | None:
        """The row of `context`: its own, or that of its argument's or attribute's name in the file, or anywhere."""
        stem, _, inside = context.partition(": ")
        name = inside[inside.rindex("(") :] if inside.endswith(")") else inside.rpartition(".")[2]
        for row in (context, f"{stem}: {name}", name):
            if row in self._roots:
                self._findings.roots.add(row)
                return self._roots[row]
        self._findings.unexplained.add(f"{context} is {said}: say in ROOTS what it is")
        return None


def element(kind: str | None) -> str | None:
    """What is in a container of that kind; what is in something unexplained is as unexplained."""
    if kind is not None and kind.startswith("? "):
        return kind
    return kind.removeprefix("[] ") if kind is not None and kind.startswith("[] ") else None


def several(kinds: Iterable[str | None]) -> str | None:
    found = next((kind for kind in kinds if kind not in (None, PLAIN)), None)
    return f"[] {found}" if found is not None else None


def short(owner: str) -> str:
    """The class without its module and what it is nested in."""
    return owner.partition(":")[2]
