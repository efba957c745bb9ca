"""Reading a model folder's tokenizer and what the files beside it say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import SamplingParams
from engine.errors import UnsupportedModel
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_config import GenerationDefaults
from tests.fakes import tiny_tokenizers


def load(folder: Path, kind: str = "byte_level", **files: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_folder(tiny_tokenizers.save(getattr(tiny_tokenizers, kind)(), folder, **files))


def test_a_folder_without_tokenizer_json_is_refused_by_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json.*tokenizer\.model alone is not read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json", "tokenizer_config.json"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, file: str) -> None:
    load(tmp_path)
    (tmp_path / file).write_text("{broken")
    with pytest.raises(UnsupportedModel, match=file):
        Tokenizer.from_folder(tmp_path)


def test_end_tokens_are_gathered_from_every_file_once(tmp_path: Path) -> None:
    subject = load(
        tmp_path,
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 8, "text_config": {"eos_token_id": 9}},
        tokenizer_config={"eos_token": {"content": "</s>", "special": True}},
    )
    assert subject.eos_token_ids == (7, 8, 9, 2)


def test_a_model_that_names_no_end_token_has_none(tmp_path: Path) -> None:
    assert load(tmp_path, config={"eos_token_id": None}).eos_token_ids == ()


def test_the_tokenizers_bos_wins_over_the_configs(tmp_path: Path) -> None:
    assert load(tmp_path / "a", config={"bos_token_id": 5}, tokenizer_config={"bos_token": "<s>"}).bos_token_id == 1
    assert load(tmp_path / "b", config={"bos_token_id": 5}).bos_token_id == 5
    assert load(tmp_path / "c").bos_token_id is None


@pytest.mark.parametrize("text", ["the", "<s>the", "<s> the"])
def test_bos_is_added_and_never_doubled(tmp_path: Path, text: str) -> None:
    subject = load(tmp_path, "byte_fallback", tokenizer_config={"bos_token": "<s>"})
    assert subject.encode(text).count(1) == 1
    assert subject.encode(text)[0] == 1


def test_template_text_is_encoded_as_it_is(tmp_path: Path) -> None:
    subject = load(tmp_path, "byte_fallback", tokenizer_config={"bos_token": "<s>"})
    assert subject.encode("<s>the", add_special_tokens=False)[0] == 1
    assert 1 not in subject.encode("the", add_special_tokens=False)


def test_a_length_limit_saved_with_the_tokenizer_cuts_nothing(tmp_path: Path) -> None:
    backend = tiny_tokenizers.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    subject = Tokenizer.from_folder(tiny_tokenizers.save(backend, tmp_path))
    assert (
        subject.decode(subject.encode("a much longer text than four tokens")) == "a much longer text than four tokens"
    )
    assert len(subject.encode("a")) == 1


def test_control_tokens_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    subject = load(tmp_path)
    ids = [1, *subject.encode("the"), 2]
    assert subject.decode(ids) == "the"
    assert subject.decode(ids, skip_special_tokens=False) == "<s>the</s>"
    assert subject.special_ids == {0, 1, 2}


def test_a_token_is_known_by_its_spelling_and_its_bytes(tmp_path: Path) -> None:
    subject = load(tmp_path)
    ids = subject.encode("é the😀")
    assert b"".join(map(subject.token_bytes, ids)) == "é the😀".encode()
    assert subject.id_to_token(10**6) == ""
    assert all(subject.token_to_id(subject.id_to_token(i)) == i for i in ids)


def test_the_makers_sampling_settings_are_read(tmp_path: Path) -> None:
    subject = load(tmp_path / "a", generation_config={"temperature": 0.6, "top_k": 20, "do_sample": True})
    assert subject.generation_defaults == GenerationDefaults(temperature=0.6, top_k=20)
    greedy = load(tmp_path / "b", generation_config={"temperature": 0.6, "do_sample": False})
    assert greedy.generation_defaults.temperature == 0.0
    with pytest.raises(UnsupportedModel, match="top_k"):
        load(tmp_path / "c", generation_config={"top_k": "many"})


def test_settings_that_no_request_could_have_are_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json is wrong: top_p is 7\.0"):
        load(tmp_path / "a", generation_config={"top_p": 7.0})
    off = load(tmp_path / "b", generation_config={"top_k": -1, "max_new_tokens": 9})
    assert off.generation_defaults.as_params() == SamplingParams(max_tokens=9)
