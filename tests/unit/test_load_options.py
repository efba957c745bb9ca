"""Options of a load: what one way to load offers, all of them do, and it reaches the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from console.api.admin.endpoints import body_of
from console.link.frames import from_plain, to_plain
from console.link.rpc import CALLS
from console.runtime.loading import requested_spec
from console.settings.load_options import LoadOptions, load_options, value_type
from console.settings.schema import Settings
from console.settings.sources import changed
from console.tui.screens.models.load_form import LoadForm
from engine.config import EngineConfig, ModelSpec
from engine.errors import InvalidRequest
from engine.models.knobs import changed_fields
from tests.fakes.link import MODELS

LOAD = CALLS["models.load"]
assert LOAD.route is not None
LoadBody = body_of(LOAD, LOAD.route)
OPTIONS = {name: (field, flag) for name, field, flag in load_options()}


def other_value(name: str, folder: Path) -> Any:
    """A value that is not the setting's default."""
    field, _ = OPTIONS[name]
    kind = value_type(field)
    if kind is bool:
        return not field.default
    if get_origin(kind) is tuple:
        return (3, 5)
    if choices := get_args(kind):
        return next(choice for choice in choices if choice != field.default)
    if kind is str:
        return str(folder)
    return kind((field.default or 2) + 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is taken for an adapter and for a model."""
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_goes_from_every_door_to_the_worker(name: str, folder: Path) -> None:
    value = other_value(name, folder)
    own = LoadOptions(**{name: value})
    assert from_plain(to_plain(own), LoadOptions) == own
    sent = list(value) if isinstance(value, tuple) else value
    assert LoadBody.from_document({"model": "m", name: sent}).arguments["changes"] == own
    flag = OPTIONS[name][1]
    if knob := flag.knob and (flag.engine or name):
        assert LoadBody.from_document({"model": "m", knob: sent}).arguments["changes"] == own

    backends = OPTIONS[name][1].backends or ("torch",)
    entry = msgspec.structs.replace(MODELS[1], backend=backends[0])
    form = LoadForm(entry, LoadOptions(), LoadOptions(), shows_all=True)
    assert name in [field.name for field in form.fields]
    typed = ",".join(map(str, value)) if isinstance(value, tuple) else {True: "on", False: "off"}.get(value, str(value))
    assert form.with_text(name, typed).own == own

    settings = changed(Settings(), own.as_settings())
    assert getattr(settings, name) != getattr(Settings(), name)
    if knob:
        fields = changed_fields({knob: value})  # type: ignore[misc]
        assert msgspec.structs.replace(EngineConfig(), **fields) != EngineConfig()
        return
    spec, plain = (requested_spec(each, "m", Path("/m"), "torch") for each in (settings, Settings()))
    if name != "backend":  # what "auto" stands for is known before
        assert spec != plain


def test_every_field_of_a_spec_that_is_asked_for_is_an_option() -> None:
    given_by_the_engine = {"path", "name", "device", "shares", "prefix_salt", "kv_file", "native", "threads"}
    given_by_the_engine |= {"kv_cache_tokens"}
    of_a_profile = {"aliases", "sampling"}
    asked = {name.removesuffix("_gb").removesuffix("_mib") for name in ModelSpec.__struct_fields__}
    assert asked - given_by_the_engine - of_a_profile <= OPTIONS.keys()


def test_an_option_out_of_its_settings_bounds_is_refused_everywhere() -> None:
    with pytest.raises(InvalidRequest, match="num_workers"):
        LoadBody.from_document({"model": "m", "num_workers": 65})
    with pytest.raises(InvalidRequest, match="Num workers"):
        changed(Settings(), LoadOptions(num_workers=65).as_settings())
    form = LoadForm(MODELS[1], LoadOptions(num_workers=65), LoadOptions())
    assert form.out_of_range("num_workers") == "1 to 64"


def test_a_model_given_by_a_path_is_called_by_its_folder_or_its_file_without_endings(tmp_path: Path) -> None:
    file, part = tmp_path / "small-Q8_0.gguf", tmp_path / "large-00001-of-00002.gguf"
    for given, path, name in (
        (str(tmp_path), tmp_path, tmp_path.name),
        (str(file), file, "small-Q8_0"),
        (str(part), part, "large"),
        (str(tmp_path), file, "small-Q8_0"),  # the only one in there
        ("maker/small", file, "maker/small"),
    ):
        assert requested_spec(Settings(), given, path, "torch").name == name
