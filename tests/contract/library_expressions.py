"""What an expression of ours is, and what of the library is asked for on the way to it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.contract.library_kinds import PLAIN, Findings, Ours, Use, element, several, short

SAME = frozenset({"list", "tuple", "sorted", "reversed", "iter", "set"})
"""Builtins that give what they get, in a container."""

_ELEMENT = {"next", "max", "min"}


class Expressions:
    """The expressions of one file. names: what the names of the function at hand stand for.

    loops: its variables that go over things written out.
    """

    def __init__(
        self,
        stem: str,
        library: str,
        ours: Ours,
        findings: Findings,
        types: Mapping[str, str],
        homes: Mapping[str, str],
    ) -> None:
        self.stem, self.library, self.ours = stem, library, ours
        self.findings, self._types, self._homes = findings, types, homes
        self.names: dict[str, str | None] = {}
        self.loops: dict[str, list[ast.expr]] = {}

    def kind(self, node: ast.expr) -> str | None:
        """What `node` is; None for what is ours or nobody's."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, self.kind(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BoolOp):
            return next((kind for each in node.values if (kind := self.kind(each))), None)
        if isinstance(node, ast.IfExp):
            return self.kind(node.body) or self.kind(node.orelse)
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred | ast.YieldFrom):
            return self.kind(node.value)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return several(self.kind(each) for each in node.elts)
        if isinstance(node, ast.Dict):
            return several(self.kind(each) for each in node.values)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return several([self.kind(node.elt)])
        if isinstance(node, ast.DictComp):
            return several([self.kind(node.value)])
        return None

    def _attribute(self, node: ast.expr, owner: str | None, name: str) -> str | None:
        if owner is None:
            self.findings.unknown.setdefault(name, set()).add(self._where(node))
        if owner is None or owner == PLAIN:
            return owner
        if owner.startswith("our "):
            return self.ours.members.get((owner.removeprefix("our "), name))
        if owner.startswith("module "):
            return self.of_module(node, owner, name)
        if owner.startswith("class "):
            nested = f"{owner.removeprefix('class ')}.{name}"
            self._use(node, owner.removeprefix("class "), name)
            return f"class {nested}" if name[:1].isupper() else f"method {nested}"
        if ":" in owner and not owner.startswith(("[] ", "=> ", "method ", "? ")):
            self._use(node, owner, name)
            typed = self._types.get(f"{short(owner)}.{name}")
            if typed is not None:
                self.findings.types.add(f"{short(owner)}.{name}")
                return typed
            return f"? {owner}.{name}"
        if owner.startswith("? "):
            self._unexplained(node, owner)
        return None

    def of_module(self, node: ast.AST, module: str, name: str) -> str | None:
        """A name of one of the library's modules."""
        inside = module.removeprefix("module ").removeprefix("__init__")
        self._use(node, module, name)
        if name in self._homes:
            return f"class {self._homes[name]}:{name}"
        return f"module {inside}.{name}".replace(" .", " ") if name.islower() else None

    def _subscript(self, node: ast.Subscript) -> str | None:
        owner = self.kind(node.value)
        if owner is not None and owner.startswith("dict ") and isinstance(node.slice, ast.Constant):
            return self._key(node, owner, str(node.slice.value))
        if owner is not None and owner.startswith("? "):
            self._unexplained(node, owner)
        return element(owner) if owner is not None and owner.startswith("[] ") else None

    def _key(self, node: ast.expr, owner: str, key: str) -> str | None:
        self._use(node, owner, key)
        return self._types.get(f"{owner.removeprefix('dict ')}[{key}]")

    def _call(self, node: ast.Call) -> str | None:
        if ast.unparse(node.func) == "importlib.import_module":
            return self._imported(node)
        if isinstance(node.func, ast.Name) and node.func.id not in self.names:
            return self._call_by_name(node, node.func.id)
        if isinstance(node.func, ast.Attribute):
            taken = self._call_of_container(node, self.kind(node.func.value), node.func.attr)
            if taken is not None:
                return taken
        called = self.kind(node.func)
        if called is None or called == PLAIN:
            return called
        if called.startswith("=> "):
            returned = called.removeprefix("=> ")
            return None if returned == "None" else returned
        if called.startswith("class "):
            owner = called.removeprefix("class ")
            self._use(node, owner, "__init__", node)
            return owner
        if called.startswith(("method ", "? ")):
            owner, _, name = called.partition(" ")[2].rpartition(".")
            self._use(node, owner, name, node)
            typed = self._types.get(f"{short(owner)}.{name}()")
            if typed is not None:
                self.findings.types.add(f"{short(owner)}.{name}()")
                return typed
            return f"? {owner}.{name}()"
        if called.startswith("module "):
            module, _, name = called.removeprefix("module ").rpartition(".")
            self._use(node, f"module {module or '__init__'}", name, node)
        return None

    def _imported(self, node: ast.Call) -> str | None:
        """The module that `importlib.import_module` gives; a name that is not constant needs a root."""
        said = self._text(node.args[0])
        if said is None:
            return self.ours.root(
                f"{self.stem}: import_module({ast.unparse(node.args[0])})", "a name made up as it runs"
            )
        return self.module(said) if said.partition(".")[0] == self.library else None

    def _text(self, node: ast.expr) -> str | None:
        """A string that is written out, perhaps through our constants."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.Name):
            return self.ours.constants.get(node.id)
        if isinstance(node, ast.JoinedStr):
            parts = [self._text(each.value if isinstance(each, ast.FormattedValue) else each) for each in node.values]
            return None if None in parts else "".join(part for part in parts if part is not None)
        return None

    def _call_by_name(self, node: ast.Call, name: str) -> str | None:
        first = self.kind(node.args[0]) if node.args else None
        if name in ("getattr", "setattr", "hasattr", "delattr") and len(node.args) >= 2:
            return self._by_text(node, first, node.args[1])
        if name in SAME:
            return first
        if name in _ELEMENT:
            return element(first)
        return self.ours.functions.get(name) or (f"our {name}" if self._is_ours(name) else None)

    def _by_text(self, node: ast.Call, owner: str | None, name: ast.expr) -> str | None:
        """An attribute whose name is a string: written out, or the variable of a loop over such."""
        loop = self.loops.get(name.id, []) if isinstance(name, ast.Name) else []
        texts = [text for each in loop or [name] if (text := self._text(each)) is not None]
        if not texts and owner not in (None, PLAIN) and not str(owner).startswith("our "):
            self.findings.unexplained.add(f"{self._where(node)} reads a name that is not written out")
        return next(iter([self._attribute(node, owner, text) for text in texts]), None)

    def _call_of_container(self, node: ast.Call, owner: str | None, method: str) -> str | None:
        if owner is None:
            return None
        if owner.startswith("[] ") and method in ("values", "copy"):
            return owner
        if owner.startswith("[] ") and method in ("get", "pop", "popleft"):
            return element(owner)
        if owner.startswith("dict ") and method in ("get", "pop") and isinstance(node.args[0], ast.Constant):
            return self._key(node, owner, str(node.args[0].value)) or PLAIN
        return None

    # --- notes ------------------------------------------------------------------------------------------------------

    def _use(self, node: ast.AST, owner: str, name: str, call: ast.Call | None = None) -> None:
        how = None
        starred = False
        if call is not None:
            keywords = tuple(each.arg for each in call.keywords if each.arg is not None)
            starred = len(keywords) < len(call.keywords) or any(isinstance(each, ast.Starred) for each in call.args)
            how = (sum(not isinstance(each, ast.Starred) for each in call.args), keywords)
        self.findings.uses.add(Use(self._where(node), owner, name, how, starred))

    def _unexplained(self, node: ast.AST, owner: str) -> None:
        name = owner.removeprefix("? ").partition(":")[2]
        self.findings.unexplained.add(f"{self._where(node)} goes on from {name}: say in TYPES what that is")

    def _where(self, node: ast.AST) -> str:
        return f"{self.stem}.py:{getattr(node, 'lineno', 0)}"

    def module(self, dotted: str) -> str:
        """The kind of a module, by its whole name."""
        return f"module {dotted.partition('.')[2] or '__init__'}"

    def _is_ours(self, name: str) -> bool:
        return any(owner == name for owner, _ in self.ours.members)
