"""A server on a machine that others use: none of its processes and none of its files tells them anything."""

from __future__ import annotations

import json
import os
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.fakes.tiny_models import make_tiny_model
from tests.integration.headless import Headless

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KEY = "eric_what-nobody-else-may-read"
SECRETS = {"HF_TOKEN": KEY, "HUGGING_FACE_HUB_TOKEN": KEY, "OPENAI_API_KEY": KEY}


def test_no_other_process_has_a_secret_and_no_other_user_may_read_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, model = tmp_path / "home", make_tiny_model(tmp_path / "tiny")
    home.mkdir()
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    flags = ("--api-key-file", str(key_file), "--access-log", str(home / "access.jsonl"), "--record", str(home / "rec"))
    before = os.umask(0)
    try:
        server = Headless("--headless", "--model", str(model), "--port", "0", *flags, home=home)
    finally:
        os.umask(before)
    try:
        url = server.wait_for(r"listening on (http://[0-9.:]+)")[1]
        server.wait_for("is ready")
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/chat/completions", data=body, headers=headers), timeout=60
        ) as answer:
            assert answer.status == 200
        root = psutil.Process(server.process.pid)
        assert KEY not in " ".join(root.cmdline())
        has_key: dict[str, bool] = {}
        for child in root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # one of those that come and go
                has_key[" ".join(child.cmdline())] = KEY in child.environ().values()
        assert any("engine.worker_process" in command for command in has_key)
        assert [command for command, has in has_key.items() if has or KEY in command] == []
    finally:
        assert server.end() == 0
    assert KEY not in "\n".join(server.lines)
    kept = sorted(home.rglob("*"))
    assert {"access.jsonl", "rec", "ericllm.log"} <= {path.name for path in kept}
    assert [str(path) for path in kept if path.lstat().st_mode & 0o077 and not path.is_symlink()] == []
