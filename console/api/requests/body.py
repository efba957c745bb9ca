"""Request bodies: JSON, then the fields of a schema. Every error names its field."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, get_args, get_origin

from aiohttp import web
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, PrivateAttr, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from console.api.http.errors import AS_SENT
from console.api.http.request_body import (
    document_of,
    drop_body,
    json_type_name,
    model_of_path,
    run_offloaded,
)
from console.api.http.traffic import find_call
from console.api.requests.parameters import NOTHING, Refusal
from console.api.requests.schemas import JsonSchema, complete_schema
from engine.config import format_number
from engine.errors import Detail, InvalidRequest

T = TypeVar("T", bound="Body")

_SHAPES = {
    "dict_type": "should be an object",
    "list_type": "should be an array",
    "model_type": "should be an object",
}
"""Pydantic names these types by Python's words."""

_SUBJECT = re.compile(r"(?:Input|String|List|Dictionary) ")
"""Beginning of pydantic's sentences; ours begin with the field's name."""

_SHOWN_CHARACTERS = 40


def as_integer(value: object) -> object:
    """Return 2.0 as 2, for JSON has one kind of number; any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_integers(value: object) -> object:
    """Return an array of numbers, each as `as_integer` has it; quick where all are integers."""
    is_mixed = isinstance(value, list) and float in set(map(type, value))
    return [as_integer(each) for each in cast(list[object], value)] if is_mixed else value


_AS_INTEGERS = (as_integer, as_integers)


def _accept_integral_floats(schema: Any) -> Any:
    """Return a core schema whose integers may be written as floats and whose arrays stop at the first wrong item."""
    match schema:
        case {"type": "list", "items_schema": {"type": "int"}}:
            ids = cast(core_schema.ListSchema, {**schema, "fail_fast": True})
            return core_schema.no_info_before_validator_function(as_integers, ids)
        case {"type": "list"} if not schema.get("fail_fast"):
            return _accept_integral_floats({**schema, "fail_fast": True})
        case {"type": "int"}:
            return core_schema.no_info_before_validator_function(as_integer, cast(core_schema.IntSchema, schema))
        case {"type": "function-before", "function": {"function": function}} if function in _AS_INTEGERS:
            return schema
        case dict():
            return {key: _accept_integral_floats(value) for key, value in schema.items()}
        case list() | tuple():
            return type(schema)(map(_accept_integral_floats, schema))
        case _:
            return schema


def _can_be_empty(annotation: Any) -> bool:
    """Return whether a field of this type holds a text, an array or an object."""
    origin = get_origin(annotation)
    if origin is Literal:
        return any(isinstance(value, str) for value in get_args(annotation))
    if origin is None:
        return annotation in (object, Any) or (
            isinstance(annotation, type) and issubclass(annotation, str | list | dict | BaseModel)
        )
    return origin in (list, dict) or any(map(_can_be_empty, get_args(annotation)))


class Body(BaseModel):
    """Base of every request body. null is the same as leaving a field out, and so is an empty text, array or object in
    an optional field that holds any of these.

    refused: fields that are not supported: accepted at their neutral values, an error otherwise.
    inert: fields that change nothing about an answer, whatever their value.
    aliases: other names of fields.
    clamped: fields whose value is brought into bounds, or to one that means the same, and how.
    refused_within: as `refused`, for fields within a field; by that field's path.
    internal: fields that clients cannot send.
    keeps_empty: optional fields whose empty value is not the same as leaving them out.
    rules: JSON schemas of constraints on several fields; for /openapi.json alone.
    ranges: lowest and highest values of numbers, which are checked later; likewise.
    prompt_field: the field that becomes the prompt, which errors about the prompt name.
    max_entries: max length of arrays and objects, checked before their content; those of the bases too.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    refused: ClassVar[Mapping[str, Refusal]] = {}
    inert: ClassVar[frozenset[str]] = frozenset()
    aliases: ClassVar[Mapping[str, str]] = {}
    clamped: ClassVar[Mapping[str, str]] = {}
    refused_within: ClassVar[Mapping[str, Mapping[str, Refusal]]] = {}
    internal: ClassVar[frozenset[str]] = frozenset()
    keeps_empty: ClassVar[frozenset[str]] = frozenset()
    rules: ClassVar[Sequence[JsonSchema]] = ()
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    prompt_field: ClassVar[str] = "prompt"
    max_entries: ClassVar[Mapping[str, int]] = {}

    _sent_as: dict[str, str] = PrivateAttr(default_factory=dict)

    def sent_name(self, field: str) -> str:
        """Return the client's name of a field."""
        return self._sent_as.get(field, field)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that validates the body."""
        accepting: CoreSchema = _accept_integral_floats(handler(source))
        return accepting

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the body's schema for /openapi.json."""
        schema = handler.resolve_ref_schema(handler(core))
        others = cls.refused, cls.inert, cls.aliases, cls.clamped, cls.internal
        schema.update(complete_schema(schema, cls._docs(), *others, cls.rules, cls.ranges, cls._limits()))
        return schema

    @classmethod
    def _docs(cls) -> list[str]:
        """Return the docstrings about its fields, the nearest first."""
        bases = [base for base in cls.__mro__ if issubclass(base, Body) and base is not Body]
        return [inspect.cleandoc(base.__doc__ or "") for base in bases]

    @classmethod
    @cache
    def _limits(cls) -> Mapping[str, int]:
        """Return max_entries of the class and its bases."""
        limits: dict[str, int] = {}
        for base in reversed(cls.__mro__):
            limits |= vars(base).get("max_entries", {})
        return limits

    @classmethod
    @cache
    def _emptied(cls) -> frozenset[str]:
        """Return the fields of which an empty value is the same as none."""
        fields = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return frozenset(name for name in fields - cls.keeps_empty if _can_be_empty(cls.model_fields[name].annotation))

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Read a body from a parsed JSON object; raises InvalidRequest, whose `param` names the field at fault."""
        try:
            fields, sent_as = cls._supported_fields(document)
        except InvalidRequest as error:
            error.details[AS_SENT] = True
            raise
        try:
            body = cls.model_validate(fields)
            body._sent_as = sent_as
            return body
        except ValidationError as error:
            raise _explain(error.errors(include_url=False)[0], sent_as) from None

    @classmethod
    def _supported_fields(cls, document: dict[str, object]) -> tuple[dict[str, object], dict[str, str]]:
        """Return the supported fields, and the client's name of each; raises for others unless inert or neutral."""
        fields: dict[str, object] = {}
        sent_as: dict[str, str] = {}
        limits = cls._limits()
        for name, value in document.items():
            field = cls.aliases.get(name, name)
            if value is None or (value in NOTHING and field in cls._emptied()):
                continue
            if field in cls.model_fields:
                if field in fields and fields[field] != value:
                    raise InvalidRequest(f"{name} and {sent_as[field]} differ; send one of them", param=name)
                if isinstance(value, list | dict) and len(value) > (most := limits.get(field, len(value))):
                    raise InvalidRequest(f"{name} has {len(value)} entries; the max is {most}", param=name)
                fields[field], sent_as[field] = value, name
            elif name in cls.refused:
                cls.refused[name].check(name, value)
            elif name not in cls.inert:
                raise InvalidRequest(f"{name} is not a field of this endpoint", param=name)
        return fields, sent_as


async def read(request: web.Request, schema: type[T], *, absent: bytes = b"") -> T:
    """Read the request's body as `schema`; raises InvalidRequest. absent: the meaning of no body at all."""
    if (call := find_call(request)) is not None:
        call.prompt_field = schema.prompt_field
    document = await document_of(request, absent)
    if (model := model_of_path(request)) is not None and "model" in schema.model_fields:
        others = {name: value for name, value in document.items() if schema.aliases.get(name, name) != "model"}
        document = {**others, "model": model}
    body = await run_offloaded(request, partial(schema.from_document, document))
    drop_body(request)
    return body


def _explain(error: ErrorDetails, sent_as: Mapping[str, str]) -> InvalidRequest:
    """Return pydantic's error as one sentence that begins with the client's name of the field."""
    first, *inner = error["loc"] or ("",)
    param = _dotted_path((sent_as.get(str(first), first), *inner))
    if error["type"] == "missing":
        wrong = "is missing"
    elif error["type"] == "extra_forbidden":
        wrong = "is not a field of this endpoint"
    else:
        reason = _SHAPES.get(error["type"]) or _SUBJECT.sub("", error["msg"], count=1)
        wrong = f"{reason}, not {_quote_value(error['input'], is_of_kind=not error['type'].endswith('_type'))}"
    details: dict[str, Detail] = {"param": param, AS_SENT: True}
    return InvalidRequest(f"{param} {wrong}", **details)


def _dotted_path(loc: tuple[int | str, ...]) -> str:
    """Return ('stop', 1) as 'stop[1]'."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _quote_value(value: object, *, is_of_kind: bool) -> str:
    """Return a wrong value as text; its type where that is wrong, or the value long. is_of_kind: the type is right."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value)
    if isinstance(value, str) and is_of_kind:
        more = "..." if len(value) > _SHOWN_CHARACTERS else ""
        return f'"{value[:_SHOWN_CHARACTERS]}{more}"'
    return json_type_name(value)
