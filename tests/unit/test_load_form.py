"""The form of a load's own settings: what it shows, how values are stepped and typed; paces; what is remembered."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from console.settings.load_options import NO_OPTIONS, LoadOptions
from console.tui.load_pace import LoadPaces, Pace
from console.tui.screens.models.load_form import LoadForm
from console.tuning.last_settings import MAX_MODELS, LastSettings, model_key
from engine.backends.base import LoadProgress
from tests.fakes.link import MODELS

DEFAULTS = LoadOptions(num_workers=2, max_prompts=8, cache_bits=16, weights="auto", dtype="auto")
MIB = 2**20


def form(own: LoadOptions = NO_OPTIONS, *, exllama: bool = False) -> LoadForm:
    entry = msgspec.structs.replace(MODELS[1], backend="exllamav2" if exllama else "torch")
    return LoadForm(entry, own, DEFAULTS)


# -- the form ---------------------------------------------------------------------------------------------------------


def test_a_form_shows_what_holds_where_the_load_sets_nothing_itself() -> None:
    plain = form()
    assert [plain.value(field.name) for field in plain.fields] == [2, 8, 8192, 16, "auto", "auto"]
    assert not any(plain.origin(field.name) for field in plain.fields)


@pytest.mark.parametrize(("exllama", "prompts"), [(False, 64), (True, 32)])
def test_a_default_of_max_prompts_that_is_the_backend_s_is_shown_as_that(exllama: bool, prompts: int) -> None:
    plain = form(exllama=exllama)
    assert replace(plain, defaults=msgspec.structs.replace(DEFAULTS, max_prompts=None)).value("max_prompts") == prompts


def test_a_context_of_the_programs_settings_is_the_default() -> None:
    plain = LoadForm(MODELS[1], NO_OPTIONS, msgspec.structs.replace(DEFAULTS, max_model_len=4096))
    assert plain.value("max_model_len") == 4096


def test_a_step_makes_a_value_the_loads_own() -> None:
    stepped = form().with_step("num_workers", 1)
    assert stepped.own == LoadOptions(num_workers=3)
    assert (stepped.is_own("num_workers"), stepped.origin("num_workers")) == (True, "set here, default 2")
    assert stepped.without("num_workers").own == NO_OPTIONS


@pytest.mark.parametrize(
    ("name", "by", "expected"),
    [("max_prompts", 1, 12), ("max_prompts", -1, 6), ("max_model_len", -1, 6144), ("cache_bits", -1, 8)],
)
def test_values_step_by_what_makes_a_difference(name: str, by: int, expected: int) -> None:
    assert form().with_step(name, by).value(name) == expected  # type: ignore[arg-type]


def test_steps_end_at_what_can_be() -> None:
    assert form().with_step("max_model_len", 1).value("max_model_len") == 8192
    assert form(LoadOptions(num_workers=1)).with_step("num_workers", -1).value("num_workers") == 1
    assert form(LoadOptions(cache_bits=4)).with_step("cache_bits", -1).value("cache_bits") == 4
    assert form(LoadOptions(dtype="float32")).with_step("dtype", 1).value("dtype") == "float32"


def test_a_value_between_two_steps_goes_to_the_next() -> None:
    odd = form(LoadOptions(max_model_len=5000))
    assert odd.with_step("max_model_len", 1).value("max_model_len") == 6144
    assert odd.with_step("max_model_len", -1).value("max_model_len") == 4096


def test_a_number_out_of_range_is_kept_as_it_was_typed_and_said_to_be_out_of_range() -> None:
    assert form().out_of_range("num_workers") == ""
    for name, number, said in (("num_workers", 250, "1 to 64"), ("max_model_len", 0, "1 to 1,000,000,000")):
        typed = form().with_number(name, number)  # type: ignore[arg-type]
        assert (typed.value(name), typed.out_of_range(name)) == (number, said)  # type: ignore[arg-type]
    assert form().with_number("num_workers", 250).with_step("num_workers", -1).value("num_workers") == 64


def test_a_typed_number_is_one_of_the_choices_or_changes_nothing() -> None:
    assert form().with_number("cache_bits", 8).own == LoadOptions(cache_bits=8)
    assert form().with_number("cache_bits", 5).own == NO_OPTIONS


def test_a_form_that_shows_all_has_a_line_for_every_option_and_takes_what_is_typed() -> None:
    few, every = form(), replace(form(), shows_all=True)
    assert "gpu_split" not in [field.name for field in few.fields]
    assert "gpu_split" in [field.name for field in every.fields]
    split = every.with_text("gpu_split", "16,24")
    assert (split.own, split.value_text("gpu_split")) == (LoadOptions(gpu_split=(16.0, 24.0)), "16,24")
    assert "gpu_split" in [field.name for field in replace(split, shows_all=False).fields]
    assert every.with_step("deterministic", 1).own == LoadOptions(deterministic=True)
    assert every.with_step("gpu_split", 1) == every
    with pytest.raises(ValueError, match="one of"):
        every.with_text("attention", "fastest")


def test_each_backend_has_the_choices_that_it_honours() -> None:
    exllama = form(LoadOptions(cache_bits=8), exllama=True)
    assert exllama.with_step("cache_bits", -1).value("cache_bits") == 6
    assert "dtype" not in [field.name for field in exllama.fields]
    assert form(LoadOptions(cache_bits=8)).with_step("cache_bits", -1).value("cache_bits") == 4


# -- paces ------------------------------------------------------------------------------------------------------------


def weights(done_mib: int, total_mib: int = 100) -> LoadProgress:
    return LoadProgress(phase="weights", done=done_mib * MIB, total=total_mib * MIB)


def test_a_pace_is_told_after_a_second_and_says_what_is_left() -> None:
    paces = LoadPaces()
    assert paces.observe(10.0, {"w0": weights(0)}) == {}
    assert paces.observe(10.5, {"w0": weights(5)}) == {}
    assert paces.observe(12.0, {"w0": weights(20)}) == {"w0": Pace(10 * MIB, 8.0)}


def test_a_load_that_stands_still_says_so() -> None:
    paces = LoadPaces()
    paces.observe(10.0, {"w0": weights(5)})
    assert paces.observe(13.0, {"w0": weights(5)}) == {"w0": Pace(0.0, None)}


def test_a_compiler_has_no_pace() -> None:
    paces = LoadPaces()
    for second in range(5):
        compiling = LoadProgress(phase="kernels", done=second // 4, total=7, unit="files")
        assert paces.observe(float(second), {"w0": compiling}) == {}


def test_a_new_phase_and_a_new_load_are_measured_from_their_beginning() -> None:
    paces = LoadPaces()
    paces.observe(0.0, {"w0": weights(0)})
    assert paces.observe(5.0, {"w0": LoadProgress(phase="kv_cache", done=0, total=9)}) == {}
    paces.observe(6.0, {})
    assert paces.observe(7.0, {"w0": LoadProgress(phase="kv_cache", done=3, total=9)}) == {}


def test_only_the_last_seconds_count() -> None:
    paces = LoadPaces()
    for second in range(20):
        paces.observe(float(second), {"w0": weights(0 if second < 10 else 2 * (second - 9))})
    pace = paces.observe(20.0, {"w0": weights(22)})["w0"]
    assert pace.per_s == 2 * MIB


# -- what is remembered -----------------------------------------------------------------------------------------------


def test_settings_are_kept_from_one_run_to_the_next(tmp_path: Path) -> None:
    own = LoadOptions(max_model_len=4096, cache_bits=8)
    LastSettings(tmp_path).note("/models/a", own)
    assert LastSettings(tmp_path).of("/models/a") == own
    assert LastSettings(tmp_path).of("/models/b") == NO_OPTIONS
    LastSettings(tmp_path).forget("/models/a")
    assert LastSettings(tmp_path).of("/models/a") == NO_OPTIONS


def test_a_file_that_is_broken_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model-settings.json").write_text("{")
    last = LastSettings(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert last.of("/models/a") == NO_OPTIONS
    assert "cannot be read" in caplog.text
    last.note("/models/a", LoadOptions(num_workers=2))
    assert last.of("/models/a").num_workers == 2


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file")
    with caplog.at_level(logging.WARNING):
        LastSettings(tmp_path / "state").note("/models/a", LoadOptions(num_workers=2))
    assert "cannot be written" in caplog.text


def test_of_too_many_models_the_oldest_are_forgotten() -> None:
    last = LastSettings(None)
    for number in range(MAX_MODELS + 1):
        last.note(str(number), LoadOptions(num_workers=1))
    assert last.of("0") == NO_OPTIONS
    assert last.of("1") != NO_OPTIONS


def test_a_model_of_the_hub_is_remembered_whatever_its_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("c" * 40)
    assert model_key("anything", snapshot) == "org/name"
    assert model_key("org/name@main", None) == "org/name"
    assert model_key("tiny", Path("/models/tiny")) == "/models/tiny"
