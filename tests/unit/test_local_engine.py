"""The engine of this process behind EngineLink: it takes every call by the names that the table has."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from console.link.local import LocalEngine
from console.link.rpc import CALLS, LOCAL_CALLS
from console.runtime.loops import CurrentLoop
from console.runtime.runtime import Runtime
from console.settings.schema import Settings


@pytest.mark.parametrize("name", [*CALLS, *LOCAL_CALLS])
async def test_a_call_is_taken_by_the_names_and_defaults_of_the_protocol(name: str) -> None:
    call = CALLS.get(name) or LOCAL_CALLS[name]
    method = call.on(LocalEngine(Runtime(Settings(api=False)), CurrentLoop()))
    parameters = inspect.signature(method).parameters
    for argument in msgspec.structs.fields(call.arguments):
        assert argument.name in parameters, f"{name} has no {argument.name}"
        if not argument.required:
            assert parameters[argument.name].default == argument.default
    assert inspect.iscoroutinefunction(method) != call.at_once
