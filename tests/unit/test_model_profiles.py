"""The tables [models.NAME] of config.toml: names for clients, with a model and settings of its own."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from console.runtime.loading import choose_model
from console.settings.config_file import edit_toml
from console.settings.model_profiles import find_profile
from console.settings.sources import Sources
from engine.errors import InvalidRequest


def sources(folder: Path, text: str, **flags: object) -> Sources:
    file = folder / "config.toml"
    file.write_text(text)
    return Sources.read(flags, env={}, file=file)


def test_a_profile_has_a_model_aliases_options_and_sampling(tmp_path: Path) -> None:
    read = sources(
        tmp_path,
        'port = 1234\n[models.coder]\nmodel = "demo"\naliases = ["gpt-4o", "default"]\n'
        "pin = true\nmax_model_len = 512\n"
        "idle_unload = 60\nsampling = { temperature = 0.2, top_k = 40 }\n",
    )
    assert read.settings().port == 1234
    for name in ("coder", "gpt-4o", "default"):
        profile = find_profile(read.profiles, name)
        assert profile is not None
        assert (profile.name, profile.model, profile.sampling) == ("coder", "demo", {"temperature": 0.2, "top_k": 40})
        assert profile.options == {"pin": True, "max_model_len": 512, "idle_unload": 60}
    assert find_profile(read.profiles, "demo") is None


def test_a_name_alone_is_the_model_of_that_name(tmp_path: Path) -> None:
    assert sources(tmp_path, "[models.demo]\n").profiles["demo"].model == "demo"


def test_ttl_is_another_name_for_idle_unload(tmp_path: Path) -> None:
    assert sources(tmp_path, "[models.demo]\nttl = 60\n").profiles["demo"].options == {"idle_unload": 60}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models.a]\nttl = 1\nidle_unload = 1", r"ttl and idle_unload of \[models.a\] in .* are the same setting"),
        ('[models.a]\nkeep_alive = "5m"', r"keep_alive of \[models.a\] in .*: set idle_unload, in seconds"),
        ("models = 3", r"models in .*config.toml should be tables, as \[models.NAME\]"),
        ("[models]\ncoder = 3", r"\[models.coder\] in .* should be a table"),
        ("[models.a]\nmax_model = 3", r"'max_model' of \[models.a\] in .* is not a setting of a model; did you mean"),
        ("[models.a]\nport = 3", r"'port' of \[models.a\] in .* is not a setting of a model"),
        ("[models.a]\nmax_model_len = 0", r"\[models.a\] in .*: Max model len 0: min 1"),
        ('[models.a]\naliases = "b"', r"aliases of \[models.a\] in .* should be an array of names"),
        ("[models.a]\nmodel = 3", r"model of \[models.a\] in .* should be a folder, a name or a hub id"),
        ('[models.a]\naliases = ["x"]\n[models.b]\naliases = ["x"]', "x means both a and b in"),
        ('[models.a]\n[models.b]\naliases = ["a"]', "a means both a and b in"),
        ("[models.a]\nsampling = { heat = 1 }", r"'heat' in sampling of \[models.a\] in .* is not a parameter"),
        ('[models.a]\nsampling = { top_p = "x" }', r"top_p in sampling of \[models.a\] in .* should be a number"),
        ("[models.a]\nsampling = { top_p = 7 }", r"sampling of \[models.a\] in .*: top_p is 7"),
    ],
)
def test_a_mistake_in_a_profile_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        sources(tmp_path, text)


def test_the_first_model_may_be_a_profile(tmp_path: Path) -> None:
    read = sources(tmp_path, '[models.coder]\nmodel = "demo"\naliases = ["c"]\nmax_model_len = 77\n', model="c")
    spec = choose_model(read.settings(), read.profiles).spec
    assert spec is not None
    assert (spec.name, spec.aliases, spec.max_model_len) == ("coder", ("c",), 77)


def test_the_first_model_may_have_names_of_its_own(tmp_path: Path) -> None:
    read = sources(tmp_path, "", served_model_name="gpt-4o,default")
    spec = choose_model(read.settings(), read.profiles).spec
    assert spec is not None
    assert (spec.name, spec.aliases) == ("gpt-4o", ("default",))


def test_saving_a_setting_leaves_the_profiles_as_they_are() -> None:
    text = '[models.coder]\nmodel = "demo" # mine\n'
    saved = edit_toml(text, "port", 1234)
    assert text.strip() in saved
    assert tomllib.loads(saved) == {"port": 1234, "models": {"coder": {"model": "demo"}}}
    assert edit_toml(edit_toml(text, "port", 1234), "port", None).strip() == text.strip()
