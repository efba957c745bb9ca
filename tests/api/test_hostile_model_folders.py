"""A loaded model's folder that becomes hostile, as the API tells of it: an answer each time, at little cost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.api.harness import serving
from tests.fakes.hostile_folders import FOLDERS
from tests.fakes.model import write_fake_model

pytestmark = pytest.mark.long

SECRET = "sk-of-the-operator"


async def test_every_hostile_folder_is_told_of_over_http(tmp_path: Path) -> None:
    whole = write_fake_model(tmp_path / "whole")
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    async with serving(folder) as api:
        for name, (spoil, _) in FOLDERS.items():
            spoil(folder)
            tags = await api.get("/api/tags")
            assert [model["name"] for model in tags["models"]] == ["fake:latest"], name
            shown = await api.post("/api/show", model="fake")
            assert shown["details"]["family"].isprintable(), name
            assert len((await api.get("/v1/models"))["data"]) == 1, name
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)


async def test_files_elsewhere_and_files_of_no_time_are_told_of_by_no_answer(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path / "model")
    (tmp_path / "key").write_text(SECRET)
    async with serving(folder) as api:
        (folder / "chat_template.jinja").symlink_to("../key")
        (folder / "model.safetensors").symlink_to("nowhere")
        (folder / "other.json").symlink_to("other.json")
        os.mkfifo(folder / "generation.json")
        os.utime(folder / "config.json", (2**40, 2**40))
        shown = await api.post("/api/show", model="fake")
        assert SECRET not in str(shown)
        assert shown["template"] == ""
        assert (await api.get("/api/tags"))["models"][0]["modified_at"] <= "9999-12-31T23:59:59Z"
