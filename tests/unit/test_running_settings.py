"""Settings of a running program: where each came from, saved without losing a comment, used when they can be."""

from __future__ import annotations

import os
import stat
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.link.settings import HIDDEN, SettingRow
from console.runtime.runtime import Runtime
from console.settings.config_file import edit_toml, sample
from console.settings.rows import setting_rows
from console.settings.schema import Settings, fields
from console.settings.sources import Sources, load_settings
from engine.errors import EngineClosed, InvalidRequest
from engine.system.files import replace_file

COMMENTED = """\
# Mine, from the wiki.
port = 9000   # behind the proxy

# as many as the card takes
max_prompts = 8
models_dir = [
]
# the end
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "ericllm" / "config.toml"


def running(config: Path, flags: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> Runtime:
    sources = Sources.read(flags or {}, env=env or {}, file=config)
    return Runtime(sources.settings(), sources=sources)


def row(runtime: Runtime, name: str) -> SettingRow:
    return next(row for row in runtime.live_settings.rows() if row.name == name)


def written(config: Path, text: str) -> Path:
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(text)
    return config


def test_there_is_a_row_for_every_setting_of_the_schema_in_its_order(config: Path) -> None:
    rows = running(config).live_settings.rows()
    assert [each.name for each in rows] == [name for name, _, _ in fields()]
    assert all(each.help and each.group for each in rows)


def test_each_row_says_which_flag_variable_or_file_its_value_came_from(config: Path) -> None:
    written(config, "max_prompts = 8\nport = 9000\n")
    runtime = running(config, {"port": "8001"}, {"ERICLLM_TIMEOUT": "30"})
    where = {
        name: (row(runtime, name).source, row(runtime, name).where)
        for name in ("port", "timeout", "max_prompts", "host")
    }
    assert where == {
        "port": ("flag", "--port"),
        "timeout": ("variable", "ERICLLM_TIMEOUT"),
        "max_prompts": ("file", str(config)),
        "host": ("default", ""),
    }
    assert (row(runtime, "port").value, row(runtime, "port").saved, row(runtime, "port").wins) == (
        "8001",
        "9000",
        "--port",
    )


def said(config: Path) -> str:
    """What the file says; "" where there is none."""
    return config.read_text() if config.exists() else ""


def mode(config: Path) -> int:
    return stat.S_IMODE(config.stat().st_mode)


async def test_a_saved_value_is_read_at_the_next_start(config: Path) -> None:
    await running(config).live_settings.save("port", "9001")
    assert load_settings({}, env={}, file=config).port == 9001


async def test_saving_keeps_comments_order_and_all_other_lines(config: Path) -> None:
    written(config, COMMENTED)
    await running(config).live_settings.save("max_prompts", "12")
    assert said(config) == COMMENTED.replace("max_prompts = 8", "max_prompts = 12")


async def test_taking_a_setting_out_leaves_the_default_and_the_other_lines(config: Path) -> None:
    written(config, COMMENTED)
    saved = await running(config).live_settings.save("max_prompts", None)
    assert saved.saved is None
    assert "max_prompts" not in said(config)
    assert "# as many as the card takes" in said(config)


async def test_the_sample_file_can_be_saved_into(config: Path) -> None:
    written(config, sample())
    await running(config).live_settings.save("port", "9002")
    assert said(config) == sample() + "port = 9002\n"


LINES = st.lists(
    st.sampled_from(["# a", "", "port = 1 # b", "timeout = 2.5", "model = 'x'", "gpu_split = [\n 1, # c\n]"]),
    unique=True,
)


@given(LINES, st.sampled_from(["port", "host", "gpu_split"]), st.sampled_from([None, 7, "x", [1.5, 2.0]]))
def test_an_edit_changes_one_value_and_no_comment(lines: list[str], name: str, value: Any) -> None:
    text = "\n".join(lines)
    after = edit_toml(text, name, value)
    kept = {key: old for key, old in tomllib.loads(text).items() if key != name}
    assert tomllib.loads(after) == kept | ({name: value} if value is not None else {})
    assert all(comment in after for comment in ("# a",) if comment in text)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("port", "http", "Port http: must be a whole number"),
        ("max_prompts", "0", "Max prompts 0: min 1"),
        ("models_dir", "/no/such/folder", "there is no folder /no/such/folder"),
        ("prot", "1", "did you mean port?"),
        ("api_key", "", "API key is empty"),
    ],
)
async def test_a_bad_value_is_one_sentence_and_the_file_stays_as_it_was(
    config: Path, name: str, value: str, complaint: str
) -> None:
    written(config, COMMENTED)
    with pytest.raises(InvalidRequest) as caught:
        await running(config).live_settings.save(name, value)
    assert complaint in caught.value.message
    assert "\n" not in caught.value.message
    assert said(config) == COMMENTED


async def test_a_value_that_contradicts_another_is_not_saved(config: Path) -> None:
    written(config, "cache_bits = 4\n")
    with pytest.raises(InvalidRequest, match="give only one"):
        await running(config).live_settings.save("cache_8bit", "on")
    assert said(config) == "cache_bits = 4\n"


async def test_max_prompts_taken_out_waits_for_the_start_where_its_default_depends_on_the_backend(config: Path) -> None:
    written(config, "max_prompts = 8\n")
    sources = replace(Sources.read({}, env={}, file=config), has_gpu=True)
    runtime = Runtime(sources.settings(), sources=sources)
    assert (await runtime.live_settings.save("max_prompts", None)).waits
    assert runtime.engine.config.max_prompts == 8


async def test_a_mistake_that_somebody_typed_into_the_file_meanwhile_is_named_and_not_overwritten(config: Path) -> None:
    runtime = running(config)
    written(config, "prot = 1\n")
    with pytest.raises(InvalidRequest, match="'prot' in"):
        await runtime.live_settings.save("port", "9000")
    assert said(config) == "prot = 1\n"


async def test_knobs_are_turned_at_once_and_others_wait_for_the_next_start(config: Path) -> None:
    runtime = running(config)
    knob, waiting = (
        await runtime.live_settings.save("max_prompts", "5"),
        await runtime.live_settings.save("port", "9000"),
    )
    assert runtime.engine.config.max_prompts == 5
    assert (knob.value, knob.source, knob.waits) == ("5", "file", False)
    assert (waiting.value, waiting.saved, waiting.waits, waiting.when) == ("8000", "9000", True, "start")


async def test_an_slo_and_the_price_of_energy_are_used_at_once(config: Path) -> None:
    runtime = running(config)
    saved = await runtime.live_settings.save("slo_ttft", "500ms")
    assert (saved.value, saved.when, saved.waits) == ("0.5", "now", False)
    await runtime.live_settings.save("energy_rate", "0.3")
    await runtime.engine.start()
    await runtime.engine.reset_session()
    insight = runtime.engine.publish().insight
    assert (insight.goodput.slo_ttft_s, insight.energy.rate_per_kwh) == (0.5, 0.3)
    await runtime.engine.close(drain_s=0.0)


async def test_who_shares_prefixes_is_changed_at_once(config: Path) -> None:
    runtime = running(config)
    assert runtime.engine.prefix_sharing == "key"
    saved = await runtime.live_settings.save("prefix_sharing", "system")
    assert (saved.value, saved.when, saved.waits) == ("system", "now", False)
    assert runtime.engine.prefix_sharing == "system"
    assert running(config, {"prefix_sharing": "all"}).engine.prefix_sharing == "all"


async def test_a_faster_screen_gets_snapshots_as_often_and_a_slower_one_no_fewer(config: Path) -> None:
    runtime = running(config, {"refresh_hz": "10"})
    assert runtime.engine._publisher.publish_s == 0.1
    runtime = running(config)
    await runtime.live_settings.save("refresh_hz", "8")
    assert runtime.engine._publisher.publish_s == 0.125
    await runtime.live_settings.save("refresh_hz", "1")
    assert runtime.engine._publisher.publish_s == 0.25


async def test_a_setting_of_loads_is_used_by_the_next_one(config: Path) -> None:
    runtime = running(config)
    assert (await runtime.live_settings.save("cache_bits", "8")).when == "load"
    assert runtime.settings.cache_bits == 8


async def test_a_flag_still_wins_over_what_is_saved(config: Path) -> None:
    runtime = running(config, {"max_prompts": "3"})
    saved = await runtime.live_settings.save("max_prompts", "5")
    assert (saved.value, saved.saved, saved.wins, saved.waits) == ("3", "5", "--max_prompts", False)
    assert runtime.engine.config.max_prompts == 3


async def test_a_knob_set_by_hand_to_the_default_of_a_library_says_so(config: Path) -> None:
    sources = replace(Sources.read({}, env={}, file=config), has_gpu=True)
    runtime = Runtime(sources.settings(), sources=sources)
    before = row(runtime, "max_prompts")
    await runtime.engine.reconfigure(max_prompts=32)
    after = row(runtime, "max_prompts")
    assert [(each.value, each.source) for each in (before, after)] == [("64", "default"), ("32", "console")]


async def test_a_knob_turned_by_hand_says_so(config: Path) -> None:
    runtime = running(config)
    await runtime.engine.reconfigure(max_prompts=7)
    assert (row(runtime, "max_prompts").value, row(runtime, "max_prompts").source) == ("7", "console")


async def test_what_the_engine_refuses_is_not_saved(config: Path) -> None:
    runtime = running(config)
    await runtime.engine.close(drain_s=0.0)
    with pytest.raises(EngineClosed):
        await runtime.live_settings.save("max_prompts", "5")
    assert said(config) == ""


async def test_no_row_holds_a_secret(config: Path) -> None:
    written(config, 'api_key = "from-the-file"\n')
    runtime = running(config, {"api_key": "from-a-flag"})
    shown = await runtime.live_settings.save("api_key", "typed-now")
    assert (shown.value, shown.saved, shown.secret) == (HIDDEN, HIDDEN, True)
    told = repr(runtime.live_settings.rows())
    assert not any(secret in told for secret in ("from-the-file", "from-a-flag", "typed-now"))
    assert load_settings({}, env={}, file=config).api_key is not None


async def test_no_row_holds_the_password_of_an_address(config: Path) -> None:
    written(config, 'otlp_traces_endpoint = "https://eric:of-the-file@otel.example/v1/traces"\n')
    flags = {"otlp_traces_endpoint": "https://eric:of-a-flag@otel.example/v1/traces"}
    runtime = running(config, flags)
    shown = row(runtime, "otlp_traces_endpoint")
    assert (shown.value, shown.saved, shown.secret) == (HIDDEN, HIDDEN, True)
    assert "of-the-file" not in repr(runtime.live_settings.rows()) and "of-a-flag" not in repr(
        runtime.live_settings.rows()
    )
    written(config, "")
    open_one = running(config, {"otlp_traces_endpoint": "http://otel:4318"})
    assert row(open_one, "otlp_traces_endpoint").value == "http://otel:4318"


async def test_a_change_made_with_an_editor_is_seen(config: Path) -> None:
    runtime = running(config)
    written(config, "port = 9100\n")
    assert (row(runtime, "port").saved, row(runtime, "port").waits) == ("9100", True)


async def test_paths_are_saved_as_they_were_typed(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    await running(config).live_settings.save("models_dir", "~/models")
    assert tomllib.loads(said(config)) == {"models_dir": ["~/models"]}
    assert load_settings({}, env={}, file=config).models_dir == (tmp_path / "models",)


async def test_a_new_file_is_its_owners_alone(config: Path) -> None:
    await running(config).live_settings.save("port", "1")
    assert mode(config) == 0o600


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.touch(0o640)
    replace_file(file, b"port = 2\n", keep_mode=True)
    assert mode(file) == 0o640
    replace_file(file, b"port = 3\n")
    assert mode(file) == 0o600


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "dotfiles.toml").write_text("old")
    (tmp_path / "config.toml").symlink_to(tmp_path / "dotfiles.toml")
    replace_file(tmp_path / "config.toml", b"new")
    assert (tmp_path / "config.toml").is_symlink()
    assert (tmp_path / "dotfiles.toml").read_text() == "new"


def test_a_file_that_cannot_be_finished_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "config.toml", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert (tmp_path / "config.toml").read_text() == "old"


@pytest.mark.parametrize("row", list(setting_rows(Settings(), Settings(), Sources(), {})), ids=lambda row: row.name)
def test_a_default_can_be_typed_again(row: SettingRow) -> None:
    if row.value:
        assert getattr(Settings(**{row.name: row.value}), row.name) == getattr(Settings(), row.name)


async def test_a_pipe_that_settings_came_from_is_not_waited_for_again(config: Path) -> None:
    runtime = running(written(config, "max_prompts = 8\n"))
    os.mkfifo(config.with_name("pipe"))
    os.replace(config.with_name("pipe"), config)  # noqa: PTH105
    for again in (runtime.live_settings.reload(), runtime.live_settings.save("max_prompts", "9")):
        with pytest.raises(InvalidRequest, match=r"config\.toml is a pipe, which is read only at start"):
            await again
    assert row(runtime, "max_prompts").value == "8"
