"""Bodies of the admin endpoints, made of the calls that they make and of the settings that a load goes by."""

from __future__ import annotations

import inspect
import re
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, get_args, get_origin

import msgspec
from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from console.api.requests.body import Body
from console.link.protocol import MAX_PATH
from console.link.rpc import Call, Route
from console.settings.load_options import LoadOptions, load_options, options_of, value_type
from console.settings.schema import fields

MAX_DEVICES = 64


class CallBody(Body):
    """Arguments of a call. options_field: the argument whose fields are fields of the body, "" for none."""

    options_field: ClassVar[str] = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that are given."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in self if value is not None}
        if not self.options_field:
            return values
        names = {name for name, _, _ in load_options()}
        return {name: value for name, value in values.items() if name not in names} | {
            self.options_field: options_of(values)
        }


def body_of(call: Call, route: Route) -> type[CallBody]:
    """Return the body of a call's endpoint: a field for each argument that its path does not have."""
    knobs = {flag.knob: setting for _, setting, flag in fields() if flag.knob}
    found: dict[str, Any] = {}
    options_field = ""
    for argument in arguments_of(call, route):
        if argument.type is LoadOptions:
            options_field = argument.name
            found |= {name: _option_field(setting) for name, setting, _ in load_options()}
        elif argument.name in knobs:
            found[argument.name] = _option_field(knobs[argument.name])
        else:
            found[argument.name] = _bounded(argument.type), ... if argument.required else argument.default
    body = create_model(
        f"{call.arguments.__name__}Body", __base__=CallBody, __doc__=inspect.cleandoc(route.about), **found
    )
    body.options_field = options_field
    if options_field:
        body.aliases = MappingProxyType(
            {flag.knob: name for name, _, flag in load_options() if flag.knob not in ("", name)}
        )
    if route.any_of:
        given = ({"required": [name], "properties": {name: {"type": "number"}}} for name in route.any_of)
        body.rules = ({"anyOf": list(given)},)
    return body


def arguments_of(call: Call, route: Route) -> list[msgspec.structs.FieldInfo]:
    """Return the arguments that query or body have."""
    in_path = {route.renamed.get(name, name) for name in re.findall(r"{(\w+)", route.path)}
    return [each for each in msgspec.structs.fields(call.arguments) if each.name not in in_path | route.fixed.keys()]


def _option_field(setting: FieldInfo) -> Any:
    """Return a field that takes what a setting takes, within its bounds; null leaves the setting as it is."""
    kind: Any = value_type(setting)
    bounds: list[Any] = [each for each in setting.metadata if isinstance(each, Ge | Gt | Le | Lt)]
    if get_origin(kind) is tuple:
        item: Any = get_args(setting.annotation)[0]
        kind, bounds = list[item], [Len(0, MAX_DEVICES)]
    elif kind is str:
        bounds = [Len(1, MAX_PATH)]
    return Annotated[Annotated[kind, "", *bounds] | None, Field(description=f"{setting.description}.")], None


def _bounded(kind: Any) -> Any:
    """Return the type of an argument with its bounds as pydantic has them."""
    if get_origin(kind) is not Annotated:
        return kind
    base, *metas = get_args(kind)
    names = ("ge", "gt", "le", "lt", "min_length", "max_length")
    bounds = {name: value for meta in metas for name in names if (value := getattr(meta, name)) is not None}
    return Annotated[base, Field(**bounds)]
