"""An adapter that somebody else made: its patterns take linear time, and what is wrong with it is one sentence."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.backends.exllamav2.load_plan import read_adapter
from engine.config import AdapterSpec
from engine.errors import EngineError, UnsupportedModel
from engine.models.adapters import (
    CONFIG,
    MAX_CHARACTERS,
    MAX_EXPRESSIONS,
    MAX_TARGETS,
    AdapterConfig,
    ModulePatterns,
    describe_adapter,
    read_adapter_config,
    read_factor_headers,
    version_of,
)
from engine.models.discover import find_folders
from tests.fakes.adapters import write_adapter_config
from tests.fakes.bounds import outcome, within_bounds
from tests.fakes.model_folders import write_safetensors

MODULES = [
    f"model.layers.{layer}.{part}"
    for layer in range(12)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
]


def write(folder: Path, **config: Any) -> Path:
    """An adapter of one module of rank 4."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    write_safetensors(
        folder / "adapter_model.safetensors",
        {f"{stem}.lora_A.weight": ("F32", (4, 8)), f"{stem}.lora_B.weight": ("F32", (8, 4))},
    )
    write_adapter_config(folder, **{"r": 4, "lora_alpha": 8} | config)
    return folder


def as_peft_matches(patterns: dict[str, int], module: str, otherwise: int) -> int:
    """PEFT's rule (peft.utils.other.get_pattern_key), with Python's engine."""
    found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, otherwise)


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 1},
        {"model.layers.3.self_attn.q_proj": 1, "self_attn.q_proj": 2, "q_proj": 3},
        {"q_proj": 3, "model.layers.3.self_attn.q_proj": 1},
        {r"layers\.[0-9]+\.self_attn\.q_proj": 1, r"layers\.\d+\.mlp\..*": 2},
        {r"^model\.layers\.1\.mlp\.up_proj$": 1, "^mlp.up_proj": 2},
        {"^model.layers.[1-5].": 1, r".*\.layers\.(0|1|11)\..*": 2},
        {r".*(q|v)_proj": 1, "mlp.up_proj": 2},
        {"mlp.up_proj": 2, r".*(q|v|up)_proj": 1},
        {"(?:model|transformer)\\.layers\\.\\d+\\.mlp\\.(up|down)_proj": 5},
        {r"self\_attn\.q\-proj|mlp\.up_proj": 6},
        {"": 7},
        {"up_proj|down_proj": 8},
    ],
)
def test_modules_match_as_peft_matches_them(patterns: dict[str, int]) -> None:
    subject = ModulePatterns(patterns)
    for module in MODULES:
        assert subject.value_of(module, 0) == as_peft_matches(patterns, module, 0)


@pytest.mark.parametrize("pattern", [r"((\w|\.)+)+!", "(a*)*b", r"(.*.*)*=", r"(\w+\.?)+$^", "(x+x+)+y"])
def test_no_pattern_takes_longer_than_its_length_and_the_names(pattern: str) -> None:
    with within_bounds():
        config = AdapterConfig(rank=4, rank_pattern={pattern: 8}, alpha_pattern={pattern: 9.0})
        for module in (*MODULES, "x" * 50_000, "a.b_" * 10_000):
            assert config.rank_of(module) == 4
            assert config.scale_of(module) == 2.0


def test_as_many_patterns_as_may_be_are_compiled_and_matched_within_bounds() -> None:
    heavy = r"\w" * ((MAX_CHARACTERS - 3 * MAX_EXPRESSIONS) // MAX_EXPRESSIONS // 2)
    patterns = {f"{heavy}{number}!": number for number in range(MAX_EXPRESSIONS)}
    with within_bounds():
        subject = ModulePatterns(patterns)
        assert [subject.value_of(module, -1) for module in MODULES] == [-1] * len(MODULES)


def test_a_rank_for_each_module_of_a_large_model_is_looked_up() -> None:
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(10_000)]
    with within_bounds():
        subject = ModulePatterns({name: layer for layer, name in enumerate(names)})
        assert [subject.value_of(f"base.{name}", -1) for name in names] == list(range(10_000))


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "an invalid pattern"),
        (r"(?=q)q_proj", "lookaround or backreferences"),
        (r"(q)\1", "lookaround or backreferences"),
        ("a{1000}{1000}{1000}", "counted repetition"),
        ("\x1b]52;c;QQ==\x07(", r"\x1b]52"),
        ("(" * 400, "an invalid pattern"),
        ("(a|" * 300 + "b" + ")" * 300, "the limit is"),
    ],
)
def test_a_pattern_that_is_not_supported_is_named(tmp_path: Path, pattern: str, reason: str, key: str) -> None:
    folder = write(tmp_path, **{key: {pattern: 2}})
    assert reason in outcome(lambda: str(read_adapter_config(folder)), len(pattern), UnsupportedModel)
    assert reason in describe_adapter(folder).problem


def test_more_patterns_than_anybody_writes_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, rank_pattern={f"q{number}*": 2 for number in range(MAX_EXPRESSIONS + 1)})
    with pytest.raises(UnsupportedModel, match=r"has 65 patterns of \d+ characters"):
        read_adapter_config(folder)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a rank of 40 digits": ({"r": 10**40}, "`$.r`"),
    "a rank of 300 digits": ({"r": 10**300}, "`$.r`"),
    "a rank of a pattern of 40 digits": ({"rank_pattern": {"q_proj": 10**40}}, "`$.rank_pattern"),
    "a strength beyond any": ({"lora_alpha": 1e300}, "`$.lora_alpha`"),
    "a strength of 300 digits": ({"lora_alpha": 10**300}, "`$.lora_alpha`"),
    "a kind that is a novel": ({"peft_type": "X" * 10**6}, "is of the kind XXX"),
    "a start with escapes": ({"init_lora_weights": "pissa\x1b[31m"}, r"init_lora_weights is pissa\x1b"),
    "biases in a list": ({"bias": ["\x1b"] * 1000}, "bias is ["),
    "layers of text": ({"layers_to_transform": ["\x1b"]}, "layers_to_transform"),
}


@pytest.mark.parametrize(("config", "reason"), CONFIGS.values(), ids=CONFIGS)
def test_a_hostile_adapter_is_one_entry_with_its_reason_at_little_cost(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    folder = write(tmp_path, **config)
    size = (folder / "adapter_config.json").stat().st_size
    said = outcome(lambda: str(read_adapter_config(folder)), size, EngineError)
    assert reason in said
    assert describe_adapter(folder).problem == said


def test_names_of_tensors_and_modules_are_told_short_and_clean(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", base_model_name_or_path="\x1b[31m" + "b" * 10**6)
    assert len(describe_adapter(folder).base_model) < 200
    assert describe_adapter(folder).base_model.isprintable()
    weights = folder / "adapter_model.safetensors"
    write_safetensors(weights, {"\x1b[31m" * 5000: ("F32", (1,))})
    assert "is not a plain LoRA factor" in outcome(lambda: str(read_factor_headers(weights)), 40_000, EngineError)
    write_safetensors(weights, {"m." + "\x1b" * 9999 + ".lora_A.weight": ("F32", (1, 1))})
    assert "lacks its lora_B" in outcome(lambda: str(read_factor_headers(weights)), 40_000, EngineError)
    many = {f"m.{i}.q{i}.lora_{half}.weight": ("F32", (1, 1)) for i in range(5000) for half in "AB"}
    write_safetensors(weights, many)
    with within_bounds(weights.stat().st_size):
        found = describe_adapter(folder)
    assert (found.problem, len(found.targets)) == ("", MAX_TARGETS)


def linked(file: Path) -> None:
    outside = file.parent.parent / "outside"
    file.rename(outside)
    file.symlink_to(outside)


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("spoil", [linked, piped])
def test_a_link_out_of_the_folder_and_a_pipe_are_neither_read_nor_waited_for(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    folder = write(tmp_path / "adapter")
    spoil(folder / name)
    with within_bounds():
        assert describe_adapter(folder).problem
        assert version_of(AdapterSpec(name="x", path=folder))
        with pytest.raises(EngineError):
            read_adapter(folder)


def test_a_hostile_adapter_hides_no_other(tmp_path: Path) -> None:
    write(tmp_path / "good")
    (write(tmp_path / "bad") / "adapter_config.json").write_bytes(b'{"a":' * 40_000)
    (tmp_path / "loop").symlink_to("loop")
    folders = find_folders([tmp_path], CONFIG, hub_cache=False)
    found = {each.name: describe_adapter(each.path).problem for each in folders}
    assert found["good"] == ""
    assert "nested too deeply" in found["bad"]


def test_an_adapters_version_is_of_what_lies_in_its_folder_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    secret = tmp_path / "secret"
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to(secret)
    spec = AdapterSpec(name="x", path=folder)
    secret.write_text(json.dumps({"a": 1}))
    before = version_of(spec)
    secret.write_text(json.dumps({"a": 2}))
    assert version_of(spec) == before
