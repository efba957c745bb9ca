"""A package's source as facts: classes with their attributes and signatures, read with `ast` and never imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's arguments by name. `**kwargs` is left out on purpose: what falls into it is swallowed in silence."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]
    takes_rest: bool

    @classmethod
    def of(cls, function: Function, *, bound: bool) -> Signature:
        """Its signature, without `self` where it is bound."""
        arguments = function.args
        positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        defaults = len(arguments.defaults)
        required = set(positional[: len(positional) - defaults])
        keyword_only = tuple(each.arg for each in arguments.kwonlyargs)
        required |= {
            each.arg
            for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is None
        }
        if bound:
            required.discard(positional[0])
            del positional[0]
        return cls(tuple(positional), keyword_only, frozenset(required), arguments.vararg is not None)

    def problem(self, positional: int, keywords: tuple[str, ...]) -> str:
        """Why a call with so many positional arguments and these keywords does not fit; "" where it does."""
        unknown = [name for name in keywords if name not in (*self.positional, *self.keyword_only)]
        if unknown:
            return f"takes no argument {', '.join(unknown)}"
        if positional > len(self.positional) and not self.takes_rest:
            return f"takes {len(self.positional)} positional arguments, not {positional}"
        missing = sorted(self.required - set(self.positional[:positional]) - set(keywords))
        return f"needs {', '.join(missing)}" if missing else ""


@dataclass(frozen=True, slots=True)
class Class:
    """A class, its bases included. attributes: everything after a dot, methods too."""

    attributes: frozenset[str]
    methods: dict[str, Signature]


@dataclass(frozen=True)
class Package:
    """A package's folder. Modules are named from there ("generator.dynamic"), classes after them with a colon
    ("generator.sampler:ExLlamaV2Sampler.Settings")."""

    folder: Path
    _trees: dict[str, ast.Module] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module:
        """A module's source. Raises FileNotFoundError naming what is not there."""
        if module not in self._trees:
            path = self.folder.joinpath(*module.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._trees[module] = ast.parse(file.read_text(encoding="utf-8"))
        return self._trees[module]

    def module_names(self, module: str) -> frozenset[str]:
        """Names that a module has: assigned, defined, imported, declared global, at any depth outside functions."""
        found: set[str] = set()
        for node in _outside_functions(self.tree(module)):
            if isinstance(node, Function | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {each.asname or each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
        return frozenset(found)

    def function(self, module: str, name: str) -> Signature:
        """A module's function. Raises LookupError."""
        for node in _outside_functions(self.tree(module)):
            if isinstance(node, Function) and node.name == name:
                return Signature.of(node, bound=False)
        raise LookupError(f"{module} has no function {name}")

    def klass(self, name: str) -> Class:
        """The class "module:Outer.Inner". Raises LookupError naming what is not there."""
        module, _, path = name.partition(":")
        node = self._class_node(module, path)
        attributes: set[str] = set()
        methods: dict[str, Signature] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.class_homes:
                above = self.klass(f"{self.class_homes[base.id]}:{base.id}")
                attributes |= above.attributes
                methods |= above.methods
        for child in node.body:
            if isinstance(child, Function):
                methods[child.name] = Signature.of(child, bound=not _is_static(child))
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                attributes.add(child.target.id)
            elif isinstance(child, ast.Assign):
                attributes |= {target.id for target in child.targets if isinstance(target, ast.Name)}
            elif isinstance(child, ast.ClassDef):
                attributes.add(child.name)
        attributes |= _self_attributes(node) | methods.keys()
        if _is_dataclass(node) and "__init__" not in methods:
            methods["__init__"] = _fields_signature(node)
        return Class(frozenset(attributes), methods)

    def strings(self, *modules: str) -> frozenset[str]:
        """Every string constant of the modules' sources, all modules' where none is named; f-strings' parts too."""
        return frozenset(
            node.value
            for module in modules or self._modules
            for node in ast.walk(self.tree(module))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )

    def calls_of(self, module: str, name: str) -> list[ast.Call]:
        """Every call of a function of that name in a module."""
        return [
            node
            for node in ast.walk(self.tree(module))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        ]

    @cached_property
    def _modules(self) -> list[str]:
        files = (file for file in self.folder.rglob("*.py"))
        return [".".join(file.relative_to(self.folder).with_suffix("").parts) for file in files]

    @cached_property
    def class_homes(self) -> dict[str, str]:
        """The module of every top-level class."""
        return {
            node.name: module
            for module in self._modules
            for node in self.tree(module).body
            if isinstance(node, ast.ClassDef)
        }

    def _class_node(self, module: str, path: str) -> ast.ClassDef:
        where: ast.Module | ast.ClassDef = self.tree(module)
        for name in path.split("."):
            found = next(
                (node for node in ast.walk(where) if isinstance(node, ast.ClassDef) and node.name == name), None
            )
            if found is None:
                raise LookupError(f"{module} has no class {path}")
            where = found
        assert isinstance(where, ast.ClassDef)
        return where


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            yield from _outside_functions(node)


def _self_attributes(node: ast.ClassDef) -> set[str]:
    """Attributes that the class's own methods set on `self`."""
    return {
        child.attr
        for method in node.body
        if isinstance(method, Function)
        for child in ast.walk(method)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }


def _is_static(function: Function) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)


def _fields_signature(node: ast.ClassDef) -> Signature:
    """What a dataclass's own __init__ takes."""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    names = tuple(each.target.id for each in fields if isinstance(each.target, ast.Name))
    required = {each.target.id for each in fields if isinstance(each.target, ast.Name) and each.value is None}
    return Signature(names, (), frozenset(required), takes_rest=False)
