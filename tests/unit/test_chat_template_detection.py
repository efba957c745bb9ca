"""Which chat template a folder has, as the models screen names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.models.inspect import form_of, inspect
from tests.fakes.model_folders import write_model


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ '<|im_start|>' + message.role }}", "ChatML"),
        ("{{ '<|start_header_id|>' }}", "Llama 3"),
        ("[INST] <<SYS>>{{ system }}", "Llama 2"),
        ("[INST] {{ content }} [/INST]", "Mistral"),
        ("<start_of_turn>user", "Gemma"),
        ("{{ messages }}", "own"),
    ],
)
def test_a_template_is_known_by_the_tokens_that_it_writes(source: str, form: str) -> None:
    assert form_of(source) == form


def test_a_folder_says_which_template_it_has(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert inspect(folder).chat_template == ""
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<|im_start|>"}))
    assert inspect(folder).chat_template == "ChatML"
    (folder / "chat_template.jinja").write_text("<start_of_turn>")
    assert inspect(folder).chat_template == "Gemma"


def test_a_template_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{")
    assert inspect(folder).chat_template == ""


def test_bits_per_weight_are_those_of_the_files(tmp_path: Path) -> None:
    entry = inspect(write_model(tmp_path / "model", {"w": ("BF16", (1000, 1000))}))
    assert entry.bits_per_weight == pytest.approx(16, rel=0.01)
    assert inspect(tmp_path / "nothing").bits_per_weight is None
