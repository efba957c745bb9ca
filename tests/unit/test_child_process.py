"""What a process that we start is given: none of our secrets, and no code from the folder that it is started in."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cluster import client
from engine.system.child_process import HUB_SECRETS, ROOT, child_environment, is_secret, python_command
from engine.worker_process.process import spawn

SECRET = "s3cret-that-nobody-else-may-read"
SECRET_NAMES = (
    *("ERICLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY"),
    *("SMTP_PASS", "REDISCLI_AUTH", "NPMTOKEN", "apikey"),
    *("OPENAI_API_KEY", "PGPASSWORD", "GITHUB_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "SOME_password"),
)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRET_NAMES:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("HTTPS_PROXY", f"http://eric:{SECRET}@proxy:3128")


def environ_of(process: subprocess.Popen[bytes]) -> bytes:
    """What the kernel says that the process was started with, as soon as the program is there."""
    while not (environ := Path(f"/proc/{process.pid}/environ").read_bytes()):
        assert process.poll() is None
    return environ


@pytest.mark.usefixtures("secrets")
def test_no_secret_is_in_the_environment_of_a_worker() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Path(os.devnull).open("wb") as nowhere:
        process = spawn("w1", theirs, nowhere.fileno())
        try:
            environ = environ_of(process)
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        finally:
            process.kill()
            process.wait()
    assert b"PATH=" in environ and b"engine.worker_process" in command
    assert SECRET.encode() not in environ + command


@pytest.mark.usefixtures("secrets")
def test_a_child_is_given_only_the_secrets_that_it_needs() -> None:
    assert not [name for name, value in child_environment().items() if SECRET in value]
    given = {name for name, value in child_environment(HUB_SECRETS).items() if SECRET in value}
    assert given == {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTPS_PROXY"}


@pytest.mark.parametrize(
    "name", ["PATH", "OLDPWD", "HF_HOME", "HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "ERICLLM_MAX_TOKENS"]
)
def test_what_is_no_secret_is_given(name: str) -> None:
    assert not is_secret(name, "http://host:80/some/where")


@pytest.mark.parametrize("paths", [None, "", os.pathsep, f"{os.pathsep}/nowhere"])
def test_a_child_imports_nothing_from_the_folder_that_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str | None
) -> None:
    (tmp_path / "engine").mkdir()
    for name in ("engine/__init__.py", "ctypes.py", "torch.py"):
        (tmp_path / name).write_text("raise SystemExit('code of the current folder ran')")
    if paths is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", paths)
    command = python_command("-c", "import ctypes, engine; print(engine.__file__)")
    done = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(ROOT / "engine" / "__init__.py"), "")
    assert command[0] == sys.executable


SPAWN = re.compile(r"subprocess\.(Popen|run|call|check_\w+|get\w+)|(asyncio\.)?create_subprocess_\w+|PtyChild")
OTHERWISE = re.compile(
    r"\bos\.(system|popen|exec|spawn|posix_spawn)|(import|from) multiprocessing|ProcessPool|shell=True"
)
ENVIRONMENTS = ("child_environment(", "worker_environment(")


def spawns(file: Path) -> Iterator[tuple[int, str, str]]:
    """Where a file starts processes: line, the name of the call, its environment."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if SPAWN.fullmatch(called):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                yield node.lineno, called, given.get("env", "")


def test_every_process_of_the_product_is_started_without_its_secrets_and_without_the_current_folder() -> None:
    found, wrong = 0, []
    for file in (*(ROOT / "engine").rglob("*.py"), *(ROOT / "console").rglob("*.py")):
        path = str(file.relative_to(ROOT))
        text = file.read_text(encoding="utf-8")
        for line, called, environment in spawns(file):
            found += 1
            if not any(each in environment for each in ENVIRONMENTS):
                wrong.append(f"{path}:{line} {called} has its environment from {environment or 'nowhere'}")
        interpreter = "sys.executable" in text.replace("Path(sys.executable).parent", "")
        if interpreter and path not in (
            "engine/system/child_process.py",
            "engine/system/install_command.py",
        ):  # which only names it
            wrong.append(f"{path} starts Python otherwise than by python_command")
        if (
            OTHERWISE.search(text) and path != "engine/worker_process/fork_server.py"
        ):  # which has a worker's environment
            wrong.append(f"{path} starts processes in a way of its own")
    assert wrong == []
    assert found >= 10


def test_the_process_that_joins_a_cluster_is_started_where_its_workers_import_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Ray would have its workers import from here
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = client._spawn(theirs)
        environ_of(process)
        started_in = Path(f"/proc/{process.pid}/cwd").readlink()
    process.kill()
    process.communicate()
    assert started_in == ROOT


def test_the_process_that_joins_a_cluster_has_the_hubs_token_and_no_other_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ERICLLM_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", "hf_token-of-the-node")
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", "/tls/key.pem")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = client._spawn(theirs)
        environ = environ_of(process)
    process.kill()
    process.communicate()
    assert b"HF_TOKEN=hf_token-of-the-node\0" in environ and b"RAY_TLS_SERVER_KEY=/tls/key.pem\0" in environ
    assert SECRET.encode() not in environ
