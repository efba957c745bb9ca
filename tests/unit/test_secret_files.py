"""A key comes from a file where flags are seen by all, and nobody is left in the dark where others can read it."""

from __future__ import annotations

import argparse
import stat
from pathlib import Path

import pytest

from console.bench.kinds import PLANS
from console.cli.bench_measure import parse_arguments
from console.cli.remote_args import add_key, key_of
from console.runtime.runtime import Runtime, api_settings
from console.settings.secrets import MAX_SECRET_BYTES, folder_warnings, key_warnings, read_secret
from console.settings.sources import Sources
from engine.errors import InvalidRequest
from tests.fakes.bounds import outcome
from tests.fakes.owners import belongs_to_another

KEY = "eric_what-nobody-else-may-read"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text(f"  {KEY}\r\nwhat comes next is no part of it\n")
    file.chmod(0o600)
    return file


def sources(file: Path, flags: dict[str, str] | None = None, env: dict[str, str] | None = None) -> Sources:
    return Sources.read(flags or {}, env=env or {}, file=file)


def warnings(found: Sources) -> list[str]:
    return list(key_warnings(found.settings(), found))


@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_the_server_takes_its_key_from_a_file(tmp_path: Path, key_file: Path, source: str) -> None:
    config = tmp_path / "config.toml"
    if source == "file":
        config.write_text(f'api_key_file = "{key_file}"\n')
    flags = {"api_key_file": str(key_file)} if source == "flag" else {}
    env = {"ERICLLM_API_KEY_FILE": str(key_file)} if source == "variable" else {}
    settings = sources(config, flags, env).settings()
    assert api_settings(settings, None).api_key == KEY
    assert KEY not in repr(settings)


def test_a_key_that_comes_first_hides_the_other_kind_and_two_at_once_are_refused(
    tmp_path: Path, key_file: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('api_key = "of the file"\n')
    named = {"api_key_file": str(key_file)}
    assert api_settings(sources(config, named).settings(), None).api_key == KEY
    typed = sources(config, {"api_key": "typed"}, {"ERICLLM_API_KEY_FILE": str(key_file)}).settings()
    assert api_settings(typed, None).api_key == "typed"
    with pytest.raises(InvalidRequest, match="give only one"):
        sources(config, {**named, "api_key": "typed"}).settings()


@pytest.mark.parametrize(
    "content", [b"", b"\n" + KEY.encode(), b" \t\n", b"k" * (MAX_SECRET_BYTES + 1), b"\xff\xfe", b"a\x1b[31mb"]
)
def test_a_file_without_a_key_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    said = outcome(lambda: read_secret(file, "--api-key-file"), len(content), InvalidRequest)
    assert said.startswith(f"--api-key-file {file} holds no key: its first line ")


@pytest.mark.parametrize("name", ["no-such-file", ".", "/dev/zero"])
def test_what_is_no_file_of_a_key_is_one_sentence_and_costs_nothing(tmp_path: Path, name: str) -> None:
    said = outcome(lambda: read_secret(tmp_path / name, "--api-key-file"), 0, InvalidRequest)
    assert said.startswith("--api-key-file ")


def client(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_key(parser)
    return parser.parse_args(argv)


def test_attach_top_and_record_take_a_key_from_a_file(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERICLLM_API_KEY", "of the environment")
    assert key_of(client("--api-key-file", str(key_file))) == KEY
    assert key_of(client("--api-key", "typed")) == "typed"
    assert key_of(client()) == "of the environment"
    monkeypatch.delenv("ERICLLM_API_KEY")
    assert key_of(client()) is None
    monkeypatch.setenv("ERICLLM_API_KEY_FILE", str(key_file))
    assert key_of(client()) == KEY
    with pytest.raises(SystemExit):
        client("--api-key", "typed", "--api-key-file", str(key_file))


def test_a_bench_of_a_server_takes_its_key_from_a_file(key_file: Path) -> None:
    plan = next(iter(PLANS.values()))
    url = ("--url", "http://127.0.0.1:1")
    assert parse_arguments([*url, "--key-file", str(key_file)], argparse.ArgumentParser(), plan).key == KEY
    with pytest.raises(SystemExit):
        parse_arguments([*url, "--key", "typed", "--key-file", str(key_file)], argparse.ArgumentParser(), plan)


def test_a_key_on_the_command_line_is_warned_of_and_one_in_a_private_file_is_not(
    tmp_path: Path, key_file: Path
) -> None:
    config = tmp_path / "config.toml"
    (said,) = warnings(sources(config, {"api_key": KEY}))
    assert "--api-key-file" in said and KEY not in said
    assert warnings(sources(config, {"api_key_file": str(key_file)})) == []
    assert warnings(sources(config, env={"ERICLLM_API_KEY": KEY})) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_key_that_others_may_read_is_warned_of_by_the_name_of_its_file(
    tmp_path: Path, key_file: Path, mode: int
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'api_key = "{KEY}"\n')
    config.chmod(mode)
    assert warnings(sources(config)) == [f"{config} holds a key and is readable by other users: `chmod 600 {config}`"]
    config.chmod(0o600)
    assert warnings(sources(config)) == []
    key_file.chmod(mode)
    (said,) = warnings(sources(config, {"api_key_file": str(key_file)}))
    assert str(key_file) in said


def test_a_file_of_another_user_that_is_read_by_ones_group_is_not_warned_of(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file.chmod(0o440)
    named = sources(tmp_path / "config.toml", {"api_key_file": str(key_file)})
    assert len(warnings(named)) == 1
    monkeypatch.setattr("os.geteuid", lambda: key_file.stat().st_uid + 1)
    assert warnings(named) == []
    key_file.chmod(0o444)
    assert len(warnings(named)) == 1


def test_a_certificates_key_that_others_may_read_is_warned_of(tmp_path: Path, key_file: Path) -> None:
    named = sources(tmp_path / "config.toml", {"tls_key": str(key_file)})
    assert warnings(named) == []
    key_file.chmod(0o644)
    assert len(warnings(named)) == 1


def test_a_folder_of_another_user_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (tmp_path, tmp_path / "not-there-yet", tmp_path / ("n" * 300))
    assert list(folder_warnings(folders)) == []
    belongs_to_another(tmp_path, monkeypatch)
    [said] = folder_warnings(folders)
    assert said.startswith(f"{tmp_path} belongs to another user")


async def test_the_warning_is_in_the_log_of_a_program_that_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = sources(tmp_path / "config.toml", {"api_key": KEY, "api": "false", "worker_host": "thread"})
    runtime = Runtime(found.settings(), sources=found)
    await runtime.start()
    await runtime.close(drain_s=0.0)
    (said,) = [record.getMessage() for record in caplog.records if "--api-key" in record.getMessage()]
    assert KEY not in said


async def test_a_settings_file_that_a_key_is_saved_into_becomes_its_owners_alone(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("port = 8001\n")
    config.chmod(0o644)
    found = sources(config)
    runtime = Runtime(found.settings(), sources=found)
    await runtime.live_settings.save("port", "8002")
    assert stat.S_IMODE(config.stat().st_mode) == 0o644
    await runtime.live_settings.save("api_key", KEY)
    assert KEY in config.read_text()
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
