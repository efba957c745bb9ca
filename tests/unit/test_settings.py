"""One schema for every setting: order of sources, twins, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from console.runtime.loading import refuse_unhonoured
from console.settings.addresses import checked_host
from console.settings.config_file import sample
from console.settings.rows import setting_rows
from console.settings.schema import Settings, fields
from console.settings.sources import Origin, Sources, changed, flag_name, load_settings, no_such_flag, setting_title
from console.settings.values import span_s
from engine.errors import InvalidRequest

ERICLLM_FLAGS = {
    *("verbose", "model", "lora", "host", "port", "max_model_len", "max_input_len", "gpu_split"),
    *("gpu_balance", "max_prompts", "timeout", "alpha_value", "compress_pos_emb", "num_experts"),
    *("cache_8bit", "num_workers"),
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_every_flag_of_ericllm_is_a_setting() -> None:
    assert set(Settings.model_fields) >= ERICLLM_FLAGS


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(config: Path) -> None:
    env = {"ERICLLM_MAX_PROMPTS": "5"}
    assert load_settings({}, env={}, file=config).max_prompts == 16
    config.write_text("max_prompts = 4\n")
    assert load_settings({}, env={}, file=config).max_prompts == 4
    assert load_settings({}, env=env, file=config).max_prompts == 5
    assert load_settings({"max_prompts": "6"}, env=env, file=config).max_prompts == 6


def test_the_host_defaults_to_loopback(config: Path) -> None:
    assert load_settings({}, env={}, file=config).host == "127.0.0.1"


def test_gpu_split_reads_the_same_from_flag_variable_and_file(config: Path) -> None:
    assert load_settings({"gpu_split": "16,24.5"}, env={}, file=config).gpu_split == (16.0, 24.5)
    assert load_settings({}, env={"ERICLLM_GPU_SPLIT": "16,24.5"}, file=config).gpu_split == (16.0, 24.5)
    config.write_text("gpu_split = [16, 24.5]\n")
    assert load_settings({}, env={}, file=config).gpu_split == (16.0, 24.5)


def test_cache_bits_reads_the_same_from_flag_variable_and_file(config: Path) -> None:
    assert load_settings({"cache_bits": 8}, env={}, file=config).cache_bits == 8
    assert load_settings({}, env={"ERICLLM_CACHE_BITS": "8"}, file=config).cache_bits == 8
    config.write_text("cache_bits = 8\n")
    assert load_settings({}, env={}, file=config).cache_bits == 8


def test_models_dir_takes_several_folders(tmp_path: Path, config: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folders = (tmp_path / "a", tmp_path / "b")
    assert load_settings({"models_dir": [str(path) for path in folders]}, env={}, file=config).models_dir == folders
    joined = ":".join(str(path) for path in folders)
    assert load_settings({}, env={"ERICLLM_MODELS_DIR": joined}, file=config).models_dir == folders


def test_a_draft_model_is_a_folder_or_a_gguf_file(tmp_path: Path, config: Path) -> None:
    (tmp_path / "draft.gguf").touch()
    for name in (".", "draft.gguf"):
        path = tmp_path / name
        assert load_settings({"draft_model": str(path)}, env={}, file=config).draft_model == path


@pytest.mark.parametrize(
    ("flags", "env", "text", "named"),
    [
        ({"gpu_split": "24,x"}, {}, "", "--gpu_split 24,x"),
        ({"gpu_split": "24,-1"}, {}, "", "--gpu_split 24,-1"),
        ({"max_prompts": "-1"}, {}, "", "--max_prompts -1"),
        ({"num_workers": "0"}, {}, "", "--num_workers 0"),
        ({"timeout": "-3"}, {}, "", "--timeout -3"),
        ({"models_dir": ["/no/such/folder"]}, {}, "", "/no/such/folder"),
        ({"lora": "/no/such/folder"}, {}, "", "/no/such/folder"),
        ({"models_dir": ["~no-such-user/models"]}, {}, "", "there is no folder ~no-such-user/models"),
        ({"draft_model": "/" + "x" * 300}, {}, "", "there is no folder /xxx"),
        ({"lora": "/" + "x" * 300}, {}, "", "there is no"),
        ({"max_model_len": str(10**24)}, {}, "", "max 1000000000"),
        ({"alpha_value": "inf"}, {}, "", "max 1000"),
        ({"compress_pos_emb": "0.5"}, {}, "", "--compress_pos_emb 0.5: min 1"),
        ({"timeout": "inf"}, {}, "", "--timeout inf: max"),
        ({"model": ""}, {}, "", "--model is empty"),
        ({"host": ""}, {}, "", "--host is empty"),
        ({"port": "http"}, {}, "", "--port http: must be a whole number"),
        ({}, {"ERICLLM_PORT": "http"}, "", "ERICLLM_PORT http"),
        ({}, {"ERICLLM_MAX_PROMPT": "3"}, "", "did you mean ERICLLM_MAX_PROMPTS"),
        ({}, {}, "port = 99999", "'port' in"),
        ({}, {}, "prot = 1", "did you mean port"),
        ({}, {}, "port = = 1", "cannot be read"),
        ({"cache_8bit": True, "cache_bits": 4}, {}, "", "only one of --cache-8bit and --cache-bits"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_it_and_where_it_stands(
    config: Path, flags: dict[str, object], env: dict[str, str], text: str, named: str
) -> None:
    config.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        load_settings(flags, env=env, file=config)
    assert named in caught.value.message
    assert "\n" not in caught.value.message.removesuffix("\n")


def test_the_sample_names_every_setting_and_reads_back_as_the_defaults(config: Path) -> None:
    text = sample()
    examples = {name: flag.example for name, _, flag in fields() if flag.example is not None}
    active = "\n".join(
        line.removeprefix("# ")
        for line in text.splitlines()
        if (match := re.match(r"# (\w+) = ", line)) and match[1] not in examples
    )
    config.write_text(active)
    assert load_settings({}, env={}, file=config) == Settings()
    assert all(re.search(rf"^# {name} = ", text, re.M) for name in Settings.model_fields)


def test_the_samples_examples_are_valid_values(config: Path) -> None:
    lines = [line.removeprefix("# ") for line in sample().splitlines() if re.match(r"# \w+ = ", line)]
    config.write_text("\n".join(line for line in lines if not line.startswith(("lora", "draft_model", "api_key_file"))))
    settings = load_settings({}, env={}, file=config)
    assert settings.max_model_len == 8192


def test_the_api_key_does_not_show_when_settings_are_printed(config: Path) -> None:
    settings = load_settings({"api_key": "s3cret"}, env={}, file=config)
    assert "s3cret" not in repr(settings)


def test_an_empty_api_key_is_refused_rather_than_letting_everybody_in(config: Path) -> None:
    for flags, env in (({"api_key": ""}, {}), ({}, {"ERICLLM_API_KEY": ""})):
        with pytest.raises(InvalidRequest, match="is empty"):
            load_settings(flags, env=env, file=config)


def test_an_api_key_of_the_wrong_type_is_not_printed(config: Path) -> None:
    config.write_text("api_key = 1234567\n")
    with pytest.raises(InvalidRequest) as caught:
        load_settings({}, env={}, file=config)
    assert "1234567" not in caught.value.message


def test_cache_8bit_means_eight_cache_bits(config: Path) -> None:
    assert load_settings({"cache_8bit": True}, env={}, file=config).effective_cache_bits == 8


@pytest.mark.parametrize("text", ["500ms", "500 ms", "0.5s", ".5s", "0.5"])
def test_a_duration_is_milliseconds_or_seconds(config: Path, text: str) -> None:
    assert load_settings({"slo_ttft": text}, env={}, file=config).slo_ttft == 0.5


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1500ms", 1.5), ("10m", 600), ("1.5h", 5400)])
def test_what_may_take_hours_is_read_in_minutes_and_hours_too(text: str, seconds: float) -> None:
    assert span_s(text) == seconds


def test_a_duration_in_the_file_may_be_a_number_of_seconds(config: Path) -> None:
    config.write_text("slo_itl = 0.05\n")
    assert load_settings({}, env={}, file=config).slo_itl == 0.05


@pytest.mark.parametrize("text", ["5m", "soon", "", "-1s", "nan"])
def test_what_is_no_duration_is_refused_with_examples(config: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape("not a duration; examples: 500ms, 0.5s")):
        load_settings({"slo_itl": text}, env={}, file=config)


def test_an_slo_of_nothing_is_refused(config: Path) -> None:
    with pytest.raises(InvalidRequest, match="--slo_itl 0: must be greater than 0"):
        load_settings({"slo_itl": "0"}, env={}, file=config)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "[::1]", "0.0.0.0", "*", "localhost", "gpu-1.lan", "bücher.example", "a_b", "host."]
)
def test_an_address_or_a_host_name_can_be_listened_on(host: str) -> None:
    assert checked_host(f" {host} ") == host.strip("[]")


@pytest.mark.parametrize("host", ["foo bar", "999.1.1.1", "-a", "a,b", "host!", "1.2.3"])
def test_what_is_no_address_and_no_host_name_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"^not an address or host name$"):
        checked_host(host)


@pytest.mark.parametrize(
    ("name", "title"),
    [("max_prompts", "Max prompts"), ("gpu_split", "GPU split"), ("slo_itl", "SLO ITL"), ("port", "Port")],
)
def test_a_setting_is_named_in_words(name: str, title: str) -> None:
    assert setting_title(name) == title


def test_a_changed_setting_out_of_bounds_is_named_as_in_a_form() -> None:
    with pytest.raises(InvalidRequest, match=r"^Max prompts 999999: max 4096$") as caught:
        changed(Settings(), {"max_prompts": 999999})
    assert caught.value.details["param"] == "max_prompts"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--workers", "--num-workers"),
        ("--prompts", "--max-prompts"),
        ("--num-worker", "--num-workers"),
        ("--worker-hots", "--worker-host"),
    ],
)
def test_a_flag_that_does_not_exist_suggests_the_one_that_has_its_words(given: str, meant: str) -> None:
    flags = map(flag_name, Settings.model_fields)
    assert no_such_flag(given, flags) == f"there is no {given}; did you mean {meant}?"


def with_gpu(**flags: object) -> Sources:
    """The sources on a machine with an NVIDIA GPU, with these flags."""
    return Sources(flags=flags, has_gpu=True)


def test_a_machine_with_a_gpu_has_the_defaults_of_one() -> None:
    sources = with_gpu()
    assert (sources.settings().max_prompts, sources.settings().step_tokens) == (64, 2048)
    assert sources.origin("max_prompts") == Origin("default", "")
    assert {name: flag.gpu for name, _, flag in fields() if flag.gpu} == sources.gpu_defaults
    [row] = [
        row for row in setting_rows(sources.settings(), sources.settings(), sources, {}) if row.name == "max_prompts"
    ]
    assert (row.value, row.default, row.waits) == ("64", "64", False)
    assert sample().count("64 with an NVIDIA GPU, 32 for exllamav2 and exllamav3") == 1


def test_models_on_a_library_have_a_default_of_their_own_until_the_setting_has_a_value() -> None:
    assert [with_gpu(**given).library_prompts for given in ({}, {"max_prompts": 64})] == [32, 0]
    assert Sources().library_prompts == with_gpu(devices="sim:8").library_prompts == 0
    assert replace(with_gpu(), tuned={"max_prompts": 24}, tuned_in="tuned.json").library_prompts == 0


@pytest.mark.parametrize(("by_backend", "source"), [(("max_prompts",), "default"), ((), "console")])
def test_the_default_of_a_library_is_one_until_it_is_set_by_hand(by_backend: tuple[str, ...], source: str) -> None:
    settings, turned = with_gpu().settings(), {"max_prompts": 32}
    rows = setting_rows(settings, settings, with_gpu(), turned, by_backend=by_backend)
    (row,) = [each for each in rows if each.name == "max_prompts"]
    assert (row.value, row.source, row.waits) == ("32", source, source == "console")


def test_what_is_given_stays_with_a_gpu_too() -> None:
    settings = with_gpu(max_prompts=16, step_tokens=512).settings()
    assert (settings.max_prompts, settings.step_tokens) == (16, 512)
    tuned = replace(with_gpu(), tuned={"max_prompts": 24}, tuned_in="tuned.json").settings()
    assert (tuned.max_prompts, tuned.step_tokens) == (24, 2048)


@pytest.mark.parametrize("sources", [Sources(), with_gpu(devices="sim:8")], ids=["no GPU", "simulated"])
def test_a_machine_that_computes_on_its_cpu_has_the_defaults_of_one(sources: Sources) -> None:
    settings = sources.settings()
    assert (settings.max_prompts, settings.step_tokens) == (16, 512)


def test_a_default_for_gpus_is_no_request_that_another_backend_refuses() -> None:
    refuse_unhonoured(with_gpu().settings(), "exllamav2")
    with pytest.raises(InvalidRequest, match="--step_tokens requires --backend torch"):
        refuse_unhonoured(with_gpu(step_tokens=1024).settings(), "exllamav2")
