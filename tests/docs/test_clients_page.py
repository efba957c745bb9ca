"""docs/api/clients.md: the real client gets an answer with the lines that the page gives, and its settings parse."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from engine.config import ModelSpec
from tests.api.harness import serving
from tests.fakes.backend import FakeBackend, saying
from tests.fakes.model import EOS_ID, write_fake_model

PAGE = Path(__file__).parents[2] / "docs/api/clients.md"
ADDRESS = "http://localhost:8000"
ANSWER = "I am well."
PROGRAMS = {"python client": (sys.executable, "-c"), "sh client": ("bash", "-euo", "pipefail", "-c")}
PARSERS: dict[str, Callable[[str], Any]] = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}


def blocks(*kinds: str) -> Iterator[Any]:
    """The page's blocks of these kinds, as parameters: the kind and the text."""
    for token in MarkdownIt("commonmark").parse(PAGE.read_text(encoding="utf-8")):
        if token.type == "fence" and token.info in kinds and token.map is not None:
            yield pytest.param(token.info, token.content, id=f"line {token.map[0] + 1}")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lines"), blocks(*PROGRAMS))
async def test_a_client_is_answered_with_the_lines_of_the_page(kind: str, lines: str, tmp_path: Path) -> None:
    spec = ModelSpec(path=write_fake_model(tmp_path), name="demo")
    async with serving(tmp_path, FakeBackend(reply=saying(ANSWER, then=EOS_ID)), spec=spec) as api:
        assert ADDRESS in lines
        client = await asyncio.create_subprocess_exec(
            *PROGRAMS[kind],
            lines.replace(ADDRESS, api.url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "LANGSMITH_TRACING": "false"},
        )
        printed, errors = await client.communicate()
    assert client.returncode == 0, errors.decode()
    assert ANSWER in printed.decode()


@pytest.mark.parametrize(("kind", "text"), blocks(*PARSERS))
def test_settings_parse_and_name_this_server(kind: str, text: str) -> None:
    assert PARSERS[kind](text)
    assert f"{ADDRESS}/v1" in text


def test_every_client_of_the_development_environment_is_run() -> None:
    run = "".join(block.values[1] for block in blocks(*PROGRAMS))
    for package in ("openai", "anthropic", "agents", "langchain_openai", "ollama", "huggingface_hub", "curl"):
        assert package in run
