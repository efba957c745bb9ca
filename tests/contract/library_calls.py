"""What our sources ask of a library whose objects are all `Any` to the type checker, found with `ast`.

A library's object can enter our code in three ways only: an import of the library, an annotation that says `Any` or
`ModuleType`, and an attribute or result of such an object. So every `Any` has a row in a table of roots, every
attribute or result that is used further has a row in a table of types, and what has none is reported: nothing new can
be used without being said there, and what is said there is checked against the library's source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.contract.library_expressions import SAME, Expressions
from tests.contract.library_kinds import Findings, Ours, element


def read_sources(
    files: Iterable[Path],
    *,
    library: str,
    roots: Mapping[str, str],
    types: Mapping[str, str],
    homes: Mapping[str, str],
    contracts: Iterable[Path] = (),
) -> Findings:
    """What `files` use of the package `library`. contracts: more files whose classes are ours.

    roots: "file: Class.field", "file: function(argument)" or "file: function()" to the kind behind an `Any`; or
        "file: (argument)" for all arguments of a name in a file, "(argument)" for all anywhere.
    types: "Class.attribute" or "Class.method()" to its kind.  homes: classes of the library to their modules.
    """
    findings = Findings()
    trees = {file.stem: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    ours = Ours(findings, roots)
    every = [*trees.items(), *((file.stem, ast.parse(file.read_text(encoding="utf-8"))) for file in contracts)]
    for _, tree in every:
        ours.note_names(tree)
    for stem, tree in every:
        ours.note_members(stem, tree)
    noted = set(findings.unexplained)
    for _ in range(2):  # fields that are set from arguments are known in the second round
        findings.uses.clear()
        findings.unknown.clear()
        findings.unexplained = set(noted)
        for stem, tree in trees.items():
            _File(tree, Expressions(stem, library, ours, findings, types, homes)).read()
    return findings


class _File:
    """One of our files: binds names function by function, then asks what every expression is."""

    def __init__(self, tree: ast.Module, expressions: Expressions) -> None:
        self._tree, self._at = tree, expressions
        self._stem, self._ours, self._findings = expressions.stem, expressions.ours, expressions.findings

    def read(self) -> None:
        """Every function and method, and what lies outside them."""
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef):
                for child in node.body:
                    if isinstance(child, ast.FunctionDef):
                        self._read_function(child, node.name)
            elif isinstance(node, ast.FunctionDef):
                self._read_function(node, "")
            else:
                self._read(node, "")

    def _read_function(self, function: ast.FunctionDef, owner: str) -> None:
        self._at.names, self._at.loops = {"self": f"our {owner}"} if owner else {}, {}
        prefix = f"{owner}." if owner else ""
        for each in ast.walk(function):
            if isinstance(each, ast.FunctionDef):
                name = prefix + each.name if each is function else f"{prefix}{function.name}.{each.name}"
                arguments = each.args
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    if argument.annotation is not None:
                        context = f"{self._stem}: {name}({argument.arg})"
                        self._at.names[argument.arg] = self._ours.kind(argument.annotation, context)
                if each is not function:
                    returned = self._ours.kind(each.returns, f"{self._stem}: {name}()")
                    self._at.names[each.name] = f"=> {returned}"
        self._read(function, prefix + function.name)

    def _read(self, scope: ast.AST, context: str) -> None:
        before = {name: set(places) for name, places in self._findings.unknown.items()}
        for _ in range(3):  # names that are made from names
            for node in ast.walk(scope):
                self._bind(node, context)
        self._findings.unknown = before  # while names were being bound, others were not known yet
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
                self._at.kind(node)

    # --- what names are ---------------------------------------------------------------------------------------------

    def _bind(self, node: ast.AST, context: str) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._bind_import(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value)
        elif isinstance(node, ast.AnnAssign):
            kind = self._ours.kind(node.annotation, f"{self._stem}: {context}.{ast.unparse(node.target)}")
            if kind is None and node.value is not None:
                kind = self._at.kind(node.value)
            self._assign(node.target, kind)
        elif isinstance(node, ast.NamedExpr):
            self._assign(node.target, self._at.kind(node.value))
        elif isinstance(node, ast.For | ast.comprehension):
            if isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple):
                self._at.loops[node.target.id] = node.iter.elts
            self._bind_loop(node.target, node.iter)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, self._at.kind(node.context_expr))

    def _bind_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == self._at.library:
                    module = each.name if each.asname else self._at.library
                    self._at.names[each.asname or self._at.library] = self._at.module(module)
            return
        if (node.module or "").partition(".")[0] == self._at.library:
            for each in node.names:
                self._at.names[each.asname or each.name] = self._at.of_module(
                    node, self._at.module(node.module or ""), each.name
                )

    def _bind_target(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._bind_target(one, its)
        else:
            self._assign(target, self._at.kind(value))

    def _bind_loop(self, target: ast.expr, over: ast.expr) -> None:
        """The names of a loop; element by element where it goes over several things at once."""
        while isinstance(over, ast.Call) and ast.unparse(over.func) in SAME and over.args:
            over = over.args[0]
        if isinstance(over, ast.Call) and isinstance(target, ast.Tuple):
            called = ast.unparse(over.func)
            if called in ("zip", "enumerate") or called.endswith(".items"):
                parts = [None, over.func.value] if isinstance(over.func, ast.Attribute) else [*over.args]
                parts = [None, *parts] if called == "enumerate" else parts
                for one, part in zip(target.elts, parts, strict=False):
                    self._assign(one, element(self._at.kind(part)) if part is not None else None)
                return
        self._assign(target, element(self._at.kind(over)))

    def _assign(self, target: ast.expr, kind: str | None) -> None:
        if isinstance(target, ast.Name):
            if kind is not None or target.id not in self._at.names:
                self._at.names[target.id] = kind
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._assign(each, element(kind))
        elif isinstance(target, ast.Starred):
            self._assign(target.value, f"[] {kind}" if kind is not None else None)
        elif isinstance(target, ast.Attribute) and kind is not None:
            owner = self._at.kind(target.value)
            if owner is not None and owner.startswith("our "):
                member = (owner.removeprefix("our "), target.attr)
                self._ours.members[member] = self._ours.members.get(member) or kind
