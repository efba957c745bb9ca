"""An error names the field at fault as its client does; words of its sentence that happen to be a field's name stay."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import console
from console.api.dialects import anthropic, kobold, ollama, tgi
from console.api.dialects.textgen import generate as textgen
from console.api.http.errors import ErrorFormatter
from console.api.server import ApiSettings
from engine.errors import InvalidRequest
from tests.api.harness import Served, serving

ROOT = Path(console.__file__).parents[1]
RENAMED = {name for dialect in (anthropic, kobold, ollama, textgen, tgi) for name in dialect.FIELD_NAMES}
RAISING = (
    *(ROOT / "console" / "api" / "requests").glob("*.py"),
    ROOT / "console" / "api" / "context.py",
    ROOT / "engine" / "config" / "sampling.py",
    ROOT / "engine" / "requests" / "admission.py",
)
"""Where errors about fields are raised, whatever the dialect."""

TEXT = {"prompt": "x"}


async def refused(api: Served, path: str, status: int, body: dict[str, Any]) -> str:
    """The refusal of a body, as text."""
    async with api.http.post(path, json=body) as response:
        assert response.status == status
        return await response.text()


@pytest.mark.parametrize("word", ["seed", "stop", "max_tokens"])
@pytest.mark.parametrize("field", ["model", "lora"])
async def test_a_model_or_an_adapter_that_is_called_like_a_field_keeps_its_name(
    api: Served, field: str, word: str
) -> None:
    told = await refused(api, "/api/v1/generate", 404, {**TEXT, field: word})
    assert f"'{word}'" in told
    assert kobold.FIELD_NAMES[word] not in told


@pytest.mark.parametrize(
    ("format_error", "theirs"),
    [
        (kobold.format_error, "stop_sequence"),
        (anthropic.format_error, "stop_sequences"),
        (textgen.format_error, "stopping_strings"),
    ],
)
def test_the_field_is_renamed_and_the_prose_about_it_is_not(format_error: ErrorFormatter, theirs: str) -> None:
    shown = str(format_error(InvalidRequest("stop has a seed, and may stop no answer", param="stop")))
    assert f"'{theirs} has a seed, and may stop no answer'" in shown
    shown = str(format_error(InvalidRequest("The server is to stop", param="state")))
    assert "'The server is to stop'" in shown


WORDS = [f"w{i}" for i in range(1000)]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body", "begins"),
    [
        ("/api/v1/generate", {**TEXT, "rep_pen": 0}, "rep_pen is 0.0; it must be "),
        ("/api/v1/generate", {**TEXT, "stop_sequence": WORDS}, "stop_sequence takes up to "),
        ("/api/v1/generate", {**TEXT, "typical": 7}, "typical is 7.0; it must be "),
        ("/api/v1/generate", {**TEXT, "max_new_tokens": 8, "min_length": 9}, "min_length is 9; the answer may have 8 "),
        (
            "/api/v1/generate",
            {**TEXT, "max_new_tokens": 8, "guidance_scale": 200, "negative_prompt": "y"},
            "guidance_scale is 200.0; ",
        ),
        ("/api/generate", {**TEXT, "options": {"repeat_penalty": 0}}, "repeat_penalty is 0.0; it must be "),
        ("/api/generate", {**TEXT, "options": {"tfs_z": 3}}, "tfs_z is 3.0; it must be "),
        ("/generate", {"inputs": "x", "parameters": {"repetition_penalty": 0}}, "repetition_penalty is 0.0; "),
        ("/v1/messages", {"max_tokens": 1, "messages": HELLO, "stop_sequences": WORDS}, "stop_sequences takes "),
    ],
)
async def test_a_refused_field_is_named_in_the_client_s_word(
    api: Served, path: str, body: dict[str, Any], begins: str
) -> None:
    assert f'"{begins}' in await refused(api, path, 400, body)


async def test_what_the_settings_refuse_is_named_likewise(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_choices=2, max_output_tokens=4)) as api:
        wanted = {"best_of": 3, "do_sample": True}
        told = await refused(api, "/generate", 400, {"inputs": "x", "parameters": wanted})
        assert '"best_of is 3, which makes 3 answers; the limit is 2"' in told
        told = await refused(api, "/generate", 400, {"inputs": "x", "parameters": {"max_new_tokens": 5}})
        assert '"max_new_tokens is 5; the limit is 4"' in told


def test_sentences_about_fields_that_dialects_rename_begin_with_the_field() -> None:
    wrong = [
        f"{file.name}:{line}: {sentence}"
        for file in RAISING
        for line, param, sentence in _errors(ast.parse(file.read_text()))
        if param in RENAMED and not sentence.startswith(f"{param} ") and _names_a_field(sentence)
    ]
    assert wrong == []


def _errors(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, field and sentence of each error that is raised about one field; the sentence as far as it is constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("InvalidRequest", "ContextLengthExceeded"):
            param = next((each.value for each in node.keywords if each.arg == "param"), None)
            parts = node.args[0].values if node.args and isinstance(node.args[0], ast.JoinedStr) else node.args
            words = [part.value for part in parts if isinstance(part, ast.Constant)]
            if isinstance(param, ast.Constant):
                yield node.lineno, param.value, "…".join(map(str, words))


def _names_a_field(sentence: str) -> bool:
    return not RENAMED.isdisjoint(sentence.replace(",", " ").replace(":", " ").split())
